// The fold: events in, the state that everything on screen is drawn from out. The twin of backend/fold.py: both give
// the same state from the same lines, block by block, and a test holds them together. Pure: no DOM, no clock.
//
// It never throws for a request or a block that it does not know. An event that was folded already (its `seq` is not
// newer) is skipped, so overlapping deliveries are harmless; a hole in `seq` raises `gaps`.

export const SCHEMA = 1;
const KEPT_FINISHED = 256;
const KEPT_ROWS = 3000;
const KEPT_TTFTS = 512;
const KEPT_SAMPLES = 600; // two minutes of one device at five a second
const KEPT_SPANS = 128;
const NOBODY = Object.freeze([]);

const MODEL = {
  name: "", family: "", weights: "real", dtype: "float32", layers: 0, hidden: 0, heads: 0, kv_heads: 0, head_dim: 0, vocab: 0,
  parameters: 0, weight_bytes: 0, step_weight_bytes: 0, kv_bytes_per_token: 0, max_model_len: 0, chat_template: false, notes: [], shape: {},
};
const DEVICE = { kind: "cpu", name: "", threads: 0, memory_bytes: 0 };

/** The state before anything was heard (`epoch` is "" until a hello or a snapshot). */
export function empty() {
  return {
    schema: SCHEMA, seq: 0, t: 0, step: 0, gaps: 0, epoch: "", source: "", evidence: "", wall_time: 0,
    model: { ...MODEL }, device: { ...DEVICE }, config: {}, block_size: 0, num_blocks: 0, fault: "", fatal: false,
    requests: {}, running: [], ended: [],
    blocks: freeBlocks(0),
    pool: freePool(0),
    totals: {
      steps: 0, computed_prefill_tokens: 0, output_tokens: 0, lookup_tokens: 0, cached_tokens: 0, preemptions: 0,
      recomputed_tokens: 0, evictions: 0, queued: 0, finished: 0, aborted: 0, errors: 0,
    },
    ttfts: [], series: [],
    devices: { state: "", message: "", devices: [] }, samples: [],
    scrape: null, capabilities: { kind: "", version: "", views: [] },
  };
}

/** Folds one event into `state`, in place. Throws RangeError for a hello or snapshot of a newer schema. */
export function apply(state, event) {
  if (event.type === "hello") return hello(state, event);
  if (event.type === "snapshot") return snapshot(state, event);
  if (event.seq) {
    if (event.seq <= state.seq) return;
    if (event.seq !== state.seq + 1) state.gaps += 1;
    state.seq = event.seq;
  }
  state.t = Math.max(state.t, event.t ?? 0); // a request counts as queued when it arrived, perhaps before the last step ended
  FOLDS[event.type]?.(state, event);
}

/** A request's letters: 1 -> A, 26 -> Z, 27 -> AA. */
export function label(number) {
  let letters = "";
  while (number > 0) {
    letters = String.fromCharCode(65 + ((number - 1) % 26)) + letters;
    number = Math.floor((number - 1) / 26);
  }
  return letters;
}

/** The pool in blocks: filled + wasted + cached + free = total; `saved` would be needed on top without sharing. */
export function poolSplit(state) {
  const { pool } = state, size = state.block_size || 1;
  return {
    filled: pool.filled_slots / size,
    wasted: pool.wasted_slots / size,
    cached: pool.cached_blocks,
    free: pool.free_blocks,
    saved: pool.shared_saved_blocks,
    total: state.num_blocks,
    block_bytes: size * (state.model.kv_bytes_per_token || 0),
  };
}

/** Requests that wait or run now. */
export function inFlight(state) {
  const totals = state.totals;
  return totals.queued - totals.finished - totals.aborted - totals.errors;
}

function freeBlocks(count) {
  const column = (value) => new Array(count).fill(value);
  return { owners: column(NOBODY), fill: column(0), sealed: column(0), changed: column(0), mark: column(""), marked: column(0) };
}

