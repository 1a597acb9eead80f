// The arithmetic behind the pictures of the phases page and the hardware page, without a browser.
import assert from "node:assert/strict";
import { test } from "node:test";

import { attainable, decades, logScale, rate, tick } from "../../assets/live/views/axes.js";
import { computed, measured } from "../../assets/live/views/bandwidth.js";
import { roundTop, stacked } from "../../assets/live/views/bytes.js";
import { crowd, shares } from "../../assets/live/views/parts.js";
import { perToken } from "../../assets/live/views/phase_numbers.js";
import { domain, ownRoof, modelled, points, roofWords, sheetRoof } from "../../assets/live/views/roofs.js";
import { pairs } from "../../assets/live/views/scores.js";
import { chosenGpu, clockReasons, hostIndex, labelOf, newest, phases, values } from "../../assets/live/views/sensors.js";
import { reasonsOver, topOf, valueWords } from "../../assets/live/views/strips.js";
import { rows } from "../../assets/live/views/windows.js";

const parts = { schedule: 0.01, build: 0.01, attention: 0.2, linear: 0.7, sample: 0.02, output: 0.01, unattributed: 0.05 };
const summary = (more = {}) => ({
  steps: 10, seconds: 1, tokens: 40, batch: 4, context: 100, flops: 8e9, attention_flops: 1e9, weight_bytes: 3e9, kv_read_bytes: 9e8,
  kv_write_bytes: 1e8, activation_bytes: 0, parts, attention_measured: true, rate_low: 7e9, rate_high: 9e9, verdict: null, ...more,
});
const ceiling = (value) => ({ value, low: 0.9 * value, high: 1.1 * value });
const roofs = { state: "measured", ceilings: { read: ceiling(1e10), matmul: ceiling(1e11) } };

test("a phase is a point of FLOPs over bytes and over seconds, and two more for its halves", () => {
  const [whole, linear, attention] = points({ phases: { decode: summary() } });
  assert.deepEqual([whole.x, whole.y], [2, 8e9]);
  assert.deepEqual([linear.x, linear.y], [7e9 / 3e9, 1e10]);
  assert.deepEqual([attention.x, attention.y], [1, 5e9]);
});

test("without a time for attention there are no halves, and without steps no point", () => {
  assert.equal(points({ phases: { decode: summary({ attention_measured: false }) } }).length, 1);
  assert.deepEqual(points(null), []);
  assert.deepEqual(points({ phases: { decode: summary({ flops: 0 }) } }), []);
});

test("the modelled point lies on the roof: left of the ridge on its slope, right of it under its lid", () => {
  const roof = ownRoof({ roofs });
  assert.equal(roof.ridge, 10);
  const shape = (x) => ({ model: { x, flops: x * 1e9, bytes: 1e9, words: [] } });
  assert.equal(modelled(shape(2), roof)[0].y, 2e10);
  assert.equal(modelled(shape(50), roof)[0].y, 1e11);
  assert.deepEqual(modelled(shape(2), null), [], "no roof, no time");
  const both = modelled({ ...shape(2), overlay: { name: "H100", bandwidth: 3e12, flops: 1e15 } }, roof);
  assert.deepEqual(both.map((p) => p.y), [2e10, 6e12]);
  assert.match(both[1].words.at(-1), /memory-bound/);
});

test("a missing roof is told in words, and progress too", () => {
  assert.equal(ownRoof({ roofs: { state: "none" } }), null);
  assert.match(roofWords({ state: "none" }), /not measured yet/);
  assert.match(roofWords({ state: "measuring", share: 0.4, text: "copy" }), /40 % copy/);
  assert.match(roofWords({ state: "unknown", text: "busy" }), /busy/);
});

test("a data sheet's roof needs both of its numbers, and plausible ones", () => {
  const peak = (of, value, more = {}) => ({ of, value, kind: "data sheet", accepted: true, ...more });
  const sheet = (...beside) => sheetRoof({ roofs: { ceilings: { beside } } });
  assert.equal(sheet(peak("bandwidth", 3e12)), null);
  assert.equal(sheet(peak("bandwidth", 3e12), peak("arithmetic", 9e14)).flops, 9e14);
  assert.equal(sheet(peak("bandwidth", 3e12, { accepted: false }), peak("arithmetic", 9e14)), null);
  assert.equal(sheetRoof(null), null);
});

