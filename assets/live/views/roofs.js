// What a roofline is made of, without drawing: points of the newest steps, roofs, the modelled shape. Pure.
import { percent, seconds } from "./draw.js";
import { rate } from "./axes.js";

export const MARKS = {
  prefill: { glyph: "▲", word: "prefill" },
  decode: { glyph: "●", word: "decode" },
  mixed: { glyph: "◆", word: "mixed: decode and prefill in one step" },
  estimated: { glyph: "◇", word: "estimated by the engine itself, all its steps together" },
};

/** What is on the chart, without drawing: points [{name, phase, part, x, y, words}] of the newest message. */
export function points(message, evidence = "measured") {
  const found = [];
  for (const [phase, s] of Object.entries(message?.phases ?? {})) {
    if (!s.seconds || !s.flops) continue;
    const moved = s.weight_bytes + s.kv_read_bytes + s.kv_write_bytes + s.activation_bytes;
    const about = phase === "decode" ? `batch ${round(s.batch)}, context ${round(s.context)}` : `${round(s.tokens / s.steps)} tokens a step`;
    found.push({
      name: MARKS[phase].word, phase, part: "", x: s.flops / moved, y: s.flops / s.seconds, low: s.rate_low, high: s.rate_high,
      words: [`last ${s.steps} steps, ${about}`, `${seconds(s.seconds / s.steps)} a step, ${evidence}`, ...(s.verdict ? [s.verdict.words] : [])],
    });
    if (!s.attention_measured || phase === "mixed") continue;
    const linear = s.parts.linear, attention = s.parts.attention;
    const kv = s.kv_read_bytes + s.kv_write_bytes, rest = s.weight_bytes + s.activation_bytes;
    if (linear > 0 && rest > 0) {
      found.push({
        name: `${phase}, linear layers`, phase, part: "linear", x: (s.flops - s.attention_flops) / rest, y: (s.flops - s.attention_flops) / linear,
        words: [`${percent(linear / s.seconds)} of the step's time`, "weights and activations"],
      });
    }
    if (attention > 0 && kv > 0 && s.attention_flops > 0) {
      found.push({
        name: `${phase}, attention`, phase, part: "attention", x: s.attention_flops / kv, y: s.attention_flops / attention,
        words: [`${percent(attention / s.seconds)} of the step's time`, "keys and values only"],
      });
    }
  }
  const own = message?.estimate;
  if (own) {
    found.push({
      name: "estimated by the engine", phase: "estimated", part: "", x: own.flop_per_byte, y: own.flops_per_s,
      words: [`${rate(own.bytes_per_s, "B/s")} moved, in the last ${seconds(own.window_s)}`, `estimated, not counted: ${own.series.join(", ")}`],
    });
  }
  return found;
}

/** The chosen shape on each roof that is known: the least time that it can take there. */
export function modelled({ model, overlay }, roof) {
  if (!model) return [];
  return [[roof, "modelled, on this device", "model"], [overlay, `modelled, on ${overlay?.name}`, "elsewhere"]]
    .filter(([on]) => on)
    .map(([on, name, part]) => {
      const least = Math.max(model.bytes / on.bandwidth, model.flops / on.flops);
      const bound = model.bytes / on.bandwidth >= model.flops / on.flops ? "memory" : "compute";
      return { name, part, x: model.x, y: model.flops / least, words: [...model.words, `${seconds(least)} at the least: ${bound}-bound`] };
    });
}

/** The roof of the device that computes: measured, or of a data sheet where the device is modelled; null while unknown. */
export function ownRoof(message) {
  const ceilings = message?.roofs?.ceilings;
  if (!ceilings?.read || !ceilings?.matmul) return null;
  return {
    evidence: ceilings.read.evidence ?? "measured", bandwidth: ceilings.read.value, flops: ceilings.matmul.value, ridge: ceilings.matmul.value / ceilings.read.value,
    low: { bandwidth: ceilings.read.low, flops: ceilings.matmul.low }, high: { bandwidth: ceilings.read.high, flops: ceilings.matmul.high },
  };
}

/** The data sheet's roof of this device, as far as it is plausible beside the measured one; null without one. */
export function sheetRoof(message) {
  const beside = (message?.roofs?.ceilings?.beside ?? []).filter((peak) => peak.accepted !== false);
  const of = (what) => beside.find((peak) => peak.of === what && peak.kind === "data sheet") ?? beside.find((peak) => peak.of === what);
  const bandwidth = of("bandwidth"), flops = of("arithmetic");
  return bandwidth && flops ? { bandwidth: bandwidth.value, flops: flops.value, name: `${flops.kind}: ${rate(flops.value, "FLOP/s")}` } : null;
}

/** Ranges of both axes in whole decades, so that nothing jumps with every step. `trail`: rows that no roof holds down. */
export function domain(shown, roofs, trail = []) {
  const xs = [1, 100, ...shown.map((p) => p.x), ...trail.map((row) => row[2]), ...roofs.map((r) => r.flops / r.bandwidth)].filter((x) => x > 0);
  const ys = [...shown.map((p) => p.y), ...trail.map((row) => row[3]), ...roofs.map((r) => r.flops)].filter((y) => y > 0);
  const low = (values) => 10 ** Math.floor(Math.log10(Math.min(...values) * 0.8));
  const high = (values) => 10 ** Math.ceil(Math.log10(Math.max(...values) * 1.3));
  if (!ys.length) ys.push(1e8, 1e12);
  const x = [Math.min(0.1, low(xs)), Math.max(1000, high(xs))];
  const top = high(ys);
  return { x, y: [Math.min(low(ys), top / 1e4), top] };
}

const round = (value) => (value >= 10 ? Math.round(value).toLocaleString("en-US") : Number(value.toFixed(1)).toString());

/** Why there is no measured roof, or how far the measurement is. */
export function roofWords(roofs) {
  if (!roofs) return "Asking what this device can do …";
  if (roofs.state === "measuring") return `Measuring what this device can do: ${percent(roofs.share ?? 0)} ${roofs.text ?? ""}`;
  if (roofs.state === "none") return "Roofs are not measured yet: “Measure the roofs”";
  if (roofs.text) return `No measured roofs: ${roofs.text}`;
  return "Asking what this device can do …";
}
