// What every picture shares: theme colours, sizes in device pixels, numbers as words, and the paint loop.
/* global TOKENS */ // assets/tokens.json, put in front of the bundle
import { label } from "../fold.js";
import { element, heading } from "./dom.js";

const FALLBACK_FONT = "system-ui, sans-serif";

/** The colours of the theme that the page shows now. `host` carries Streamlit's --st-… properties. */
export function themeOf(host) {
  const style = getComputedStyle(host);
  const read = (name) => style.getPropertyValue(name).trim();
  const background = read("--st-background-color");
  const dark = background ? luminance(background) < 0.4 : matchMedia("(prefers-color-scheme: dark)").matches;
  const tokens = TOKENS[dark ? "dark" : "light"];
  return {
    ...tokens,
    dark,
    background: background || tokens.background,
    text: read("--st-text-color") || tokens.text,
    font: read("--st-font") || FALLBACK_FONT,
    mono: read("--st-code-font") || "monospace",
  };
}

/** Tokens as CSS custom properties (--kv-…) on the root of a view, for its DOM parts. */
export function paintTokens(root, theme) {
  for (const [name, value] of Object.entries(theme)) {
    if (name === "owners") root.style.setProperty("--kv-owner-1", value[0]);
    else if (typeof value === "string") root.style.setProperty(`--kv-${name.replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`)}`, value);
  }
}

function luminance(color) {
  const hex = /^#([0-9a-f]{6})/i.exec(color);
  const rgb = hex
    ? [0, 2, 4].map((i) => parseInt(hex[1].slice(i, i + 2), 16))
    : (color.match(/[\d.]+/g) ?? [255, 255, 255]).slice(0, 3).map(Number);
  return (0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]) / 255;
}

export const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** A request's name in every picture: 1 → A, 26 → Z, 27 → AA. */
export const letters = (number) => label(number) || "?";

export const ownerHue = (theme, number) => theme.owners[(number - 1) % theme.owners.length];

export const STATES = {
  queued: { glyph: "◌", word: "queued" },
  prefill: { glyph: "▲", word: "prefill" },
  decode: { glyph: "●", word: "decode" },
  preempted: { glyph: "▨", word: "preempted" },
  finished: { glyph: "✓", word: "finished" },
};

/** A request's state as it may be called: whether an attached engine computes a prompt or lets it wait is not told, and
 * what was aborted or failed has ended, but is not finished. */
export function stateOf(state, request) {
  if (state.scrape && request.state === "prefill") return { glyph: STATES.queued.glyph, word: "no token yet" };
  if (request.state === "finished" && !["", "stop", "length"].includes(request.reason ?? "")) return { glyph: "✕", word: request.reason };
  return STATES[request.state] ?? STATES.queued;
}

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (n) => grouped.format(n);

/** Three figures: 3.21, 32.1, 321, 3,210. */
export function figures(value) {
  const size = Math.abs(value);
  return size >= 100 ? count(value) : value.toFixed(size >= 10 ? 1 : 2);
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Milliseconds below one second. */
export function seconds(value) {
  if (value < 1) return `${value < 0.01 ? (value * 1e3).toFixed(1) : Math.round(value * 1e3)} ms`;
  return `${value < 10 ? value.toFixed(2) : value.toFixed(1)} s`;
}

/** Bytes in binary ("GiB") or decimal ("GB") units; the unit word always goes with the number. */
export function bytes(value, units = "GiB") {
  const [base, names] = units === "GB" ? [1000, ["B", "kB", "MB", "GB", "TB"]] : [1024, ["B", "KiB", "MiB", "GiB", "TiB"]];
  let step = 0;
  let size = value;
  while (size >= base && step < names.length - 1) {
    size /= base;
    step += 1;
  }
  return `${step === 0 ? count(size) : figures(size)} ${names[step]}`;
}

/** A round number that is not below `value`. */
export function niceCeil(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const lead of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (lead * power >= value - 1e-9) return lead * power;
  return 10 * power;
}

/** A canvas sized in CSS pixels, drawn in device pixels where lines must be crisp. */
export function fit(canvas, width, height) {
  const ratio = Math.min(3, devicePixelRatio || 1);
  const w = Math.max(1, Math.round(width * ratio));
  const h = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  return ratio;
}

/** Fill patterns: the channel beside colour. `unit` is one CSS pixel in device pixels. */
export function patterns(context, theme, unit) {
  const tile = (size, draw) => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = Math.max(2, Math.round(size * unit));
    draw(canvas.getContext("2d"), canvas.width);
    return context.createPattern(canvas, "repeat");
  };
  const stripes = (back, line) => (c, n) => {
    c.fillStyle = back;
    c.fillRect(0, 0, n, n);
    c.strokeStyle = line;
    c.lineWidth = n / 3.2;
    c.beginPath();
    for (const shift of [-n, 0, n]) {
      c.moveTo(shift - 1, n + 1);
      c.lineTo(shift + n + 1, -1);
    }
    c.stroke();
  };
  return {
    waste: tile(4, (c, n) => {
      c.fillStyle = theme.wastedSoft;
      c.fillRect(0, 0, n, n);
      c.fillStyle = theme.wastedDot;
      c.fillRect(0, 0, Math.max(1, Math.round(n / 3)), Math.max(1, Math.round(n / 3)));
    }),
    hatch: tile(7, stripes(theme.evictedSoft, theme.evicted)),
    unnamed: tile(7, stripes(theme.background, theme.kv)),
  };
}

export function roundedBar(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, Math.max(width, 0.5), height, Math.max(0, Math.min(radius, width / 2, height / 2)));
}

/** The request's letter on its hue. Returns the width drawn. */
export function chip(context, theme, number, x, y, height = 16) {
  const name = letters(number);
  context.font = `600 12px ${theme.font}`;
  const width = Math.max(20, context.measureText(name).width + 10);
  context.fillStyle = ownerHue(theme, number);
  roundedBar(context, x, y, width, height, 4);
  context.fill();
  context.fillStyle = theme.ownerText;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(name, x + width / 2, y + height / 2 + 0.5);
  context.textAlign = "left";
  return width;
}

/** Text cut to a width, with an ellipsis. */
export function clipped(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let cut = text.length;
  while (cut > 1 && context.measureText(`${text.slice(0, cut)}…`).width > width) cut -= 1;
  return `${text.slice(0, cut)}…`;
}

/**
 * A canvas that paints at most `fps` times a second, never into a hidden element, and says what it shows.
 * Subclasses have paint(width) and report(), which tells tests and screen readers what the picture shows.
 */
export class Picture {
  constructor(root, live, { height, fps = 60, focusable = false, name }) {
    this.root = root;
    this.live = live;
    this.height = height;
    this.interval = 1000 / fps;
    this.name = name;
    this.state = null;
    this.colors = null;
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${name}: no data yet`);
    if (focusable) this.canvas.tabIndex = 0;
    this.context = this.canvas.getContext("2d");
    this.frame = 0;
    this.timer = 0;
    this.painted = -Infinity;
    this.said = -Infinity;
    this.build();
    this.width = 0; // of the room that it has; asking the layout in each frame would cost more than painting
    this.visible = true; // false while scrolled out of sight: then it only says what it would show
    this.observer = new ResizeObserver(([entry]) => this.sized(Math.floor(entry.contentRect.width)));
    this.observer.observe(this.holder());
    this.sight = new IntersectionObserver(([entry]) => this.sighted(entry.isIntersecting), { rootMargin: "80px" });
    this.sight.observe(this.holder());
    document.fonts?.ready.then(() => this.resized());
  }

  /** Puts the canvas into the root; subclasses that need more DOM override it. */
  build() {
    this.root.append(element("div", {}, this.canvas));
  }

  holder() {
    return this.canvas.parentElement;
  }

  /** What Python says with the mount, again with each change of it. */
  options({ title }) {
    heading(this.root, title);
  }

  sized(width) {
    this.width = width;
    this.resized();
  }

  sighted(visible) {
    const appeared = visible && !this.visible;
    this.visible = visible;
    if (appeared) this.resized();
  }

  /** Everything must be painted anew. */
  resized() {
    this.kick();
  }

  theme(host) {
    this.colors = themeOf(host);
    paintTokens(this.root, this.colors);
    this.resized();
  }

  /** Called inside an animation frame: what is due is painted in this one. */
  update(state) {
    this.state = state;
    if (!this.frame && !this.timer && this.painted + this.interval - performance.now() <= 4) this.draw();
    else this.kick();
  }

  kick() {
    if (this.frame || this.timer) return;
    const wait = this.painted + this.interval - performance.now();
    if (wait > 4) this.timer = setTimeout(() => this.schedule(), wait);
    else this.schedule();
  }

  schedule() {
    this.timer = 0;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    if (!this.width || !this.colors || !this.state) return; // not themed, no data, or in a hidden tab
    this.painted = performance.now();
    if (this.visible) {
      this.prepare(this.width);
      this.paint(this.width);
    }
    this.report();
  }

  prepare(width) {
    this.unit = fit(this.canvas, width, this.height);
  }

  clear(width) {
    this.context.setTransform(this.unit, 0, 0, this.unit, 0, 0);
    this.context.clearRect(0, 0, width, this.height);
    this.context.textBaseline = "middle";
    this.context.textAlign = "left";
  }

  /** For those who cannot see the picture; at most twice a second. `words` is called only when it is due. */
  say(words) {
    const now = performance.now();
    if (now - this.said < 500) return;
    this.said = now;
    this.canvas.setAttribute("aria-label", `${this.name}: ${words()}`);
  }

  end() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.observer.disconnect();
    this.sight.disconnect();
  }
}