function freePool(count) {
  return { used_blocks: 0, cached_blocks: 0, free_blocks: count, filled_slots: 0, wasted_slots: 0, shared_saved_blocks: 0, held_tokens: 0, resident_blocks: 0 };
}

function refuseNewer(schema) {
  if (schema > SCHEMA) throw new RangeError(`the source speaks event schema ${schema}, this page understands up to ${SCHEMA}: reload it`);
}

function hello(state, event) {
  refuseNewer(event.schema ?? SCHEMA);
  Object.assign(state, empty(), {
    seq: event.seq ?? 0, t: event.t ?? 0, epoch: event.epoch, source: event.source ?? "embedded", evidence: event.evidence ?? "measured",
    wall_time: event.wall_time ?? 0, model: { ...MODEL, ...event.model }, device: { ...DEVICE, ...event.device }, config: event.config ?? {},
    block_size: event.block_size, num_blocks: event.num_blocks,
    blocks: freeBlocks(event.num_blocks), pool: freePool(event.num_blocks),
  });
}

function snapshot(state, event) {
  refuseNewer(event.schema ?? SCHEMA);
  const blank = empty();
  Object.assign(state, blank, event.state, {
    gaps: 0, model: { ...MODEL, ...event.state.model }, device: { ...DEVICE, ...event.state.device },
    pool: { ...blank.pool, ...event.state.pool },
  });
}

function configured(state, event) {
  const rebuilt = event.rebuilt || event.num_blocks !== state.num_blocks || event.block_size !== state.block_size;
  if (event.config && Object.keys(event.config).length) state.config = event.config;
  state.block_size = event.block_size;
  state.num_blocks = event.num_blocks;
  if (!rebuilt) return;
  for (const request of Object.values(state.requests)) { // the engine is idle for this; but a "finished" may have been lost
    request.table = [];
    if (request.state !== "finished") request.computed = 0;
  }
  state.blocks = freeBlocks(event.num_blocks);
  state.pool = freePool(event.num_blocks);
}

function queued(state, event) {
  if (state.requests[event.request]) return;
  const t = event.t ?? 0;
  state.requests[event.request] = {
    request: event.request, id: event.id ?? "", user: event.user ?? "", prompt_tokens: event.prompt_tokens, max_tokens: event.max_tokens,
    state: "queued", reason: "", message: "", cached_tokens: 0, computed: 0, swapped: 0, reached: 0, output_tokens: 0, table: [],
    spans: [["queued", t, null]], t_queued: t, t_first: null, t_last: null, t_end: null, preemptions: 0, recomputed_tokens: 0,
    queue_s: null, ttft_s: null, tpot_s: null, e2e_s: null,
  };
  state.totals.queued += 1;
}

function step(state, event) {
  const { requests, totals } = state, t = event.t ?? 0, number = event.step, begin = t - (event.step_s ?? 0);
  const computedSomething = number !== state.step; // else: nothing but preemptions, told under the number of the step before
  state.step = number;
  totals.steps += computedSomething ? 1 : 0;
  for (const op of event.ops ?? []) applyOp(state, op, number, begin);
  // Without a list: all who decoded before this step and still do, for no op makes anybody decode.
  const decoding = event.decode ?? state.running.filter((n) => requests[n].state === "decode");

  const keeps = state.config.kv_cache ?? true;
  let prefillTokens = 0, outputTokens = 0;
  for (const [who, tokens, context] of event.prefill ?? []) {
    const request = requests[who];
    if (!request || request.state === "finished" || context < 0 || tokens < 0) continue;
    prefillTokens += tokens;
    const end = context + tokens, again = Math.min(end, request.reached) - context;
    if (again > 0) {
      request.recomputed_tokens += again;
      totals.recomputed_tokens += again;
    }
    const kept = keeps ? end : 0;
    state.pool.held_tokens += kept - request.computed;
    request.computed = kept;
    fillSlots(state, request, context, end, number);
    if (end >= request.prompt_tokens + request.output_tokens) {
      outputTokens += 1;
      sampledByPrefill(state, request, t);
    }
  }
  totals.computed_prefill_tokens += prefillTokens;

  const decodeTokens = decode(state, decoding, number, t);
  outputTokens += decodeTokens;
  totals.output_tokens += outputTokens;
  for (const block of event.sealed ?? []) seal(state, block, number);
  settle(state);
  if (!computedSomething) return;

  const { pool, series } = state;
  series.push([
    t, event.step_s ?? 0, prefillTokens, decodeTokens, pool.used_blocks, pool.cached_blocks, pool.filled_slots, pool.held_tokens,
    state.running.length, event.waiting ?? 0, outputTokens, event.forward_s ?? 0, event.weight_bytes ?? 0, event.kv_read_bytes ?? 0,
    event.flops ?? 0,
  ]);
  if (series.length > KEPT_ROWS) series.shift();
}

