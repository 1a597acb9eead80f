// Several servers at once: what may be said of all of them, a card each, and one of them whole. Shares are never summed.
// DOM, written at most once a second, and only where a text changed; a click asks for the details of one replica.
import { bytes, count, figures, paintTokens, percent, seconds, themeOf } from "./draw.js";
import { rate } from "./axes.js";
import { element, heading, setText } from "./dom.js";

export const STATES = {
  live: ["●", "live"],
  probing: ["◌", "asking"],
  stale: ["◍", "no fresh numbers"],
  down: ["✕", "does not answer"],
};
const NONE = "–";
const IMBALANCE = 1.5; // fullest over mean that is worth a word

const NUMBERS = [
  ["running", "running", count],
  ["waiting", "waiting", count],
  ["ttft_p95_s", "TTFT p95", seconds],
  ["output_tokens_per_s", "tok/s", figures],
  ["hit_rate", "hit rate", percent],
];
const SPREAD = [
  ["running", "running requests", count],
  ["kv_usage", "KV usage", percent],
  ["ttft_p95_s", "TTFT p95", seconds],
  ["output_tokens_per_s", "tok/s", figures],
  ["hit_rate", "hit rate", percent],
];

/** The big numbers: [name, value, line below, how]. What no replica tells is a dash, never 0. */
export function totals(sums, names) {
  const total = (name) => sums.totals[name];
  const of = (found) => (found.of === sums.states.live ? "" : ` · ${found.of} of ${sums.states.live} tell it`);
  const summed = (name, unit) => (total(name) ? [`${figures(total(name).value)}${unit}`, `all live replicas${of(total(name))}`] : [NONE, "no live replica tells it"]);
  const other = Object.entries(STATES).filter(([state]) => state !== "live" && sums.states[state]).map(([state, [, word]]) => `${sums.states[state]} ${word}`);
  const waiting = total("waiting");
  const usage = sums.kv_usage, spread = sums.spread.kv_usage;
  const worst = sums.spread.ttft_p95_s;
  return [
    ["Replicas live", `${sums.states.live} of ${sums.replicas}`, other.join(" · ") || "all of them answer", "A replica is live when its newest reading is fresh. Only live ones count in sums."],
    ["Requests", total("running") ? `${count(total("running").value)} running` : NONE, waiting ? `${count(waiting.value)} waiting` : "waiting ones are not told", "Sum of the replicas' gauges."],
    [
      "KV usage",
      usage ? percent(usage.value) : NONE,
      spread ? `${percent(spread.low)} to ${percent(spread.high)} · most: ${names.get(spread.highest) ?? "?"}` : "no live replica tells it",
      "Mean over the replicas, weighted by their number of blocks. Shares of different pools are never summed.",
    ],
    ["Output tokens per second", ...summed("output_tokens_per_s", " tok/s"), "Sum of what the replicas' counters grew per second."],
    ["TTFT p95, worst replica", worst ? seconds(worst.high) : NONE, worst ? `median replica ${seconds(worst.median)} · ${names.get(worst.highest) ?? "?"}` : "no first token in the last 30 s", "Quantiles of different servers cannot be added: the worst and the middle replica are shown."],
    ["Prefix hit rate", sums.hit_rate ? percent(sums.hit_rate.value) : NONE, sums.hit_rate ? `of tokens looked up${of(sums.hit_rate)}` : "nothing was looked up in the last 30 s", "Sum of hits ÷ sum of look-ups of all live replicas."],
  ];
}

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

/** A value in the unit that its name ends with. */
export function worded(name, value) {
  if (/usage|hit_rate/.test(name)) return percent(value);
  if (/bytes_per_s$/.test(name)) return rate(value, "B/s");
  if (/flops_per_s$/.test(name)) return rate(value, "FLOP/s");
  if (/(?<!per)_s$/.test(name)) return seconds(value);
  return Number.isInteger(value) ? count(value) : figures(value);
}

/** A sentence about uneven load; "" when it is even, or cannot be told. */
export function imbalanceWords(sums) {
  const uneven = Object.entries(sums.imbalance).filter(([, ratio]) => ratio >= IMBALANCE);
  const word = { running: "running requests", kv_usage: "KV usage" };
  return uneven.map(([name, ratio]) => `${word[name] ?? name}: the fullest replica has ${figures(ratio)} × the mean`).join(" · ");
}

