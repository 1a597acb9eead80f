// The big numbers of an attached engine: what its own metrics said last, under the names of the cards. Each says which
// series it was read from; what is absent says why. Pure.
import { rate } from "./axes.js";
import { bytes, count, figures, percent, seconds } from "./draw.js";

export const ABSENT = "Not available";
const QUIET = "No traffic";
const OLD_S = 5;
const BY_MEDIUM = "cached_tokens_"; // see backend/sources/attach/canonical.py

const of = (state, name) => state.scrape.values[name] ?? { value: null };
const number = (state, name) => of(state, name).value ?? null;

const SEEN = new WeakMap(); // scrape → [when this page saw it first, how old it was then]

/** Seconds since the last scrape, also while nothing comes any more. */
export function age(state, now = performance.now()) {
  if (!SEEN.has(state.scrape)) SEEN.set(state.scrape, [now, Math.max(0, state.t - state.scrape.t)]);
  const [seen, then] = SEEN.get(state.scrape);
  return then + (now - seen) / 1000;
}

/** Whether the numbers are too old to be said of now: three scrapes have failed. */
export const stale = (state, now) => age(state, now) > Math.max(OLD_S, 3 * state.scrape.window_s);

/** Where a value is from, for the hover: quality, series, meaning. */
function origin(state, ...names) {
  return names
    .map((name) => of(state, name))
    .filter((value) => value.name || value.note)
    .map(({ quality = "measured", name, note }) => [quality === "absent" ? "" : quality, name, note].filter(Boolean).join(" · "))
    .join(" — ");
}

/** Requests at the engine that are not from this page: gauges count all of them; null where they are not told. */
export function others(state) {
  if (!state.scrape || stale(state)) return null;
  const running = number(state, "running"), waiting = number(state, "waiting");
  if (running === null && waiting === null) return null;
  // Of ours, whoever may be in that gauge: it is some steps old, and who ended since was still counted.
  const { t, scrape_s: asked = 0, window_s: window } = state.scrape;
  const counted = (r) => !(r.t_queued > t + asked) && (r.state !== "finished" || r.t_end >= t - window);
  const own = Object.values(state.requests).filter(counted).length;
  return Math.max(0, Math.round((running ?? 0) + (waiting ?? 0)) - own);
}

/** A quantile with the bucket that it lies in: no more than that is known. */
export function bucket({ low, high }) {
  if (low === undefined || low === null) return "";
  return high === undefined || high === null ? `over ${seconds(low)}` : `between ${seconds(low)} and ${seconds(high)}`;
}

function used(state, units) {
  const usage = number(state, "kv_usage");
  const from = origin(state, "kv_usage", "used_blocks");
  if (usage === null) return [ABSENT, of(state, "kv_usage").note || "this engine does not tell how full its cache is", from];
  const blocks = number(state, "used_blocks");
  const perBlock = state.block_size * state.model.kv_bytes_per_token;
  const words = [];
  if (blocks !== null) words.push(`${count(blocks)} of ${count(state.num_blocks)} blocks`);
  if (blocks !== null && perBlock) words.push(bytes(blocks * perBlock, units));
  const fullest = number(state, "kv_usage_max");
  if (fullest !== null) words.push(`${percent(fullest)} in the fullest engine`);
  return [percent(usage), words.join(" · ") || "how many blocks there are is not told", from];
}

/** Tokens whose keys and values are cached, as [[medium as the engine calls it, tokens], …]; [] where nobody tells. */
export function media(state) {
  const told = Object.entries(state.scrape?.values ?? {}).filter(([name]) => name.startsWith(BY_MEDIUM));
  return told.map(([name, { value }]) => [name.slice(BY_MEDIUM.length).toUpperCase(), value]);
}

/** "GPU 512 tokens = 11.3 MiB" */
export const kept = (state, units) => ([medium, tokens]) =>
  [`${medium} ${count(tokens)} tokens`, ...(state.model.kv_bytes_per_token ? [bytes(tokens * state.model.kv_bytes_per_token, units)] : [])].join(" = ");