function decode(state, numbers, number, t) {
  const { requests, pool } = state, { fill, changed } = state.blocks, size = state.block_size || 1;
  let decoded = 0;
  for (const who of numbers) {
    const request = requests[who];
    if (!request || request.state === "finished") continue;
    decoded += 1;
    const position = request.computed, index = Math.floor(position / size);
    request.computed = position + 1;
    request.output_tokens += 1;
    request.t_last = t;
    if (request.state !== "decode") enter(state, request, "decode", t);
    if (index >= request.table.length) continue;
    const block = request.table[index], slots = position - index * size + 1;
    if (fill[block] < slots) {
      pool.filled_slots += slots - fill[block];
      fill[block] = slots;
    }
    changed[block] = number;
  }
  pool.held_tokens += decoded;
  return decoded;
}

function sampledByPrefill(state, request, t) {
  request.output_tokens += 1;
  request.t_last = t;
  if (request.t_first === null) firstToken(state, request, t, t - request.t_queued);
  enter(state, request, "decode", t);
}

function firstToken(state, request, t, ttft_s) {
  request.t_first = t;
  request.ttft_s = ttft_s;
  state.ttfts.push([t, ttft_s]);
  if (state.ttfts.length > KEPT_TTFTS) state.ttfts.shift();
}

function applyOp(state, op, number, begin) {
  const request = state.requests[op[1]];
  if (!request || request.state === "finished") return;
  const kind = op[0];
  if (kind === "alloc") {
    for (const block of op.slice(2)) {
      if (!known(state, block)) continue;
      evict(state, block, number);
      hold(state, request, block, number);
      request.table.push(block);
    }
    // Blocks of a request that was swapped in: what it had computed is copied into them.
    fillSlots(state, request, (request.table.length - op.length + 2) * state.block_size, request.computed, number);
  } else if (kind === "admit") admit(state, request, op.slice(2), number, begin);
  else if (kind === "copy" && op.length === 4) copy(state, request, op[2], op[3], number);
  else if (kind === "preempt") {
    request.reached = Math.max(request.reached, request.computed);
    preempt(state, request, number, begin);
  } else if (kind === "swap_out") {
    request.swapped = request.computed;
    preempt(state, request, number, begin);
  } else if (kind === "swap_in") swapIn(state, request, op.slice(2), number, begin);
}

function known(state, block) {
  return Number.isInteger(block) && block >= 0 && block < state.num_blocks;
}

function admit(state, request, blocks, number, begin) {
  const first = request.queue_s === null;
  release(state, request, number);
  for (const block of blocks) {
    if (!known(state, block)) continue;
    hold(state, request, block, number);
    request.table.push(block);
  }
  // One token is always left to compute, its logits are needed; a fork's last block is shared while partly filled.
  const all = request.prompt_tokens + request.output_tokens;
  const found = Math.max(0, Math.min(request.table.length * state.block_size, all - 1));
  request.computed = found;
  state.pool.held_tokens += found;
  fillSlots(state, request, 0, found, number);
  if (first) {
    request.queue_s = Math.max(0, begin - request.t_queued);
    request.cached_tokens = found;
    if (state.config.prefix_cache ?? true) {
      state.totals.lookup_tokens += request.prompt_tokens;
      state.totals.cached_tokens += found;
    }
  }
  enter(state, request, "prefill", begin);
}