export class Fleet {
  constructor(root, live) {
    this.root = root;
    this.live = live;
    this.chosen = "";
    this.cards = new Map();
    this.chose = () => {}; // set by the component
    this.numbers = element("div", { class: "numbers six" });
    this.uneven = element("p", { class: "rule", role: "status" });
    this.grid = element("div", { class: "fleet" });
    this.spread = element("div", { class: "spread" });
    this.detail = element("div", { class: "blocktable detail", hidden: true });
    root.append(this.numbers, this.uneven, this.grid, this.spread, this.detail);
    this.stop = () => {};
    this.off = live.on("fleet", () => this.write());
    this.ask();
  }

  ask() {
    this.stop();
    this.stop = this.live.lease({ fleet: this.chosen });
  }

  options({ title }) {
    heading(this.root, title, 1);
  }

  theme(host) {
    this.colors = themeOf(host);
    paintTokens(this.root, this.colors);
  }

  update() {
    if (this.live.fleet) this.write();
  }

  pick(key) {
    this.chosen = this.chosen === key ? "" : key;
    this.chose(this.chosen);
    this.ask();
    this.write();
  }

  write() {
    const message = this.live.fleet;
    if (!message || document.hidden) return;
    const names = new Map(message.cards.map((card) => [card.key, card.name]));
    this.totals(totals(message.sums, names));
    setText(this.uneven, imbalanceWords(message.sums));
    this.list(message.cards);
    this.compare(message.sums, names);
    this.whole(message);
    this.root.dataset.live = message.sums.states.live;
    this.root.dataset.replicas = message.sums.replicas;
  }

  totals(rows) {
    rows.forEach(([name, value, below, how], i) => {
      let card = this.numbers.children[i];
      if (!card) {
        card = element("section", { class: "card", tabindex: 0, role: "group", "aria-label": name, "data-fleet": name });
        card.append(element("div", { class: "label" }, name), element("div", { class: "value" }), element("div", { class: "below" }), element("div", { class: "help", role: "tooltip" }, element("span", {}, how)));
        this.numbers.append(card);
      }
      setText(card.children[1], value);
      setText(card.children[2], below);
      card.classList.toggle("none", value === NONE);
    });
  }

  list(cards) {
    const wanted = new Set(cards.map((card) => card.key));
    for (const [key, made] of this.cards) {
      if (wanted.has(key)) continue;
      made.node.remove();
      this.cards.delete(key);
    }
    cards.forEach((card, i) => {
      let made = this.cards.get(card.key);
      if (!made) this.cards.set(card.key, (made = this.make(card.key)));
      if (this.grid.children[i] !== made.node) this.grid.insertBefore(made.node, this.grid.children[i] ?? null);
      this.fill(made, card);
    });
  }

  make(key) {
    const parts = { name: element("strong", { class: "who" }), state: element("span", { class: "state" }), about: element("div", { class: "about" }) };
    const bar = element("i"), usage = element("span");
    const words = element("p", { class: "words" });
    const values = NUMBERS.map(([name]) => element("dd", { "data-value": name }));
    const list = element("dl", {}, ...NUMBERS.flatMap(([, word], i) => [element("dt", {}, word), values[i]]));
    const meter = element("div", { class: "kvbar" }, bar);
    const line = element("div", { class: "usage" }, element("span", {}, "KV"), meter, usage);
    const node = element("button", { type: "button", class: "replica", "aria-pressed": "false", "data-key": key }, element("header", {}, parts.name, parts.state), parts.about, line, list, words);
    node.addEventListener("click", () => this.pick(key));
    return { node, ...parts, bar, usage, words, values, list, line };
  }

  fill(made, card) {
    const [glyph, word] = STATES[card.state] ?? ["?", card.state];
    const { numbers = {}, state } = card;
    made.node.dataset.state = state;
    made.node.setAttribute("aria-pressed", String(card.key === this.chosen));
    setText(made.name, card.name);
    setText(made.state, `${glyph} ${word}`);
    setText(made.about, [card.kind, card.model].filter(Boolean).join(" · ") || card.url);
    const fresh = state === "live" || (state === "stale" && Object.keys(numbers).length > 0);
    made.list.hidden = made.line.hidden = !fresh;
    const age = card.age_s === undefined || card.age_s === null ? "" : ` Last numbers ${seconds(card.age_s)} ago.`;
    setText(made.words, state === "live" ? (card.restarts ? `restarted ${card.restarts} ×` : "") : `${sentence(card.message || "no answer yet")}${age}`);
    const usage = numbers.kv_usage;
    made.node.setAttribute("aria-label", `${card.name}: ${word}${usage === undefined ? "" : `, KV usage ${percent(usage)}`}${numbers.running === undefined ? "" : `, ${count(numbers.running)} running`}`);
    setText(made.usage, usage === undefined ? "not told" : percent(usage));
    made.bar.style.width = `${100 * Math.min(1, usage ?? 0)}%`;
    NUMBERS.forEach(([name, , write], i) => setText(made.values[i], numbers[name] === undefined ? NONE : write(numbers[name])));
  }

