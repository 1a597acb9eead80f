// The arithmetic behind the pictures, without a browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import { bytes, figures, letters, niceCeil, percent, seconds } from "../../assets/live/views/draw.js";
import { firstAfter } from "../../assets/live/views/clock.js";
import { ganttRows, statusLine } from "../../assets/live/views/gantt.js";
import { Pool, describe, kindOf } from "../../assets/live/views/grid.js";
import { hitRate, outputRate, quantile } from "../../assets/live/views/numbers.js";
import { formulas } from "../../assets/live/views/split.js";
import { whomToShow } from "../../assets/live/views/text.js";

const request = (number, more = {}) => ({
  request: number, id: `id-${number}`, user: "", prompt_tokens: 100, output_tokens: 0, computed: 0, cached_tokens: 0, table: [], spans: [],
  state: "decode", reason: "", t_queued: 0, t_end: null, queue_s: 0.1, ...more,
});
const byNumber = (...all) => Object.fromEntries(all.map((r) => [r.request, r]));

test("figures state three digits and their unit", () => {
  assert.equal(figures(3.214), "3.21");
  assert.equal(figures(32.14), "32.1");
  assert.equal(figures(3214), "3,214");
  assert.equal(seconds(0.0042), "4.2 ms");
  assert.equal(seconds(0.842), "842 ms");
  assert.equal(seconds(1.5), "1.50 s");
  assert.equal(percent(0), "0 %");
  assert.equal(percent(0.034), "3.4 %");
});

test("GiB and GB are different and say which they are", () => {
  assert.equal(bytes(2 ** 30, "GiB"), "1.00 GiB");
  assert.equal(bytes(2 ** 30, "GB"), "1.07 GB");
  assert.equal(bytes(0, "GiB"), "0 B");
});

test("axis tops are round and hold the value", () => {
  for (const value of [1, 17, 99, 101, 51_000]) {
    assert.ok(niceCeil(value) >= value);
    assert.ok(niceCeil(value) <= value * 2);
  }
});

test("letters go on after Z", () => {
  assert.deepEqual([1, 26, 27, 702, 703].map(letters), ["A", "Z", "AA", "ZZ", "AAA"]);
});

test("p95 is the nearest rank, and nothing without a value", () => {
  const hundred = Array.from({ length: 100 }, (_, i) => 100 - i);
  assert.equal(quantile(hundred, 0.95), 95);
  assert.equal(quantile([7], 0.95), 7);
  assert.equal(quantile([], 0.95), null);
});

test("the rate counts the last three seconds, and is no number without traffic", () => {
  const row = (t, tokens) => [t, 0.1, 0, 0, 0, 0, 0, 0, 1, 0, tokens];
  const steady = Array.from({ length: 100 }, (_, i) => row(i / 10, 4));
  assert.ok(Math.abs(outputRate(steady, 9.9) - 40) < 2);
  assert.equal(outputRate(steady, 60), null);
  assert.equal(outputRate([], 1), null);
  // A run that began a second ago is not diluted by the two before.
  assert.ok(Math.abs(outputRate(steady.slice(0, 10), 0.95) - 40) < 5);
});

test("bisection finds the first row after a moment", () => {
  const rows = [[1], [2], [2], [3]];
  assert.deepEqual([0, 1, 2, 3].map((t) => firstAfter(rows, t)), [0, 1, 3, 4]);
});

test("the hit rate looks at the newest admissions only", () => {
  const old = Array.from({ length: 40 }, (_, i) => request(i + 1, { cached_tokens: 80 }));
  const fresh = Array.from({ length: 32 }, (_, i) => request(i + 100, { cached_tokens: 0 }));
  const queued = request(900, { queue_s: null, cached_tokens: 0, prompt_tokens: 9999 });
  assert.equal(hitRate({ requests: byNumber(...old, ...fresh, queued) }).share, 0);
  assert.equal(hitRate({ requests: byNumber(...old) }).share, 0.8);
  assert.equal(hitRate({ requests: {} }), null);
});