function swapIn(state, request, blocks, number, begin) {
  release(state, request, number);
  for (const block of blocks) {
    if (!known(state, block)) continue;
    hold(state, request, block, number);
    request.table.push(block);
  }
  request.computed = request.swapped;
  request.swapped = 0;
  state.pool.held_tokens += request.computed;
  enter(state, request, "prefill", begin);
}

function copy(state, request, old, fresh, number) {
  const index = request.table.lastIndexOf(old);
  if (index < 0 || !known(state, fresh)) return;
  evict(state, fresh, number);
  hold(state, request, fresh, number);
  request.table[index] = fresh;
  drop(state, request, old, number);
  const begin = index * state.block_size;
  fillSlots(state, request, begin, Math.min(request.computed, begin + state.block_size), number);
}

function preempt(state, request, number, begin) {
  const held = request.table, { owners, mark, marked } = state.blocks;
  release(state, request, number);
  for (const block of held) {
    if (owners[block].length) continue;
    mark[block] = "preempted";
    marked[block] = number;
  }
  request.preemptions += 1;
  state.totals.preemptions += 1;
  leave(state, request);
  turn(request, "preempted", begin);
}

function finished(state, event) {
  const request = state.requests[event.request];
  if (!request || request.state === "finished") return;
  const t = event.t ?? 0;
  release(state, request, state.step);
  settle(state);
  leave(state, request);
  request.swapped = 0;
  request.state = "finished";
  closeSpan(request, t);
  request.reason = event.reason;
  request.message = event.message ?? "";
  request.t_end = t;
  for (const field of ["cached_tokens", "output_tokens", "preemptions", "recomputed_tokens"]) request[field] = event[field] ?? 0;
  for (const field of ["queue_s", "ttft_s", "tpot_s", "e2e_s"]) request[field] = event[field] ?? null;
  state.totals[event.reason === "abort" ? "aborted" : event.reason === "error" ? "errors" : "finished"] += 1;
  state.ended.push(event.request);
  if (state.ended.length > KEPT_FINISHED) delete state.requests[state.ended.shift()];
}

function cleared(state) {
  const { owners, sealed, fill, changed } = state.blocks;
  for (let block = 0; block < sealed.length; block++) {
    if (!sealed[block] || owners[block].length) continue;
    sealed[block] = 0;
    fill[block] = 0;
    changed[block] = state.step;
  }
  state.pool.cached_blocks = state.pool.resident_blocks = 0;
  settle(state);
  gauge(state);
}

function fault(state, event) {
  if (state.fatal) return;
  state.fault = event.message;
  state.fatal = event.fatal ?? false;
}

/** Rows of samples stay only while they still mean the same sensors of the same devices. */
function devices(state, event) {
  const told = event.devices ?? [];
  const sensors = (list) => JSON.stringify(list.map((device) => [device.uuid, ...(device.sensors ?? []).map((sensor) => sensor.name)]));
  if (sensors(state.devices.devices) !== sensors(told)) state.samples = [];
  state.devices = { state: event.state ?? "ready", message: event.message ?? "", devices: told };
}

function sample(state, event) {
  const device = state.devices.devices[event.device];
  if (!device || event.values.length !== device.sensors.length) return;
  state.samples.push([event.t ?? 0, event.t0, event.device, event.values, event.spans ?? null]);
  if (state.samples.length > KEPT_SAMPLES) state.samples.shift();
}