function cached(state, units) {
  const told = media(state);
  if (!told.length) {
    const view = state.capabilities.views.find((v) => v.view === "prefix_tree");
    return [ABSENT, view?.quality === "none" && view.why ? `${view.why}${view.flag ? ` · ${view.flag}` : ""}` : "no KV events are followed", ""];
  }
  const all = told.reduce((sum, [, tokens]) => sum + tokens, 0);
  return [`${count(all)} tokens`, told.map(kept(state, units)).join(" · "), origin(state, `${BY_MEDIUM}${told[0][0].toLowerCase()}`)];
}

/** name → [(state, now, units) → [value, line below, where it is from], how it is obtained, the card's name if another] */
export const SCRAPED = {
  rate: [
    (state) => {
      const rate = number(state, "output_tokens_per_s"), running = number(state, "running");
      const from = origin(state, "output_tokens_per_s");
      if (rate === null) return [ABSENT, of(state, "output_tokens_per_s").note || "no counter of generated tokens yet", from];
      if (!rate) return [QUIET, `no token in the last ${seconds(state.scrape.window_s)}`, from];
      return [`${figures(rate)} tok/s`, running > 1 ? `${figures(rate / running)} tok/s per running request` : "of all its requests", from];
    },
    "Rise of the server's counter of generated tokens ÷ time between the last two scrapes: all its requests, also those of others.",
  ],
  flight: [
    (state) => {
      const running = number(state, "running"), waiting = number(state, "waiting");
      const from = origin(state, "running", "waiting");
      if (running === null) return [ABSENT, of(state, "running").note || "this engine does not tell its requests", from];
      const all = running + (waiting ?? 0), foreign = others(state);
      if (!all) return [QUIET, "none running, none waiting", from];
      const queue = waiting === null ? "waiting ones are not told" : `${count(waiting)} waiting`;
      return [count(all), `${count(running)} running + ${queue}${foreign ? ` · ${count(foreign)} not ours` : ""}`, from];
    },
    "The server's own gauges, as of the last scrape. Ours are those that this page sent.",
  ],
  blocks: [(state, now, units) => used(state, units), "The server's gauge: blocks that requests hold now ÷ blocks of the pool. Cached blocks that nobody holds do not count."],
  used: [(state, now, units) => used(state, units), "The server's gauge: blocks that requests hold now ÷ blocks of the pool. Cached blocks that nobody holds do not count."],
  ttft: [
    (state) => {
      const p95 = of(state, "ttft_p95_s"), p50 = of(state, "ttft_p50_s");
      const from = origin(state, "ttft_p95_s");
      if (typeof p95.value === "number") {
        const half = typeof p50.value === "number" ? `p50 ${seconds(p50.value)} · ` : "";
        return [seconds(p95.value), `${half}p95 ${bucket(p95)}`.trim(), from];
      }
      const own = state.ttfts.map((row) => row[1]).sort((a, b) => a - b);
      if (own.length) return [seconds(own[Math.max(0, Math.ceil(0.95 * own.length) - 1)]), `of our own ${count(own.length)}, at this client`, "measured at this page's client · network included"];
      return p95.name || p95.quality !== "absent" ? [QUIET, "no first token in the last 30 s", from] : [ABSENT, p95.note || "no histogram of it", from];
    },
    "From the server's histogram, first tokens of the last 30 s: the bucket that p95 lies in is known, where in it is interpolated. While it has none: our own requests as their client saw them.",
  ],
  filled: [
    (state, now, units) => cached(state, units),
    "Tokens of the blocks whose hashes the server's KV events tell, by where they are kept; copies counted. How many slots of used blocks hold tokens is not exported.",
    "Cached, by medium",
  ],
  saved: [
    () => [ABSENT, "holders of a block are not exported", ""],
    "Saved blocks are Σ (holders − 1). How many requests hold a block is not exported; the prefix hit rate says how much was found again.",
  ],
  hits: [
    (state) => {
      const rate = number(state, "hit_rate"), from = origin(state, "hit_rate", "prefix_hits_per_s");
      if (rate !== null) {
        const asked = number(state, "prefix_queries_per_s");
        return [percent(rate), asked ? `of ${figures(asked)} prompt tokens/s looked up` : "of prompt tokens looked up", from];
      }
      const { lookup_tokens: all, cached_tokens: hit } = state.totals;
      if (all) return [percent(hit / all), "since we attached; no look-up in the last 30 s", from];
      const why = of(state, "hit_rate");
      return why.quality === "absent" && !why.name ? [ABSENT, why.note || "no counters of it", from] : [QUIET, "nothing looked up since we attached", from];
    },
    "Prompt tokens that the server found in its prefix cache ÷ prompt tokens looked up, from its counters over the last 30 s.",
  ],
};