test("every point and every roof lies within the axes", () => {
  const shown = [{ x: 0.02, y: 1e5 }, { x: 5000, y: 1e13 }];
  const { x, y } = domain(shown, [{ bandwidth: 1e9, flops: 1e12 }]);
  for (const point of shown) assert.ok(x[0] <= point.x && point.x <= x[1] && y[0] <= point.y && point.y <= y[1]);
  assert.ok(domain([], []).y[1] > 0);
});

test("equal ratios are equal lengths", () => {
  const scale = logScale(1, 1000, 0, 300);
  assert.deepEqual([1, 10, 100, 1000].map((v) => Math.round(scale(v))), [0, 100, 200, 300]);
  assert.ok(Math.abs(scale.invert(150) - 10 ** 1.5) < 1e-9);
  assert.deepEqual(decades(0.1, 100).map((v) => Number(v.toPrecision(2))), [0.1, 1, 10, 100]);
  assert.deepEqual([0.1, 1, 1000].map(tick), ["0.1", "1", "1,000"]);
  assert.deepEqual([rate(3.352e12, "B/s"), rate(20e9, "B/s"), rate(0, "B/s")], ["3.35 TB/s", "20.0 GB/s", "0 B/s"]);
  assert.equal(attainable(2, 10, 100), 20);
});

test("parts of a step are shares of all of it", () => {
  const found = shares(summary());
  assert.ok(Math.abs(found.reduce((sum, [, share]) => sum + share, 0) - 1) < 1e-9);
  assert.equal(found.find(([name]) => name === "linear")[1], 0.7);
});

test("a decoded token against a prefilled one", () => {
  const message = { phases: { prefill: summary({ seconds: 0.179, tokens: 104 }), decode: summary({ seconds: 0.455, tokens: 10, batch: 1 }) } };
  assert.ok(Math.abs(perToken(message).ratio - 26.4) < 0.1); // the course text's own figures: 179 ms for 104 tokens, 45.5 ms a token
  assert.equal(perToken({ phases: { decode: summary() } }), null);
});

test("stacks and score counts", () => {
  const curve = { xs: [1, 2], weights: [5, 5], kv_read: [1, 2], kv_write: [1, 1], activations: [0, 3] };
  assert.deepEqual(stacked(curve), [[0, 5, 6, 7, 7], [0, 5, 7, 8, 11]]);
  assert.equal(pairs(4, 0), 10);
  assert.equal(roundTop(700 * 2 ** 20, "GiB"), 800 * 2 ** 20);
  assert.equal(roundTop(7e8, "GB"), 8e8);
  assert.equal(pairs(1, 99), 100);
});

// ---- sensors

const sensor = (name, more = {}) => ({ name, unit: "W", source: "nvml", label: `measured: ${name}`, note: "", period_s: 0.2, span_s: 0, ...more });
const device = (uuid, more = {}) => ({ uuid, name: uuid, kind: "gpu", used: false, fake: false, state: "ok", sensors: [sensor("power"), sensor("dram_bandwidth", { unit: "%" })], peak_bandwidth_bytes_per_s: 0, notes: [], processes: [], ...more });
const state = (devices, samples = []) => ({ t: 10, device: { kind: "cuda" }, devices: { state: "ready", message: "", devices }, samples, series: [] });

test("the page is about the GPU that was picked, else the one that computes, else the first", () => {
  const told = state([device("host", { kind: "host" }), device("a"), device("b", { used: true })]);
  assert.equal(chosenGpu(told), 2);
  assert.equal(chosenGpu(told, "a"), 1);
  assert.equal(chosenGpu(told, "gone"), 2);
  assert.equal(chosenGpu(state([device("host", { kind: "host" })])), -1);
  assert.equal(hostIndex(told), 0);
});

test("a missing reading is no number: not in a line, not as the newest", () => {
  const told = state([device("a")], [[1, 0.8, 0, [100, null], null], [2, 1.8, 0, [null, null], null], [3, 2.8, 1, [999, null], null], [4, 3.8, 0, [0, null], [0.5, null]]]);
  assert.deepEqual(values(told, 0, 0), [[1, 100], [4, 0]]);
  assert.deepEqual(newest(told, 0, 0), { value: 0, t: 4, span: 0.5 });
  assert.equal(newest(told, 0, 1), null);
});