/** A foreign engine's gauges and counters. Totals grow by what its counters grew since the scrape before. */
function scrape(state, event) {
  const values = event.values ?? {}, { totals, pool } = state, window = event.window_s ?? 0, t = event.t ?? 0;
  state.step += 1;
  state.scrape = {
    t, values, window_s: window, scrape_s: event.scrape_s ?? 0, restarts: event.restarts ?? 0, unknown: event.unknown ?? 0,
    by_engine: event.by_engine ?? [],
  };
  const said = grown(values, "output_tokens_per_s", window);
  const computed = valueIn(values, "prompt_tokens_computed_per_s") === null ? "prompt_tokens_per_s" : "prompt_tokens_computed_per_s";
  const prefilled = grown(values, computed, window);
  totals.output_tokens += said;
  totals.computed_prefill_tokens += prefilled;
  totals.lookup_tokens += grown(values, "prefix_queries_per_s", window);
  totals.cached_tokens += grown(values, "prefix_hits_per_s", window);
  totals.preemptions = Math.trunc(valueIn(values, "preemptions") ?? 0);
  gauge(state);
  const running = valueIn(values, "running"), waiting = valueIn(values, "waiting");
  if (running === null && !said && !prefilled) return; // nothing that a strip could show
  const held = [pool.used_blocks, pool.cached_blocks, pool.filled_slots, pool.held_tokens];
  state.series.push([t, window, prefilled, said, ...held, Math.trunc(running ?? 0), Math.trunc(waiting ?? 0), said, 0, 0, 0, 0]);
  if (state.series.length > KEPT_ROWS) state.series.shift();
}

function valueIn(values, name) {
  return values[name]?.value ?? null;
}

/** What a counter grew in the window, from its rate. */
function grown(values, name, window) {
  return Math.trunc((valueIn(values, name) ?? 0) * window + 0.5);
}

/** The pool of an engine that tells only how many blocks are used, and which hashes are cached.
 *
 * Cached blocks may be used at the same time, and which are is not told. Counted as cached is what must be idle: all but
 * the used ones, of which each running request has one that is not full yet and so has no hash. How full used blocks are
 * is not told either: no slot counts as wasted. */
function gauge(state) {
  const used = state.scrape ? valueIn(state.scrape.values, "used_blocks") : null, { pool } = state;
  if (used === null) return;
  pool.used_blocks = Math.max(0, Math.min(Math.trunc(used), state.num_blocks));
  const running = Math.trunc(valueIn(state.scrape.values, "running") ?? 0);
  const idle = pool.resident_blocks - Math.max(0, pool.used_blocks - running);
  pool.cached_blocks = Math.max(0, Math.min(idle, state.num_blocks - pool.used_blocks));
  pool.filled_slots = pool.used_blocks * state.block_size;
  settle(state);
}

function capabilities(state, event) {
  state.capabilities = { kind: event.kind, version: event.version ?? "", views: event.views ?? [] };
}

function resident(state, event) {
  state.step += 1;
  if (event.cleared) cleared(state);
  const { pool } = state, { sealed } = state.blocks;
  for (const cell of event.removed ?? []) {
    if (!known(state, cell) || !sealed[cell]) continue;
    evict(state, cell, state.step);
    pool.resident_blocks = Math.max(0, pool.resident_blocks - (1 - sealed[cell])); // a step may have sealed it
  }
  for (const cell of event.stored ?? []) {
    if (!known(state, cell) || sealed[cell]) continue;
    seal(state, cell, state.step);
    // A step may have evicted some that were counted: never more than there are.
    pool.resident_blocks = Math.min(pool.resident_blocks + 1, state.num_blocks);
  }
  settle(state);
  gauge(state);
}

function heard(state, event) {
  const t = event.t ?? 0;
  for (const [who, promptTokens, said, first] of event.requests) {
    const request = state.requests[who];
    if (!request || request.state === "finished") continue;
    if (request.state === "queued") enter(state, request, "prefill", first ?? t);
    request.prompt_tokens = promptTokens || request.prompt_tokens;
    if (first !== null && request.t_first === null) {
      firstToken(state, request, first, Math.max(0, first - request.t_queued));
      enter(state, request, "decode", first);
    }
    if (said > request.output_tokens) {
      request.output_tokens = said;
      request.t_last = t;
    }
    // The last token it said is not computed yet, as in an engine of our own.
    const computed = request.output_tokens ? request.prompt_tokens + request.output_tokens - 1 : 0;
    state.pool.held_tokens += computed - request.computed;
    request.computed = computed;
  }
}