  /** Lowest, middle and highest replica of each measure. */
  compare(sums, names) {
    const rows = SPREAD.filter(([name]) => sums.spread[name]);
    const key = rows.map(([name]) => name).join();
    if (key !== this.spreadKey) {
      this.spreadKey = key;
      const head = element("tr", {}, ...["spread over replicas", "lowest", "median", "highest", "told by"].map((word) => element("th", { scope: "col" }, word)));
      this.spreadRows = rows.map(([, word]) => element("tr", {}, element("th", { scope: "row" }, word), ...Array.from({ length: 4 }, () => element("td"))));
      this.spread.replaceChildren(...(rows.length ? [element("table", {}, element("thead", {}, head), element("tbody", {}, ...this.spreadRows))] : []));
    }
    rows.forEach(([name, , write], i) => {
      const { low, median, high, lowest, highest, of } = sums.spread[name];
      const cells = [`${write(low)} · ${names.get(lowest) ?? "?"}`, write(median), `${write(high)} · ${names.get(highest) ?? "?"}`, `${of} of ${sums.states.live}`];
      cells.forEach((text, j) => setText(this.spreadRows[i].children[j + 1], text));
    });
  }

  /** The chosen replica: every value, where it was read, and why others are not there. */
  whole({ cards, detail }) {
    const card = cards.find((c) => c.key === this.chosen);
    const shown = card && detail?.key === card.key;
    this.detail.hidden = !card;
    if (!card) return;
    if (this.detailKey !== card.key) {
      this.detailKey = card.key;
      this.detailHead = element("header", {}, element("strong", {}, card.name), element("span", { class: "state" }, card.url));
      const head = element("tr", {}, ...["value", "now", "quality", "read from", "note"].map((word) => element("th", { scope: "col" }, word)));
      this.detailBody = element("tbody");
      this.gpus = element("p", { class: "words" });
      const table = element("table", {}, element("thead", {}, head), this.detailBody);
      this.detail.replaceChildren(this.detailHead, element("div", { class: "table", tabindex: 0, role: "region", "aria-label": `Values of ${card.name}` }, table), this.gpus);
    }
    if (!shown) return;
    const rows = Object.entries(detail.values);
    while (this.detailBody.children.length > rows.length) this.detailBody.lastChild.remove();
    rows.forEach(([name, value], i) => {
      let row = this.detailBody.children[i];
      if (!row) this.detailBody.append((row = element("tr", {}, ...Array.from({ length: 5 }, () => element("td")))));
      const now = value.value ?? null;
      const bounds = (value.low ?? null) === null ? "" : ` (${worded(name, value.low)} … ${(value.high ?? null) === null ? "" : worded(name, value.high)})`;
      const cells = [name, now === null ? NONE : `${worded(name, now)}${bounds}`, value.quality ?? "measured", value.name ?? "", value.note ?? ""];
      cells.forEach((text, j) => setText(row.children[j], text));
    });
    setText(this.gpus, gpuWords(detail));
  }

  end() {
    this.stop();
    this.off();
  }
}

/** What a DCGM exporter on its host says, a sentence a GPU; why not, else. */
export function gpuWords({ gpus, gpus_message: why }) {
  const told = (value, words) => (value === null || value === undefined ? [] : [words(value)]);
  const lines = (gpus ?? []).map((gpu) => {
    const facts = [
      ...told(gpu.busy, (v) => `busy ${percent(v)} of the time`), ...told(gpu.dram_active, (v) => `DRAM active ${percent(v)}`), ...told(gpu.power_w, (v) => `${figures(v)} W`),
      ...told(gpu.temperature_c, (v) => `${count(v)} °C`), ...told(gpu.memory_used_bytes, (v) => `${bytes(v)} in use`),
    ];
    return `GPU ${gpu.index} ${gpu.name}: ${facts.join(", ") || "tells nothing"}`;
  });
  return lines.join(" · ") || why || "";
}