test("words beside a value are the engine's own, a reason where there is none", () => {
  assert.equal(labelOf(sensor("power"), null), "measured: power");
  assert.equal(labelOf(sensor("power", { label: "", note: "needs Volta" }), null), "not available: needs Volta");
});

test("counters become bytes only with a peak, and only of the device that computes", () => {
  const peak = { peak_bandwidth_bytes_per_s: 4e12 };
  const samples = [[9, 8.8, 0, [1, 50], null]];
  assert.deepEqual(measured(state([device("a", { used: true, ...peak })], samples), 0).points, [[9, 2e12]]);
  assert.match(measured(state([device("a", { used: true })], samples), 0).reason, /peak/);
  assert.match(measured(state([device("a", peak)], samples), 0).reason, /does not compute/);
  const old = device("a", { used: true, sensors: [sensor("power"), sensor("dram_bandwidth", { note: "needs Hopper" })] });
  assert.deepEqual([measured(state([old]), 0).points, measured(state([old]), 0).reason], [[], "needs Hopper"]);
  const busy = device("a", { used: true, ...peak, sensors: [sensor("memory_busy", { unit: "%" })] });
  assert.deepEqual(measured(state([busy], [[9, 8.8, 0, [80], null]]), 0).points, [], "memory busy is a share of time, never bytes");
});

test("computed bandwidth is what the points of the roofline say", () => {
  assert.deepEqual(computed({ trail: [[1, "decode", 2, 8e9]] }), [[1, 4e9, "decode"]]);
  assert.deepEqual(computed(null), []);
});

test("why clocks are low, in words", () => {
  assert.deepEqual(clockReasons(0x4 | 0x20), ["power cap", "temperature (driver)"]);
  assert.deepEqual(clockReasons(0), []);
  assert.deepEqual(clockReasons(0x800), ["reason 0x800"]);
  assert.equal(reasonsOver([[1, 4], [2, 4], [3, 0], [4, 4]]), "power cap: 75 % of the readings; nothing holds them back: 25 % of the readings");
});

test("time is shaded by what the engine computed, and a pause stays unshaded", () => {
  const row = (t, prefill) => [t, 0.02, prefill, 1];
  assert.deepEqual(
    phases([row(1.02, 9), row(1.04, 9), row(1.06, 0), row(3, 0)], 0).map(([from, to, kind]) => [Number(from.toFixed(2)), to, kind]),
    [[1, 1.04, "prefill"], [1.04, 1.06, "decode"], [2.98, 3, "decode"]],
  );
});

test("values carry their unit, and an axis is above all of them", () => {
  assert.deepEqual([valueWords(405, "W"), valueWords(2 ** 30, "B"), valueWords(9e8, "B/s"), valueWords(97, "%")], ["405 W", "1.00 GiB", "900 MB/s", "97 %"]);
  assert.equal(topOf([[0, 12]], "%"), 100);
  for (const v of [3, 77, 405, 1980]) assert.ok(topOf([[0, v]], "W") >= v);
});

test("other work on the machine is told, where steps wait for it", () => {
  const host = device("host", { kind: "host", sensors: [sensor("load_average")] });
  const told = (load, kind = "cpu") => ({ ...state([host], [[1, 0, 0, [load], null]]), device: { kind, threads: 2 } });
  assert.match(crowd(told(8.6)), /8\.6 on 2 threads/);
  assert.equal(crowd(told(2.1)), "");
  assert.equal(crowd(told(8.6, "cuda")), "");
  assert.equal(crowd({ ...state([]), device: { kind: "cpu", threads: 2 } }), "");
});

test("a window without counters says why in each of its cells", () => {
  const value = { value: null, reason: "needs Hopper", label: "", error: null };
  const phase = { steps: 5, seconds: 1, tokens: 5, computed: 4e9, measured: value, ratio: value, joules_per_token: { value: 0.5, label: "counter", error: 0.1, reason: "" }, power_capped: value };
  const [[name, computedCell, measuredCell, , energy]] = rows({ phases: { decode: phase } });
  assert.match(name[0], /decode/);
  assert.equal(computedCell[0], "4.00 GB/s");
  assert.deepEqual(measuredCell, ["–", "not available: needs Hopper"]);
  assert.equal(energy[0], "0.50 J/token ± 0.10");
});
