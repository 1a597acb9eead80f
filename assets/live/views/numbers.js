// The four numbers that state the answer, as text: each says on hover and focus where it comes from.
import { bytes, count, figures, paintTokens, percent, seconds, themeOf } from "./draw.js";
import { ROW_OUTPUT, ROW_T, firstAfter } from "./clock.js";
import { element, heading, setText } from "./dom.js";
import { SCRAPED, age, stale } from "./scraped.js";

const REFRESH_MS = 250;
const RATE_S = 3; // "now" of a rate
const HITS_OVER = 32; // admissions that the hit rate looks back on

/** Output tokens per second over the last RATE_S seconds before `now`; null when none were said. */
export function outputRate(series, now) {
  const from = firstAfter(series, now - RATE_S);
  let tokens = 0;
  for (let i = from; i < series.length; i++) tokens += series[i][ROW_OUTPUT];
  if (!tokens) return null;
  // A run that began a moment ago is divided by its own length, not by the whole window.
  const began = from > 0 && series[from][ROW_T] - series[from - 1][ROW_T] < 0.5 ? now - RATE_S : series[from][ROW_T] - series[from][1];
  return tokens / Math.max(0.25, Math.min(RATE_S, now - began));
}

/** Nearest rank: the smallest value that at least the share q of the values do not exceed; null without values. */
export function quantile(values, q) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)];
}

/** Prompt tokens found in the prefix cache ÷ prompt tokens, over the newest admissions; null without one. */
export function hitRate(state, over = HITS_OVER) {
  const admitted = Object.values(state.requests)
    .filter((r) => r.queue_s !== null && r.queue_s !== undefined)
    .sort((a, b) => b.request - a.request)
    .slice(0, over);
  const asked = admitted.reduce((sum, r) => sum + r.prompt_tokens, 0);
  if (!asked) return null;
  return { share: admitted.reduce((sum, r) => sum + r.cached_tokens, 0) / asked, over: admitted.length };
}

export const NONE = "No traffic";
export const MISSING = "Not available";

/** name → [label, (state, now, units) → [value, line below], how it is obtained] */
const CARDS = {
  rate: [
    "Output tokens per second",
    (state, now) => {
      const rate = outputRate(state.series, now);
      const users = state.running.length;
      if (rate === null) return [NONE, `${count(state.totals.output_tokens)} tokens since the start`];
      return [`${figures(rate)} tok/s`, users > 1 ? `${figures(rate / users)} tok/s per user` : `${count(state.totals.output_tokens)} tokens since the start`];
    },
    `Tokens sampled in the last ${RATE_S} s ÷ ${RATE_S} s, counted by the engine step by step.`,
  ],
  flight: [
    "Requests in flight",
    (state) => {
      const running = state.running.length;
      const all = Object.values(state.requests).filter((r) => r.state !== "finished").length;
      if (!all && !state.totals.queued) return [NONE, "nothing asked yet"];
      return [count(all), `${count(running)} running + ${count(all - running)} waiting`];
    },
    "Requests that are not finished: running ones are in the batch, waiting ones queue for a place or for blocks.",
  ],
  blocks: [
    "KV blocks used",
    (state, now, units) => {
      const { pool, num_blocks: total, block_size: slots } = state;
      if (!total) return [NONE, ""];
      const filled = pool.used_blocks ? pool.filled_slots / (pool.used_blocks * slots) : null;
      const size = bytes(pool.used_blocks * slots * state.model.kv_bytes_per_token, units);
      return [percent(pool.used_blocks / total), filled === null ? `0 of ${count(total)} blocks` : `${percent(filled)} of their slots filled · ${size}`];
    },
    "Used: blocks that at least one request holds ÷ blocks of the pool. Filled: slots with keys and values ÷ slots of used blocks. Close to 100 % is normal under load.",
  ],
  used: [
    "KV blocks used",
    (state, now, units) => {
      const { pool, num_blocks: total, block_size: slots } = state;
      if (!total) return [NONE, ""];
      return [percent(pool.used_blocks / total), `${count(pool.used_blocks)} of ${count(total)} blocks · ${bytes(pool.used_blocks * slots * state.model.kv_bytes_per_token, units)}`];
    },
    "Blocks that at least one request holds ÷ blocks of the pool. Close to 100 % is normal under load.",
  ],
  ttft: [
    "p95 time to first token",
    (state) => {
      const values = state.ttfts.map((row) => row[1]);
      const p95 = quantile(values, 0.95);
      if (p95 === null) return [NONE, "no first token yet"];
      return [seconds(p95), `p50 ${seconds(quantile(values, 0.5))} · ${count(values.length)} requests`];
    },
    "TTFT: from arrival at the engine to the end of the step that sampled the first token, queueing included. p95 by nearest rank: the smallest value that at least 95 % of the last 512 requests do not exceed.",
  ],
  filled: [
    "Slots filled in used blocks",
    (state) => {
      const { pool, block_size: slots } = state;
      if (!pool.used_blocks) return [NONE, "no block is used now"];
      return [percent(pool.filled_slots / (pool.used_blocks * slots)), `${count(pool.wasted_slots)} slots wasted of ${count(pool.used_blocks * slots)}`];
    },
    "Slots with keys and values ÷ slots of used blocks. Only the last block of a request can have empty slots.",
  ],
  saved: [
    "Saved by sharing",
    (state, now, units) => {
      const saved = state.pool.shared_saved_blocks;
      if (!state.pool.used_blocks) return [NONE, "no block is used now"];
      const size = bytes(saved * state.block_size * state.model.kv_bytes_per_token, units);
      return [`${count(saved)} blocks`, saved ? `${size} · ${percent(saved / (state.pool.used_blocks + saved))} of what would be needed` : "no block has two holders"];
    },
    "Σ (holders − 1) over used blocks: blocks that would be needed on top if every request kept its own copy.",
  ],
  hits: [
    "Prefix hit rate",
    (state) => {
      const hit = hitRate(state);
      if (state.config.prefix_cache === false) return ["Off", "the prefix cache is switched off"];
      if (!hit) return [NONE, "no prompt admitted yet"];
      return [percent(hit.share), `of the prompt tokens of the last ${count(hit.over)} requests`];
    },
    `Prompt tokens found in the prefix cache ÷ prompt tokens, over the last ${HITS_OVER} admitted requests (resuming after a preemption does not count).`,
  ],
};

