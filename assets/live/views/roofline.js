// The roofline: FLOP/s over FLOP/byte on logarithmic axes. Roofs are measured ones of this device, points are steps that
// really ran, with a trail of the last seconds; the modelled point is what the planner says of the shape on the sliders.
import { Picture } from "./draw.js";
import { attainable, decades, logScale, rate, tick } from "./axes.js";
import { element } from "./dom.js";
import { MARKS, domain, ownRoof, modelled, points, roofWords, sheetRoof } from "./roofs.js";

const HEIGHT = 430;
const LEFT = 78;
const RIGHT = 18;
const TOP = 14;
const AXIS = 44;
const NEAR = 14; // pixels from a point that still mean it
const TRAIL_S = 12;

export class Roofline extends Picture {
  constructor(root, live) {
    super(root, live, { height: HEIGHT, fps: 20, focusable: true, name: "Roofline" });
    this.settings = {};
    this.hot = null;
    this.shown = [];
    this.ends = [live.lease({ phases: true }), live.on("phases", () => this.kick())];
    const { canvas } = this;
    canvas.addEventListener("pointermove", (e) => this.point(this.near(e.offsetX, e.offsetY)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("blur", () => this.point(null));
  }

  build() {
    this.tip = element("div", { class: "tip", hidden: true, role: "tooltip" });
    this.legend = element("ul", { class: "legend" });
    this.root.append(element("div", { class: "pool" }, this.canvas, this.tip), this.legend);
  }

  options(settings) {
    super.options(settings);
    this.settings = settings;
    this.kick();
  }

  get message() {
    return this.live.phases;
  }

  /** Everything with a place, nearest first in importance: what hover and arrow keys go through. */
  everything() {
    return [...points(this.message, this.state?.evidence || "measured"), ...modelled(this.settings, ownRoof(this.message))];
  }

  paint(width) {
    const { context: c, colors } = this;
    this.clear(width);
    const roof = ownRoof(this.message);
    const sheet = sheetRoof(this.message);
    const overlay = this.settings.overlay;
    this.shown = this.everything();
    const { x, y } = domain(this.shown, [roof, sheet, overlay].filter(Boolean), roof ? [] : this.message?.trail);
    this.x = logScale(x[0], x[1], LEFT, width - RIGHT);
    this.y = logScale(y[0], y[1], HEIGHT - AXIS, TOP);
    this.grid(width);
    c.save();
    c.beginPath();
    c.rect(LEFT, TOP - 4, width - LEFT - RIGHT, HEIGHT - AXIS - TOP + 8);
    c.clip();
    if (sheet) this.roof(sheet, colors.line, [2, 3], 1.5);
    if (overlay) this.roof(overlay, colors.sharedText, [7, 4], 1.75);
    if (roof) this.band(roof);
    if (roof) this.roof(roof, colors.text, [], 2);
    this.trails();
    for (const point of this.shown) this.mark(point);
    c.restore();
    this.names(width, roof, sheet, overlay);
    if (!roof) this.missing(width);
    this.write();
  }

  grid(width) {
    const { context: c, colors } = this;
    const bottom = HEIGHT - AXIS;
    c.font = `12px ${colors.font}`;
    c.lineWidth = 1;
    c.strokeStyle = colors.line;
    c.fillStyle = colors.muted;
    c.textAlign = "center";
    for (const value of decades(this.x.low, this.x.high)) {
      const at = Math.round(this.x(value)) + 0.5;
      this.segment(at, TOP, at, bottom);
      c.fillText(tick(value), at, bottom + 12);
    }
    c.textAlign = "right";
    for (const value of decades(this.y.low, this.y.high)) {
      const at = Math.round(this.y(value)) + 0.5;
      this.segment(LEFT, at, width - RIGHT, at);
      c.fillText(rate(value, "FLOP/s").replace(/\.0+ /, " "), LEFT - 8, at);
    }
    c.textAlign = "center";
    c.fillText("arithmetic intensity: FLOP for each byte that memory must move (logarithmic)", (LEFT + width - RIGHT) / 2, bottom + 30);
    c.textAlign = "left";
  }

  segment(x0, y0, x1, y1) {
    const { context: c } = this;
    c.beginPath();
    c.moveTo(x0, y0);
    c.lineTo(x1, y1);
    c.stroke();
  }

  path({ bandwidth, flops }) {
    const { x, y } = this;
    const ridge = flops / bandwidth;
    return [[x(x.low), y(attainable(x.low, bandwidth, flops))], [x(ridge), y(flops)], [x(x.high), y(flops)]];
  }

  roof(roof, ink, dash, thick) {
    const { context: c } = this;
    c.beginPath();
    for (const [i, [px, py]] of this.path(roof).entries()) c[i ? "lineTo" : "moveTo"](px, py);
    c.strokeStyle = ink;
    c.lineWidth = thick;
    c.setLineDash(dash);
    c.stroke();
    c.setLineDash([]);
  }

  /** Between the slowest and the fastest round of the measurement. */
  band({ low, high }) {
    const { context: c, colors } = this;
    c.beginPath();
    for (const [i, [px, py]] of [...this.path(high), ...this.path(low).reverse()].entries()) c[i ? "lineTo" : "moveTo"](px, py);
    c.fillStyle = colors.muted;
    c.globalAlpha = 0.16;
    c.fill();
    c.globalAlpha = 1;
  }

  ink(phase) {
    const { colors } = this;
    return { prefill: colors.prefill, decode: colors.decode }[phase] ?? colors.muted;
  }

  trails() {
    const { context: c, message } = this;
    if (!message) return;
    for (const phase of Object.keys(MARKS)) {
      let last = null;
      for (const [t, of, x, y] of message.trail) {
        if (of !== phase) continue;
        const at = [this.x(x), this.y(y)];
        c.globalAlpha = Math.max(0.06, 0.5 * (1 - (message.t - t) / TRAIL_S));
        c.fillStyle = c.strokeStyle = this.ink(phase);
        if (last) {
          c.lineWidth = 1.5;
          this.segment(...last, ...at);
        }
        c.beginPath();
        c.arc(...at, 2, 0, 7);
        c.fill();
        last = at;
      }
    }
    c.globalAlpha = 1;
  }

  mark(point) {
    const { context: c, colors } = this;
    const x = this.x(point.x), y = this.y(point.y);
    const ink = point.part === "model" ? colors.text : point.part === "elsewhere" ? colors.sharedText : this.ink(point.phase);
    const size = point.part ? 5 : 8;
    const hollow = Boolean(point.part) || point.phase === "estimated";
    if (point.low && point.high > point.low) {
      c.strokeStyle = ink;
      c.lineWidth = 1.5;
      this.segment(x, this.y(point.low), x, this.y(point.high));
    }
    this.shape(point.phase, x, y, size);
    c.fillStyle = hollow ? colors.background : ink;
    c.fill();
    c.lineWidth = hollow ? 2 : 1.5;
    c.strokeStyle = hollow ? ink : colors.background;
    c.stroke();
    if (point.part === "attention" || point.part === "linear") {
      c.font = `600 11px ${colors.font}`;
      c.fillStyle = { prefill: colors.prefillText, decode: colors.decodeText }[point.phase] ?? colors.muted;
      c.textAlign = "left";
      c.fillText(point.part, x + 9, y + (point.phase === "prefill" ? -8 : 8));
    }
    if (this.hot && this.hot.name === point.name) {
      c.beginPath();
      c.arc(x, y, size + 6, 0, 7);
      c.strokeStyle = colors.focus;
      c.lineWidth = 2;
      c.stroke();
    }
  }

  shape(kind, x, y, size) {
    const { context: c } = this;
    c.beginPath();
    if (kind === "prefill") {
      c.moveTo(x, y - size);
      c.lineTo(x + size, y + size * 0.8);
      c.lineTo(x - size, y + size * 0.8);
    } else if (kind === "decode") c.arc(x, y, size * 0.9, 0, 7);
    else if (kind === "mixed" || kind === "estimated") {
      for (const [dx, dy] of [[0, -1], [1, 0], [0, 1], [-1, 0]]) c.lineTo(x + dx * size, y + dy * size);
    } else c.rect(x - size, y - size, 2 * size, 2 * size);
    c.closePath();
  }

  names(width, roof, sheet, overlay) {
    const { context: c, colors } = this;
    c.font = `600 12px ${colors.font}`;
    const flat = (r, ink, text, above) => {
      c.fillStyle = ink;
      c.textAlign = "right";
      c.fillText(text, width - RIGHT - 6, this.y(r.flops) + (above ? -9 : 11));
    };
    if (sheet) flat(sheet, colors.muted, sheet.name, true);
    if (overlay) flat(overlay, colors.sharedText, `${overlay.name} · data sheet`, true);
    if (roof) {
      flat(roof, colors.text, `${roof.evidence}: ${rate(roof.flops, "FLOP/s")}`, !(overlay && overlay.flops / roof.flops < 2 && overlay.flops > roof.flops));
      const x = this.x(roof.ridge), y = this.y(roof.flops);
      c.strokeStyle = colors.muted;
      c.lineWidth = 1;
      c.setLineDash([3, 3]);
      this.segment(x, y, x, HEIGHT - AXIS);
      c.setLineDash([]);
      c.fillStyle = colors.text;
      c.textAlign = "left";
      c.fillText(`ridge ${tick(Number(roof.ridge.toPrecision(3)))} FLOP/byte`, x + 6, HEIGHT - AXIS - 10);
      // Along the slope: how steep it is on the screen is what the axes make of one decade.
      const from = this.x.low * 1.25;
      const angle = Math.atan2(this.y(from * 10 * roof.bandwidth) - this.y(from * roof.bandwidth), this.x(from * 10) - this.x(from));
      c.save();
      c.translate(this.x(from), this.y(from * roof.bandwidth));
      c.rotate(angle);
      c.fillText(`${roof.evidence}: ${rate(roof.bandwidth, "B/s")}`, 8, -10);
      c.restore();
    }
    c.textAlign = "left";
  }

  /** Without ceilings there are points and no roof, and the reason stands where the roof would be. */
  missing(width) {
    const { context: c, colors } = this;
    c.fillStyle = colors.muted;
    c.font = `14px ${colors.font}`;
    c.textAlign = "center";
    c.fillText(roofWords(this.message?.roofs), (LEFT + width - RIGHT) / 2, HEIGHT - AXIS - 24);
    c.textAlign = "left";
  }

  write() {
    const have = new Set(this.shown.map((p) => (p.phase ? (p.part ? "part" : p.phase) : "model")));
    const lines = Object.entries(MARKS).filter(([phase]) => have.has(phase)).map(([, m]) => `${m.glyph} ${m.word}`);
    if (have.has("part")) lines.push("△ ○ hollow: linear layers and attention apart");
    if (have.has("model")) lines.push("□ modelled: the shape on the sliders");
    if (sheetRoof(this.message)) lines.push("┈ data sheet");
    const text = lines.join("|");
    if (text === this.legendText) return;
    this.legendText = text;
    this.legend.replaceChildren(...lines.map((line) => element("li", {}, line)));
  }

  // hover, keys

  near(x, y) {
    let best = null, least = NEAR;
    for (const point of this.shown) {
      const away = Math.hypot(this.x(point.x) - x, this.y(point.y) - y);
      if (away < least) [best, least] = [point, away];
    }
    return best;
  }

  key(event) {
    const all = this.shown;
    if (!all.length) return;
    const at = this.hot ? all.findIndex((p) => p.name === this.hot.name) : -1;
    if (event.key === "ArrowRight" || event.key === "ArrowDown") this.point(all[(at + 1) % all.length]);
    else if (event.key === "ArrowLeft" || event.key === "ArrowUp") this.point(all[(at - 1 + all.length) % all.length]);
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
  }

  point(point) {
    this.hot = point;
    this.tip.hidden = !point;
    if (point) {
      const lines = [`${rate(point.y, "FLOP/s")} at ${tick(Number(point.x.toPrecision(3)))} FLOP/byte`, ...(point.words ?? [])];
      this.tip.replaceChildren(element("strong", {}, point.name), ...lines.map((line) => element("div", {}, line)));
      const x = this.x(point.x), y = this.y(point.y);
      const left = x > this.width / 2;
      Object.assign(this.tip.style, {
        left: left ? "auto" : `${x + 16}px`, right: left ? `${this.width - x + 16}px` : "auto",
        top: y > HEIGHT / 2 ? "auto" : `${y}px`, bottom: y > HEIGHT / 2 ? `${HEIGHT - y}px` : "auto",
      });
    }
    this.kick();
  }

  report() {
    const { canvas, message } = this;
    canvas.dataset.step = this.state.step;
    canvas.dataset.roof = ownRoof(message)?.evidence ?? "none";
    for (const phase of Object.keys(MARKS)) {
      const found = this.shown.find((p) => p.phase === phase && !p.part);
      if (found) canvas.dataset[phase] = `${found.x.toPrecision(4)} ${found.y.toPrecision(4)}`;
      else delete canvas.dataset[phase];
    }
    const model = this.shown.find((p) => p.part === "model");
    canvas.dataset.model = model ? `${model.x.toPrecision(4)} ${model.y.toPrecision(4)}` : "";
    if (this.hot) {
      canvas.setAttribute("aria-label", `${this.name}: ${this.hot.name}, ${[...this.tip.children].slice(1).map((n) => n.textContent).join("; ")}`);
      return;
    }
    this.say(() => {
      const roof = ownRoof(message);
      const words = this.shown.filter((p) => !p.part || !p.phase).map((p) => `${p.name} ${rate(p.y, "FLOP/s")} at ${p.x.toPrecision(3)} FLOP/byte`);
      const top = roof ? `${roof.evidence} roofs ${rate(roof.bandwidth, "B/s")} and ${rate(roof.flops, "FLOP/s")}, ridge ${roof.ridge.toPrecision(3)} FLOP/byte` : roofWords(message?.roofs);
      return `${top}. ${words.join("; ") || "no step yet"}`;
    });
  }

  end() {
    super.end();
    for (const end of this.ends) end();
  }
}
