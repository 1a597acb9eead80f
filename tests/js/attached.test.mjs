// What an attached engine's pictures say of it: nothing that it does not tell, and never a 0 for what is missing.
import assert from "node:assert/strict";
import { test } from "node:test";

import { anonymousFrom, describe } from "../../assets/live/views/grid.js";
import { imbalanceWords, totals, worded } from "../../assets/live/views/fleet.js";
import { statusLine } from "../../assets/live/views/gantt.js";
import { points } from "../../assets/live/views/roofs.js";
import { guessed } from "../../assets/live/views/table.js";
import { SCRAPED, SCRAPED_PHASES, age, bucket, others, stale } from "../../assets/live/views/scraped.js";

const state = (values, more = {}) => ({
  t: 7, scrape: { t: 7, values, window_s: 1 }, requests: {}, ttfts: [], totals: { lookup_tokens: 0, cached_tokens: 0 }, block_size: 16, num_blocks: 100,
  model: { kv_bytes_per_token: 0 }, capabilities: { views: [] }, ...more,
});
const card = (name, s) => SCRAPED[name][0](s, 0, "GiB");

test("what is absent says why, and is no number", () => {
  const absent = { quality: "absent", note: "no such counter in this version" };
  const bare = state(Object.fromEntries(["running", "kv_usage", "output_tokens_per_s", "ttft_p95_s", "hit_rate"].map((name) => [name, absent])));
  for (const name of ["flight", "blocks", "rate", "ttft", "hits"]) {
    assert.deepEqual(card(name, bare).slice(0, 2), ["Not available", absent.note], name);
  }
  for (const name of ["filled", "saved"]) assert.equal(card(name, bare)[0], "Not available");
});

test("what is cached where is told by KV events only", () => {
  const flag = "--kv-events-config", view = { view: "prefix_tree", quality: "none", why: "vLLM publishes none", flag };
  assert.deepEqual(card("filled", state({}, { capabilities: { views: [view] } })).slice(0, 2), ["Not available", `vLLM publishes none · ${flag}`]);
  const told = { cached_tokens_gpu: { value: 512, name: "KV events" }, cached_tokens_cpu: { value: 64, name: "KV events" } };
  const [value, below, from] = card("filled", state(told, { model: { kv_bytes_per_token: 1024 } }));
  assert.deepEqual([value, below], ["576 tokens", "GPU 512 tokens = 512 KiB · CPU 64 tokens = 64.0 KiB"]);
  assert.match(from, /^measured · KV events/);
  assert.equal(card("filled", state(told))[1], "GPU 512 tokens · CPU 64 tokens"); // bytes of a token are not told
});

test("gauges are the server's, with the series that they were read from", () => {
  const found = state({
    running: { value: 12, name: "vllm:num_requests_running" }, waiting: { value: 3, name: "vllm:num_requests_waiting" },
    kv_usage: { value: 0.5, name: "vllm:kv_cache_usage_perc", note: "cached blocks do not count" }, used_blocks: { value: 50 },
    output_tokens_per_s: { value: 240, name: "vllm:generation_tokens_total" }, hit_rate: { value: 0.25, quality: "derived", name: "vllm:prefix_cache_hits_total" },
  });
  const [flight, below, from] = card("flight", found);
  assert.equal(flight, "15");
  assert.equal(below, "12 running + 3 waiting · 15 not ours");
  assert.match(from, /^measured · vllm:num_requests_running/);
  assert.deepEqual(card("blocks", found).slice(0, 2), ["50 %", "50 of 100 blocks"]);
  assert.match(card("blocks", found)[2], /cached blocks do not count/);
  assert.deepEqual(card("rate", found).slice(0, 2), ["240 tok/s", "20.0 tok/s per running request"]);
  assert.match(card("hits", found)[2], /^derived/);
  assert.equal(card("rate", state({ output_tokens_per_s: { value: 0 } }))[0], "No traffic");
});

test("a quantile comes with its bucket, and own requests stand in while there is none", () => {
  assert.equal(bucket({ low: 0.1, high: 0.25 }), "between 100 ms and 250 ms");
  assert.equal(bucket({ low: 2.5 }), "over 2.50 s");
  const told = state({ ttft_p95_s: { value: 0.2, low: 0.1, high: 0.25, name: "h" }, ttft_p50_s: { value: 0.1 } });
  assert.deepEqual(card("ttft", told).slice(0, 2), ["200 ms", "p50 100 ms · p95 between 100 ms and 250 ms"]);
  const own = state({ ttft_p95_s: { name: "h" } }, { ttfts: [[1, 0.3], [2, 0.1]] });
  assert.deepEqual(card("ttft", own).slice(0, 2), ["300 ms", "of our own 2, at this client"]);
});

test("requests of others are a number, and known only of an attached engine", () => {
  const ours = { 1: { state: "decode" }, 2: { state: "finished" } };
  assert.equal(others(state({ running: { value: 5 }, waiting: { value: 2 } }, { requests: ours })), 6);
  assert.equal(others(state({ running: { value: 0 } }, { requests: ours })), 0); // a gauge that is a moment old
  const ended = { ...ours, 3: { state: "finished", t_queued: 1, t_end: 6.5 }, 4: { state: "finished", t_queued: 1, t_end: 5 } };
  assert.equal(others(state({ running: { value: 2 } }, { requests: ended })), 0); // one of them ended since the gauge was read
  assert.equal(others(state({ running: { value: 2 } }, { requests: { ...ours, 3: { state: "decode", t_queued: 7.1 } } })), 1); // not in it yet
  assert.equal(others(state({})), null);
  assert.equal(others({ scrape: null, requests: ours }), null);
});

