// Where the time of a step went, by phase: one bar a phase, the time that the measured roofs allow marked on it, and the
// verdict in words with its rule.
import { Picture, percent, roundedBar, seconds } from "./draw.js";
import { element, setText } from "./dom.js";
import { hostIndex, newest, sensorOf } from "./sensors.js";

const ROW = 84;
const BAR = 22;
const LEFT = 8;
const GAUGE = 190;
const PHASES = { prefill: "▲ prefill", decode: "● decode", mixed: "◆ mixed" };
export const PARTS = ["schedule", "build", "attention", "linear", "sample", "output", "unattributed"];
const NAMES = {
  schedule: "schedule", build: "build inputs", attention: "attention", linear: "linear layers", sample: "sample", output: "output",
  unattributed: "unattributed",
};

/** [[part, share of the step]…] of a summary, without parts below a thousandth. Shares of all parts add up to 1. */
export function shares(summary) {
  const total = PARTS.reduce((sum, name) => sum + summary.parts[name], 0);
  return PARTS.map((name) => [name, total ? summary.parts[name] / total : 0]).filter(([, share]) => share > 0.001);
}

/** A sentence about other work on the machine, which steps wait for; "" when there is none to speak of. */
export function crowd(state) {
  const host = hostIndex(state), load = host < 0 ? null : newest(state, host, sensorOf(state, host, "load_average"));
  const threads = state.device.threads;
  if (!load || !threads || state.device.kind !== "cpu" || load.value <= threads * 1.5) return "";
  return ` Load average ${load.value.toFixed(1)} on ${threads} threads: other work runs on this machine, and steps wait for it.`;
}

export class Parts extends Picture {
  constructor(root, live) {
    super(root, live, { height: ROW * 2 + 8, fps: 4, name: "Where the step went" });
    this.ends = [live.lease({ phases: true }), live.lease({ telemetry: [] }), live.on("phases", () => this.kick())];
  }

  build() {
    this.legend = element("ul", { class: "legend" });
    this.rule = element("p", { class: "rule" }); // wide as the picture, always there: nothing below may move
    this.root.append(element("div", {}, this.canvas), this.legend, this.rule);
  }

  get rows() {
    const phases = this.live.phases?.phases ?? {};
    return Object.keys(PHASES).filter((phase) => phases[phase]?.seconds).map((phase) => [phase, phases[phase]]);
  }

  ink(part) {
    const { colors } = this;
    const [a, b, d, e] = colors.owners;
    return { schedule: a, build: b, attention: colors.kv, linear: colors.weights, sample: d, output: e, unattributed: colors.line }[part];
  }

  prepare(width) {
    const wanted = ROW * Math.max(2, this.rows.length) + 8;
    if (wanted !== this.height) this.height = wanted;
    super.prepare(width);
  }

  paint(width) {
    const { context: c, colors, rows } = this;
    this.clear(width);
    rows.forEach(([phase, summary], i) => this.row(PHASES[phase], phase, summary, i * ROW, width));
    if (!rows.length) {
      c.fillStyle = colors.muted;
      c.font = `14px ${colors.font}`;
      c.textAlign = "center";
      c.fillText("No step yet: ask something on the cockpit, or press “Run it”.", width / 2, ROW);
      c.textAlign = "left";
    }
    this.words(rows);
  }

  row(name, phase, s, y, width) {
    const { context: c, colors } = this;
    const room = width - LEFT - GAUGE - 16;
    const each = s.seconds / s.steps;
    c.fillStyle = { prefill: colors.prefillText, decode: colors.decodeText }[phase] ?? colors.muted;
    c.font = `600 13px ${colors.font}`;
    c.fillText(name, LEFT, y + 12);
    c.font = `13px ${colors.font}`;
    c.fillStyle = colors.muted;
    const about = phase === "decode" ? `${(s.tokens / s.steps).toFixed(1)} tokens` : `${Math.round(s.tokens / s.steps)} tokens`;
    c.fillText(`${seconds(each)} a step of ${about}, mean of the last ${s.steps}`, LEFT + 80, y + 12);
    let x = LEFT;
    for (const [part, share] of shares(s)) {
      const w = room * share;
      c.fillStyle = this.ink(part);
      c.fillRect(x, y + 24, Math.max(1, w - 1), BAR);
      c.font = `600 12px ${colors.font}`;
      const text = `${part} ${percent(share)}`;
      if (c.measureText(text).width < w - 8) {
        c.fillStyle = colors.ownerText;
        if (part === "unattributed") c.fillStyle = colors.text;
        c.fillText(text, x + 6, y + 24 + BAR / 2 + 0.5);
      }
      x += w;
    }
    const verdict = s.verdict;
    if (!verdict) return;
    const bound = LEFT + room * Math.min(1, verdict.bound_s / s.seconds);
    c.fillStyle = colors.text;
    c.fillRect(bound - 1, y + 20, 2, BAR + 8);
    c.font = `12px ${colors.font}`;
    const says = `the roofs allow ${seconds(verdict.bound_s / s.steps)}`;
    const wide = c.measureText(says).width;
    c.fillText(says, Math.min(Math.max(LEFT, bound - wide / 2), LEFT + room - wide), y + 24 + BAR + 15);
    this.gauge(width - GAUGE, y + 24, "bandwidth", verdict.mbu, colors.decode);
    this.gauge(width - GAUGE, y + 24 + 24, "compute", verdict.mfu, colors.prefill);
    c.fillStyle = colors.text;
    c.font = `600 13px ${colors.font}`;
    c.fillText(`${verdict.regime}-bound`, width - GAUGE, y + 12);
  }

  gauge(x, y, what, share, ink) {
    const { context: c, colors } = this;
    const wide = 60;
    c.fillStyle = colors.free;
    roundedBar(c, x, y + 2, wide, 8, 4);
    c.fill();
    c.fillStyle = ink;
    roundedBar(c, x, y + 2, wide * Math.min(1, share), 8, 4);
    c.fill();
    c.fillStyle = colors.text;
    c.font = `12px ${colors.font}`;
    c.fillText(`${percent(share)} of ${what}`, x + wide + 8, y + 6);
  }

  words(rows) {
    const seen = new Set(rows.flatMap(([, s]) => shares(s).map(([part]) => part)));
    const key = `${[...seen].join()} ${this.colors.dark}`;
    if (key !== this.legendKey) {
      this.legendKey = key;
      this.legend.replaceChildren(
        ...PARTS.filter((part) => seen.has(part)).map((part) => {
          const swatch = element("i");
          swatch.style.background = this.ink(part);
          return element("li", {}, swatch, NAMES[part]);
        }),
      );
    }
    const verdict = rows.map(([, s]) => s.verdict).find(Boolean);
    const unsplit = rows.some(([, s]) => !s.attention_measured) ? " Attention is not timed apart here: it is part of linear layers." : "";
    setText(this.rule, (verdict ? `${verdict.rule}.` : "Verdicts need measured roofs.") + unsplit + crowd(this.state));
  }

  report() {
    const { canvas, rows } = this;
    canvas.dataset.step = this.state.step;
    for (const [phase, s] of rows) canvas.dataset[phase] = s.verdict?.regime ?? "no roof";
    this.say(() =>
      rows.map(([phase, s]) => `${phase}: ${s.verdict?.words ?? "no verdict without roofs"}; ${shares(s).map(([p, share]) => `${p} ${percent(share)}`).join(", ")}`).join(". ") || "no step yet",
    );
  }

  end() {
    super.end();
    for (const end of this.ends) end();
  }
}