/** Why there is no estimate, with the flag that would make one. */
function noEstimate(state) {
  const view = state.capabilities.views.find((v) => v.view === "roofline");
  return view ? `${view.why}${view.flag ? ` · ${view.flag}` : ""}` : of(state, "flops_per_s").note || "this engine does not estimate it";
}

function traffic(state) {
  const read = number(state, "read_bytes_per_s"), written = number(state, "write_bytes_per_s");
  return read === null && written === null ? null : (read ?? 0) + (written ?? 0);
}

function estimated(state, value, write, below) {
  const from = origin(state, "flops_per_s", "read_bytes_per_s");
  if (value === null || !Number.isFinite(value)) return [ABSENT, noEstimate(state), from];
  return value ? [write(value), below, from] : [QUIET, "nothing computed since the last scrape", from];
}

const GPU = "estimated by the engine, of one accelerator";
const SENSORS = "sensors of a machine that is not ours are not read";
const notRead = (label) => [() => [ABSENT, SENSORS, ""], "Only an engine of our own reads the sensors of its machine.", label];
const TRAFFIC = [(state) => estimated(state, traffic(state), (v) => rate(v, "B/s"), GPU), "Rise of the server's estimated counters of bytes read and written ÷ time between two scrapes. An estimate by its own formula, not a reading of the device.", "Memory traffic, estimated"];

/** The same for the cards of the phases and hardware pages. */
export const SCRAPED_PHASES = {
  mbu: TRAFFIC,
  computed: TRAFFIC,
  mfu: [(state) => estimated(state, number(state, "flops_per_s"), (v) => rate(v, "FLOP/s"), GPU), "Rise of the server's estimated counter of FLOPs ÷ time between two scrapes. An estimate by its own formula.", "Arithmetic, estimated"],
  ridge: [
    (state) => estimated(state, traffic(state) ? (number(state, "flops_per_s") ?? 0) / traffic(state) : traffic(state), (v) => `${figures(v)} FLOP/byte`, "of all its steps, prefill and decode together"),
    "Estimated FLOPs ÷ estimated bytes. Left of a device's ridge, steps wait for memory.",
    "Arithmetic intensity, estimated",
  ],
  ratio: [
    (state) => {
      const p50 = of(state, "tpot_p50_s"), from = origin(state, "tpot_p50_s");
      if (typeof p50.value === "number") return [seconds(p50.value), `p50 ${bucket(p50)}`, from];
      return p50.name || p50.quality !== "absent" ? [QUIET, "no request ended in the last 30 s", from] : [ABSENT, p50.note || "no histogram of it", from];
    },
    "Time per output token of requests that ended in the last 30 s, from the server's histogram. Its steps are not exported, so prefill and decode cannot be told apart.",
    "Time per output token, p50",
  ],
  energy: notRead(), power: notRead(), load: notRead(), memory: notRead(), host_memory: notRead(),
};