test("old numbers are said to be old, and no longer of now", () => {
  const found = state({ running: { value: 5 } }), begin = performance.now();
  assert.ok(age(found, begin) < 0.01 && !stale(found, begin));
  assert.ok(Math.abs(age(found, begin + 6000) - 6) < 0.01 && stale(found, begin + 6000));
  const late = state({}, { t: 20 }); // of a snapshot: nothing was read for 13 s, other events came
  assert.ok(age(late, begin) >= 13 && stale(late, begin));
  const slow = { ...state({}), scrape: { t: 7, values: {}, window_s: 10 } };
  assert.ok(!stale(slow, performance.now()) && !stale(slow, performance.now() + 25_000) && stale(slow, performance.now() + 31_000));
});

test("blocks in use without a known hash are the last free cells", () => {
  const blocks = { owners: Array(10).fill([]), sealed: [1, 1, 1, 0, 0, 0, 0, 0, 1, 0], fill: Array(10).fill(0) };
  const pool = { used_blocks: 5, cached_blocks: 1, resident_blocks: 4 }; // 3 of the cached ones are in use: 2 are not known
  const shown = { ...state({}), blocks, pool };
  assert.equal(anonymousFrom(shown), 7); // cells 9 and 7; 8 is a cached one
  assert.match(describe(shown, 7), /which one is not told/);
  assert.match(describe(shown, 8), /cached block of 16 tokens; who uses it now is not told/);
  assert.equal(describe(shown, 5), "Cell 5: free");
  const inferred = { request: 2, cells: new Set([8]) };
  assert.match(describe(shown, 8, inferred), /of request B, inferred from its tokens, not told/);
  assert.match(describe(shown, 0, inferred), /who uses it now is not told/);
  assert.equal(anonymousFrom({ ...shown, pool: { used_blocks: 0, cached_blocks: 4, resident_blocks: 4 } }), 10);
  assert.equal(anonymousFrom({ scrape: null, blocks, pool }), Infinity);
});

test("a request without a token is neither queued nor in prefill there", () => {
  const request = { state: "prefill", computed: 0, prompt_tokens: 40, output_tokens: 0, t_queued: 1 };
  assert.equal(statusLine(request, 1.5, true), "◌ no token yet 500 ms");
  assert.equal(statusLine(request, 1.5), "▲ prefill 0/40");
});

test("an inferred block table says that it is, and why there is none", () => {
  const request = { request: 2, user: "", id: "chat-2" };
  assert.equal(guessed(request, undefined), "Inferring from its tokens · chat-2");
  assert.match(guessed(request, []), /^Nothing to infer: its token ids are not told, or no full block of it is cached/);
  assert.match(guessed(request, [3, 8]), /^Inferred from its tokens, not told: 2 full cells/);
});

test("the estimate is a point of its own, said to be one", () => {
  const [point] = points({ estimate: { flop_per_byte: 14, flops_per_s: 4e10, bytes_per_s: 3e9, window_s: 1, series: ["vllm:estimated_flops_per_gpu_total"] } });
  assert.deepEqual([point.phase, point.x, point.y], ["estimated", 14, 4e10]);
  assert.match(point.words.join(), /estimated, not counted: vllm:estimated_flops/);
  assert.deepEqual(points({}), []);
  const none = state({}, { capabilities: { views: [{ view: "roofline", why: "vLLM exports no FLOPs", flag: "--enable-mfu-metrics" }] } });
  assert.deepEqual(SCRAPED_PHASES.mbu[0](none).slice(0, 2), ["Not available", "vLLM exports no FLOPs · --enable-mfu-metrics"]);
  const told = state({ flops_per_s: { value: 4e10 }, read_bytes_per_s: { value: 2e9 }, write_bytes_per_s: { value: 0 } });
  assert.equal(SCRAPED_PHASES.ridge[0](told)[0], "20.0 FLOP/byte");
});

test("a fleet's shares are never summed, and what nobody tells is a dash", () => {
  const sums = {
    replicas: 3, states: { live: 2, probing: 0, stale: 0, down: 1 }, totals: { running: { value: 3, of: 2 }, output_tokens_per_s: { value: 200, of: 1 } },
    kv_usage: { value: 0.4, of: 2 }, hit_rate: null, spread: { kv_usage: { low: 0.2, median: 0.4, high: 0.6, lowest: "a", highest: "b", of: 2 } },
    imbalance: { running: 1.1, kv_usage: 1.5 },
  };
  const found = Object.fromEntries(totals(sums, new Map([["b", "right"]])).map(([name, value, below]) => [name, [value, below]]));
  assert.deepEqual(found["KV usage"], ["40 %", "20 % to 60 % · most: right"]);
  assert.deepEqual(found["Replicas live"], ["2 of 3", "1 does not answer"]);
  assert.equal(found["Requests"][1], "waiting ones are not told");
  assert.deepEqual(found["Output tokens per second"], ["200 tok/s", "all live replicas · 1 of 2 tell it"]);
  assert.equal(found["Prefix hit rate"][0], "–");
  assert.equal(found["TTFT p95, worst replica"][0], "–");
  assert.equal(imbalanceWords(sums), "KV usage: the fullest replica has 1.50 × the mean");
});

test("values are said in the unit of their name", () => {
  assert.equal(worded("kv_usage", 0.07), "7.0 %");
  assert.equal(worded("ttft_p95_s", 0.25), "250 ms");
  assert.equal(worded("output_tokens_per_s", 113.4), "113");
  assert.equal(worded("read_bytes_per_s", 3e9), "3.00 GB/s");
  assert.equal(worded("running", 12), "12");
});