export class Numbers {
  constructor(root, live) {
    this.live = live;
    this.root = root;
    this.units = "GiB";
    this.heard = performance.now();
    this.row = element("div", { class: "numbers" });
    this.cards = [];
    root.append(this.row);
    this.timer = setInterval(() => this.write(), REFRESH_MS);
  }

  options({ title, show, units }) {
    heading(this.root, title, 1);
    this.units = units ?? "GiB";
    const wanted = show ?? ["rate", "flight", "blocks", "ttft"];
    if (wanted.join() !== this.wanted) {
      this.wanted = wanted.join();
      this.cards = wanted.map((name) => this.card(name));
      this.row.replaceChildren(...this.cards.map((card) => card.node));
    }
    this.write();
  }

  catalogue() {
    return CARDS;
  }

  /** The same cards for an attached engine, which is known by its metrics. */
  scraped() {
    return SCRAPED;
  }

  card(name) {
    const [label, read, how] = this.catalogue()[name];
    const value = element("div", { class: "value" }, "No data");
    const below = element("div", { class: "below" }, "nothing heard of an engine yet");
    const title = element("div", { class: "label" }, label);
    const source = element("span"), means = element("span", {}, how);
    const help = element("div", { class: "help", role: "tooltip", id: `help-${name}` }, means, source);
    const node = element(
      "section",
      { class: "card none", tabindex: 0, role: "group", "aria-label": label, "aria-describedby": `help-${name}`, "data-number": name },
      title,
      value,
      below,
      help,
    );
    return { node, value, below, read, source, means, how, title, label, scraped: this.scraped()[name] };
  }

  theme(host) {
    paintTokens(this.root, themeOf(host));
  }

  update(state) {
    this.state = state;
    this.heard = performance.now();
  }

  write() {
    const { state } = this;
    if (!state || document.hidden) return;
    if (!state.epoch) return this.nothing();
    // The engine's clock goes on while nothing happens, so that a rate can fall to "no traffic".
    const now = state.t + (performance.now() - this.heard) / 1000;
    const evidence = `${state.evidence || "measured"} · source: ${state.source || "engine"}`;
    for (const { value, below, read, source, node, means, how, title, label, scraped } of this.cards) {
      const attached = state.scrape && scraped;
      const [big, small, from] = (attached ? scraped[0] : read)(state, now, this.units, this.live);
      const old = attached && stale(state);
      setText(value, big);
      setText(below, old ? `${seconds(age(state))} old: no scrape since` : small);
      setText(means, attached ? scraped[1] : how);
      const words = (attached && scraped[2]) || label;
      if (title.textContent !== words) {
        setText(title, words);
        node.setAttribute("aria-label", words);
      }
      setText(source, attached ? from || evidence : `${evidence} events`);
      node.classList.toggle("none", big === NONE || big === MISSING || big === "Off" || old);
    }
    this.row.dataset.step = state.step;
  }

  /** The source is another one, of which nothing was heard yet. */
  nothing() {
    for (const { value, below, node } of this.cards) {
      setText(value, "No data");
      setText(below, "nothing heard of an engine yet");
      node.classList.add("none");
    }
  }

  end() {
    clearInterval(this.timer);
  }
}