function enter(state, request, phase, t) {
  if (request.state !== "prefill" && request.state !== "decode") state.running.push(request.request);
  turn(request, phase, t);
}

function turn(request, phase, t) {
  if (request.state === phase && request.spans.length) return;
  request.state = phase;
  closeSpan(request, t);
  request.spans.push([phase, t, null]);
  if (request.spans.length > KEPT_SPANS) request.spans.shift();
}

function closeSpan(request, t) {
  const last = request.spans[request.spans.length - 1];
  if (last && last[2] === null) last[2] = Math.max(t, last[1]);
}

function leave(state, request) {
  if (request.state === "prefill" || request.state === "decode") state.running.splice(state.running.indexOf(request.request), 1);
}

function hold(state, request, block, number) {
  const { blocks, pool } = state, owners = blocks.owners[block];
  if (owners.length) pool.shared_saved_blocks += 1;
  else {
    pool.used_blocks += 1;
    pool.filled_slots += blocks.fill[block];
    pool.cached_blocks -= blocks.sealed[block];
  }
  blocks.owners[block] = [...owners, request.request];
  blocks.changed[block] = number;
}

function drop(state, request, block, number) {
  const { blocks, pool } = state, owners = blocks.owners[block].slice();
  owners.splice(owners.indexOf(request.request), 1);
  blocks.owners[block] = owners.length ? owners : NOBODY;
  blocks.changed[block] = number;
  if (owners.length) {
    pool.shared_saved_blocks -= 1;
    return;
  }
  pool.used_blocks -= 1;
  pool.filled_slots -= blocks.fill[block];
  if (blocks.sealed[block]) pool.cached_blocks += 1;
  else blocks.fill[block] = 0;
}

function release(state, request, number) {
  for (let i = request.table.length - 1; i >= 0; i--) drop(state, request, request.table[i], number);
  request.table = [];
  state.pool.held_tokens -= request.computed;
  request.computed = 0;
}

function evict(state, block, number) {
  const { blocks } = state;
  if (!blocks.sealed[block] || blocks.owners[block].length) return;
  blocks.sealed[block] = 0;
  blocks.fill[block] = 0;
  blocks.mark[block] = "evicted";
  blocks.marked[block] = number;
  state.pool.cached_blocks -= 1;
  state.totals.evictions += 1;
}

function fillSlots(state, request, begin, end, number) {
  const size = state.block_size || 1, { table } = request, { fill, changed } = state.blocks;
  const last = Math.min(Math.ceil(end / size), table.length);
  for (let index = Math.floor(Math.max(0, begin) / size); index < last; index++) {
    const block = table[index], slots = Math.min(size, end - index * size);
    if (fill[block] >= slots) continue;
    state.pool.filled_slots += slots - fill[block];
    fill[block] = slots;
    changed[block] = number;
  }
}

function seal(state, block, number) {
  const { blocks, pool } = state;
  if (!known(state, block) || blocks.sealed[block]) return;
  blocks.sealed[block] = 1;
  blocks.changed[block] = number;
  if (blocks.owners[block].length) pool.filled_slots += state.block_size - blocks.fill[block];
  else pool.cached_blocks += 1;
  blocks.fill[block] = state.block_size;
}

function settle(state) {
  const pool = state.pool;
  pool.free_blocks = state.num_blocks - pool.used_blocks - pool.cached_blocks;
  pool.wasted_slots = pool.used_blocks * state.block_size - pool.filled_slots;
}

const FOLDS = { step, queued, finished, configured, cleared, fault, devices, sample, scrape, capabilities, resident, heard };