test("live requests stand above finished ones, and old finished ones leave", () => {
  const state = { requests: byNumber(request(3, { state: "finished", t_end: 99 }), request(5), request(4, { state: "queued" }), request(1, { state: "finished", t_end: 20 })) };
  assert.deepEqual(ganttRows(state, 100).map((r) => r.request), [4, 5, 3]);
  assert.deepEqual(ganttRows(state, 100, new Set(["id-5"])).map((r) => r.request), [5, 4, 3], "the own prompt is not searched for");
});

test("the status says more than a colour", () => {
  assert.match(statusLine(request(1, { state: "queued", t_queued: 9 }), 10), /queued 1\.00 s/);
  assert.match(statusLine(request(1, { state: "prefill", computed: 64 }), 10), /▲ prefill 64\/100/);
  assert.match(statusLine(request(1, { state: "finished", reason: "abort", output_tokens: 5 }), 10), /5 tokens abort/);
});

const blocks = { owners: [[], [], [1], [1, 2, 3]], fill: [0, 16, 5, 16], sealed: [0, 1, 0, 1] };

test("a block is free, cached, used or shared", () => {
  assert.deepEqual([0, 1, 2, 3].map((i) => kindOf(blocks, i)), ["free", "cached", "used", "shared"]);
  assert.match(describe({ blocks, block_size: 16 }, 2), /5 of 16 slots used, owned by A/);
  assert.match(describe({ blocks, block_size: 16 }, 3), /shared ×3, owned by A, B, C/);
});

test("cells of any pool fit the canvas, and a point finds its cell", () => {
  for (const count of [1, 7, 64, 1000, 4096, 32768]) {
    for (const [width, height] of [[780, 400], [300, 400], [1200, 72]]) {
      const pool = new Pool({ style: {} }, null, true);
      pool.layout(count, width, height, 1, { gutter: 44 });
      assert.ok(pool.left + pool.columns * pool.width <= width, `${count} blocks are too wide for ${width}`);
      assert.ok(pool.rows * pool.height <= height, `${count} blocks are too high for ${height}`);
      assert.ok(pool.columns * pool.rows >= count);
      for (const i of [0, count >> 1, count - 1]) {
        const [x, y] = pool.place(i);
        assert.equal(pool.at(x + pool.width / 2, y + pool.height / 2), i);
      }
      assert.equal(pool.at(2, 2), -1, "the gutter is no block");
    }
  }
});

test("formulas carry the live values", () => {
  const state = {
    block_size: 16, num_blocks: 64, model: { layers: 30, kv_heads: 3, head_dim: 64, kv_bytes_per_token: 23040 },
    pool: { used_blocks: 10, filled_slots: 150, wasted_slots: 10, cached_blocks: 4, free_blocks: 50, shared_saved_blocks: 2 },
  };
  const text = formulas(state, "GiB").map((line) => line.join(" ")).join("\n");
  assert.match(text, /2 × 30 × 3 × 64 × 2\.00 B × 16 = 360 KiB/);
  assert.match(text, /1 − 150 ÷ \(10 × 16\) = 6\.3 %/);
  assert.match(text, /2 blocks = 720 KiB/);
});

test("the text view follows a person's choice, else the own prompt, else what runs", () => {
  const state = { requests: byNumber(request(1), request(2), request(3), request(4), request(5), request(6, { state: "finished" })), running: [1, 2, 3, 4, 5] };
  const nobody = { picked: [], shown: [], own: new Set() };
  assert.deepEqual(whomToShow(state, { ...nobody, picked: [4, 2] }), [4, 2]);
  assert.deepEqual(whomToShow(state, nobody), [1, 2, 3, 4]);
  assert.deepEqual(whomToShow(state, { ...nobody, own: new Set(["id-6", "id-5"]) }), [6, 1, 2, 3]);
  assert.deepEqual(whomToShow(state, { ...nobody, shown: [6, 5] }), [5, 1, 2, 3]);
  assert.deepEqual(whomToShow({ ...state, running: [] }, { ...nobody, shown: [6] }), [6], "what was said stays to be read");
});
