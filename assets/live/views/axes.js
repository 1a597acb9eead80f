// Logarithmic axes, and numbers with the prefixes that rates are spoken in.
import { figures } from "./draw.js";

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];

/** 3.35e12, "B/s" → "3.35 TB/s"; decimal prefixes, as bandwidths and FLOP rates are stated. */
export function rate(value, unit) {
  if (!(value > 0)) return `0 ${unit}`;
  const [scale, prefix] = PREFIXES.find(([size]) => value >= size * 0.9995) ?? [1, ""];
  return `${figures(value / scale)} ${prefix}${unit}`;
}

/** 1 → "1", 0.1 → "0.1", 1000 → "1,000": a tick of a logarithmic axis without a unit. */
export function tick(value) {
  return value >= 1 ? value.toLocaleString("en-US") : String(Number(value.toPrecision(1)));
}

/** Maps [low, high] to [from, to] in equal steps for equal ratios. */
export function logScale(low, high, from, to) {
  const a = Math.log10(low), span = Math.log10(high) - a || 1;
  const scale = (value) => from + ((to - from) * (Math.log10(Math.max(value, Number.MIN_VALUE)) - a)) / span;
  scale.invert = (place) => 10 ** (a + (span * (place - from)) / (to - from));
  scale.low = low;
  scale.high = high;
  return scale;
}

/** Powers of ten from `low` to `high`. */
export function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power++) found.push(10 ** power);
  return found;
}

/** The roof at an arithmetic intensity: what memory feeds, or what the units can do, whichever is less. */
export const attainable = (intensity, bandwidth, flops) => Math.min(intensity * bandwidth, flops);
