// The browser's fold against the states that backend/fold.py came to. tests/test_fold.py writes those and starts this:
//     KVSCOPE_EXPECTED=folder node --test tests/js/fold.test.mjs
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";
import { apply, empty, inFlight, label, poolSplit } from "../../assets/live/fold.js";

const folder = process.env.KVSCOPE_EXPECTED;
const blank = empty();
const plain = (value) => JSON.parse(JSON.stringify(value));

/** Python leaves defaults of model and device out. */
const whole = (state) => ({ ...state, model: { ...blank.model, ...state.model }, device: { ...blank.device, ...state.device } });

function same(found, expected, where) {
  found = plain(found);
  expected = whole(expected);
  for (const column of Object.keys(expected.blocks)) {
    expected.blocks[column].forEach((value, block) => {
      assert.deepEqual(found.blocks[column][block], value, `${where}: ${column} of block ${block}`);
    });
  }
  for (const [number, request] of Object.entries(expected.requests)) {
    assert.deepEqual(found.requests[number], request, `${where}: request ${number}`);
  }
  assert.deepEqual(found, expected, where);
}

for (const file of folder ? readdirSync(folder) : []) {
  const { lines, points } = JSON.parse(readFileSync(`${folder}/${file}`, "utf-8"));

  test(`${file}: the same states as Python's`, () => {
    const state = empty();
    let at = 0;
    for (const { lines: end, state: expected } of points) {
      for (; at < end; at++) apply(state, JSON.parse(lines[at]));
      same(state, expected, `${file} after ${end} lines`);
    }
    assert.ok(points.length > 3);
  });

  test(`${file}: the same end from a snapshot in the middle`, () => {
    const last = points[points.length - 1];
    for (const { lines: begin, state: middle } of points) {
      const state = empty();
      apply(state, { type: "snapshot", state: plain(middle) });
      assert.equal(state.gaps, 0);
      state.gaps = middle.gaps;
      same(state, middle, `${file}: snapshot at ${begin}`);
      for (const line of lines.slice(begin)) apply(state, JSON.parse(line));
      same(state, last.state, `${file} from line ${begin}`);
    }
  });

  test(`${file}: doubled lines change nothing`, () => {
    const once = empty(), twice = empty();
    let epoch;
    lines.map((line) => JSON.parse(line)).forEach((event, i, all) => {
      apply(once, event);
      apply(twice, event);
      if (event.type === "hello") epoch = i;
      for (const old of all.slice(Math.max(epoch + 1, i - 3), i + 1)) apply(twice, old);
    });
    assert.deepEqual(plain(twice), plain(once));
  });
}

test("letters", () => {
  assert.deepEqual([1, 2, 26, 27, 52, 53, 702, 703].map(label), ["A", "B", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]);
});

test("the pool splits without remainder", () => {
  const state = empty();
  apply(state, { type: "hello", epoch: "e", model: { name: "m", kv_bytes_per_token: 100 }, device: {}, block_size: 4, num_blocks: 8 });
  apply(state, { type: "queued", seq: 1, request: 1, id: "a", prompt_tokens: 6, max_tokens: 2 });
  apply(state, { type: "step", seq: 2, step: 1, ops: [["admit", 1], ["alloc", 1, 0, 1]], prefill: [[1, 6, 0]], sealed: [0] });
  const split = poolSplit(state);
  assert.deepEqual([split.filled, split.wasted, split.free, split.block_bytes], [1.5, 0.5, 6, 400]);
  assert.equal(split.filled + split.wasted + split.cached + split.free, split.total);
  assert.equal(inFlight(state), 1);
});

test("a newer schema is refused", () => {
  assert.throws(() => apply(empty(), { type: "hello", schema: 99, epoch: "e", block_size: 1, num_blocks: 1 }), /schema 99/);
});
