// Bytes of one decode step, stacked, against batch or context: computed by the planner for the shape on the sliders. The
// line says from where on the KV cache is more than the weights; the tick on the axis, what the engine decodes with now.
import { Picture, bytes, count, niceCeil } from "./draw.js";
import { logScale } from "./axes.js";
import { element } from "./dom.js";

const HEIGHT = 236;
const LEFT = 78;
const RIGHT = 14;
const TOP = 12;
const AXIS = 42;
export const KINDS = ["weights", "kv_read", "kv_write", "activations"];
const NAMES = { weights: "weights", kv_read: "KV read", kv_write: "KV written", activations: "activations" };

/** Heights of the stack at each x, bottom up: rows of KINDS.length + 1 sums. */
export function stacked(curve) {
  return curve.xs.map((_, i) => KINDS.reduce((sums, kind) => [...sums, sums[sums.length - 1] + curve[kind][i]], [0]));
}

/** A top above `most` that is round in the unit that the axis is labelled with. */
export function roundTop(most, units) {
  const base = units === "GB" ? 1000 : 1024;
  const unit = base ** Math.floor(Math.log(most) / Math.log(base));
  return niceCeil(most / unit) * unit;
}

class Bytes extends Picture {
  constructor(root, live, by) {
    super(root, live, { height: HEIGHT, fps: 4, name: `Bytes of a decode step by ${by}` });
    this.by = by;
    this.settings = {};
    this.ends = [live.lease({ phases: true }), live.on("phases", () => this.kick())];
  }

  build() {
    this.legend = element("ul", { class: "legend" });
    this.root.append(element("div", {}, this.canvas), this.legend);
  }

  options(settings) {
    super.options(settings);
    this.settings = settings;
    this.kick();
  }

  inks() {
    const { colors } = this;
    return { weights: colors.weights, kv_read: colors.kv, kv_write: colors.decode, activations: colors.shared };
  }

  paint(width) {
    const { context: c, colors } = this;
    this.clear(width);
    const { curve, units } = this.settings;
    if (!curve) {
      c.fillStyle = colors.muted;
      c.font = `14px ${colors.font}`;
      c.fillText(this.settings.why ?? "No model yet.", LEFT, HEIGHT / 2);
      return;
    }
    const sums = stacked(curve), bottom = HEIGHT - AXIS;
    const top = roundTop(Math.max(...sums.map((row) => row[KINDS.length])), units);
    const x = logScale(curve.xs[0], curve.xs[curve.xs.length - 1], LEFT, width - RIGHT);
    const y = (value) => bottom - ((bottom - TOP) * value) / top;
    const inks = this.inks();
    KINDS.forEach((kind, k) => {
      c.beginPath();
      curve.xs.forEach((value, i) => c[i ? "lineTo" : "moveTo"](x(value), y(sums[i][k + 1])));
      for (let i = curve.xs.length - 1; i >= 0; i--) c.lineTo(x(curve.xs[i]), y(sums[i][k]));
      c.closePath();
      c.fillStyle = inks[kind];
      c.globalAlpha = kind === "weights" ? 0.75 : 0.85;
      c.fill();
      c.globalAlpha = 1;
    });
    this.axes(x, y, top, width, bottom, units);
    const line = (value, words, ink, dash, high) => {
      const at = x(value);
      c.strokeStyle = ink;
      c.lineWidth = 1.5;
      c.setLineDash(dash);
      c.beginPath();
      c.moveTo(at, TOP);
      c.lineTo(at, bottom);
      c.stroke();
      c.setLineDash([]);
      c.font = `600 12px ${colors.font}`;
      const wide = c.measureText(words).width + 8;
      const left = at + 6 + wide > width - RIGHT ? at - 6 - wide : at + 6;
      c.fillStyle = colors.background;
      c.globalAlpha = 0.85;
      c.fillRect(left, high - 9, wide, 18);
      c.globalAlpha = 1;
      c.fillStyle = ink;
      c.fillText(words, left + 4, high);
    };
    if (curve.overtakes) line(curve.overtakes, `KV overtakes weights at ${this.by} ${count(curve.overtakes)}`, colors.text, [5, 3], TOP + 12);
    line(curve.at, `${bytes(curve.total_at, units)} at ${this.by} ${count(curve.at)}`, colors.text, [], TOP + 34);
    this.now(x, bottom);
    this.names();
  }

  axes(x, y, top, width, bottom, units) {
    const { context: c, colors } = this;
    c.font = `12px ${colors.font}`;
    c.strokeStyle = colors.line;
    c.lineWidth = 1;
    c.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const at = Math.round(y(top * share)) + 0.5;
      c.beginPath();
      c.moveTo(LEFT, at);
      c.lineTo(width - RIGHT, at);
      c.stroke();
      c.fillStyle = colors.muted;
      c.fillText(bytes(top * share, units), LEFT - 8, at);
    }
    c.textAlign = "center";
    const many = Math.log2(x.high / x.low) > 9;
    for (let value = x.low, i = 0; value <= x.high; value *= 2, i++) if (!many || i % 2 === 0) c.fillText(count(value), x(value), bottom + 11);
    c.fillText(`${this.by} (logarithmic), ${this.settings.curve.held}`, (LEFT + width - RIGHT) / 2, bottom + 29);
    c.textAlign = "left";
  }

  /** What the engine decodes with now, as a mark on the axis. */
  now(x, bottom) {
    const decode = this.live.phases?.phases?.decode;
    const value = this.by === "batch" ? decode?.batch : decode?.context;
    if (!value || value < x.low * 0.7 || value > x.high) return;
    const { context: c, colors } = this;
    const at = x(Math.max(value, x.low));
    c.fillStyle = colors.decode;
    c.beginPath();
    c.arc(at, bottom, 5, 0, 7);
    c.fill();
    this.measured = value;
  }

  names() {
    const key = String(this.colors.dark);
    if (key === this.legendKey) return;
    this.legendKey = key;
    const inks = this.inks();
    this.legend.replaceChildren(
      ...KINDS.map((kind) => {
        const swatch = element("i");
        swatch.style.background = inks[kind];
        return element("li", {}, swatch, NAMES[kind]);
      }),
      element("li", {}, "● decoding now, measured"),
    );
  }

  report() {
    const { curve, units } = this.settings;
    this.canvas.dataset.step = this.state.step;
    this.canvas.dataset.overtakes = curve?.overtakes ?? "";
    this.say(() => {
      if (!curve) return this.settings.why ?? "no model yet";
      const over = curve.overtakes ? `the KV cache overtakes the weights at ${this.by} ${count(curve.overtakes)}` : "the KV cache stays below the weights";
      return `${bytes(curve.total_at, units)} at ${this.by} ${count(curve.at)}; ${over}`;
    });
  }

  end() {
    super.end();
    for (const end of this.ends) end();
  }
}

export class BytesByBatch extends Bytes {
  constructor(root, live) {
    super(root, live, "batch");
  }
}

export class BytesByContext extends Bytes {
  constructor(root, live) {
    super(root, live, "context");
  }
}
