// One row a request on one clock: queued, prefill, decode, preempted. Live rows on top; a click follows the request.
import { Picture, STATES, chip, clipped, count, letters, roundedBar, patterns, seconds } from "./draw.js";
import { element } from "./dom.js";
import { LEFT, RIGHT, WINDOW_S, timeAxis } from "./clock.js";
import { others } from "./scraped.js";
import { selection } from "./select.js";

const HEIGHT = 268;
const ROW = 22;
const AXIS = 20;

/** Requests in the order of their rows: live ones, own prompts first, then by arrival; then the finished, newest first. */
export function ganttRows(state, now, own = new Set()) {
  const live = [];
  const finished = [];
  for (const request of Object.values(state.requests)) {
    if (request.state !== "finished") live.push(request);
    else if ((request.t_end ?? 0) > now - WINDOW_S) finished.push(request);
  }
  live.sort((a, b) => own.has(b.id) - own.has(a.id) || a.request - b.request);
  finished.sort((a, b) => b.t_end - a.t_end || b.request - a.request);
  return [...live, ...finished];
}

/** What the request is doing, in words and a shape. */
export function statusLine(request, now, attached = false) {
  const glyph = STATES[request.state]?.glyph ?? "";
  // Whether an attached engine computes its prompt or lets it wait cannot be seen from outside.
  if (attached && request.state === "prefill") return `${STATES.queued.glyph} no token yet ${seconds(Math.max(0, now - request.t_queued))}`;
  switch (request.state) {
    case "queued":
      return `${glyph} queued ${seconds(Math.max(0, now - request.t_queued))}`;
    case "prefill":
      return `${glyph} prefill ${count(request.computed)}/${count(request.prompt_tokens + request.output_tokens)}`;
    case "decode":
      return `${glyph} ${count(request.output_tokens)} tokens`;
    case "preempted":
      return `${glyph} preempted`;
    default: {
      const mark = request.reason === "stop" || request.reason === "length" ? glyph : "✕";
      const word = request.reason === "stop" || request.reason === "length" ? "" : ` ${request.reason}`;
      return `${mark} ${count(request.output_tokens)} tokens${word}`;
    }
  }
}

export class Gantt extends Picture {
  constructor(root, live) {
    super(root, live, { height: HEIGHT, fps: 20, focusable: true, name: "Requests over time" });
    this.cursor = -1; // row that the keyboard is on
    const { canvas } = this;
    this.scroller.addEventListener("scroll", () => this.kick(), { passive: true });
    canvas.addEventListener("click", (e) => this.choose(this.rowAt(e.offsetY), e.shiftKey || e.ctrlKey || e.metaKey));
    canvas.addEventListener("pointermove", (e) => {
      this.hot = this.rowAt(e.offsetY);
      canvas.style.cursor = this.hot >= 0 ? "pointer" : "default";
      this.kick();
    });
    canvas.addEventListener("pointerleave", () => ((this.hot = -1), this.kick()));
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("blur", () => ((this.cursor = -1), this.kick()));
    this.onpick = () => this.kick();
    selection.addEventListener("change", this.onpick);
    this.hot = -1;
    this.rows = [];
  }

  build() {
    this.canvas.classList.add("sticky");
    this.spacer = element("div", {}, this.canvas);
    this.scroller = element("div", { class: "scroller", style: `height:${HEIGHT}px` }, this.spacer);
    this.root.append(this.scroller);
  }

  holder() {
    return this.spacer;
  }

  rowAt(y) {
    if (y > HEIGHT - AXIS) return -1;
    const row = Math.floor((y + this.scroller.scrollTop) / ROW);
    return row < this.rows.length ? row : -1;
  }

  choose(row, add) {
    if (row < 0) selection.clear();
    else selection.pick(this.rows[row].request, { add });
  }

  key(event) {
    const last = this.rows.length - 1;
    if (last < 0) return;
    if (event.key === "ArrowDown") this.cursor = Math.min(last, this.cursor + 1);
    else if (event.key === "ArrowUp") this.cursor = Math.max(0, this.cursor - 1);
    else if (event.key === "Home") this.cursor = 0;
    else if (event.key === "End") this.cursor = last;
    else if (event.key === "Enter" || event.key === " ") this.choose(Math.max(0, this.cursor), event.shiftKey);
    else if (event.key === "Escape") selection.clear();
    else return;
    event.preventDefault();
    const top = this.cursor * ROW;
    const room = HEIGHT - AXIS - ROW;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top > this.scroller.scrollTop + room) this.scroller.scrollTop = top - room;
    const request = this.rows[this.cursor];
    if (request) this.canvas.setAttribute("aria-label", `Request ${letters(request.request)}: ${statusLine(request, this.state.t, Boolean(this.state.scrape))}`);
    this.kick();
  }

  draw() {
    if (this.state) this.rows = ganttRows(this.state, this.state.t, selection.own);
    super.draw();
  }

  paint(width) {
    const { context: c, colors, state } = this;
    this.clear(width);
    this.ink = this.inkOf === colors && this.inkUnit === this.unit ? this.ink : patterns(c, colors, 1);
    this.inkOf = colors;
    this.inkUnit = this.unit;
    const now = state.t;
    const wanted = Math.max(HEIGHT, this.rows.length * ROW + AXIS);
    if (this.spacerHeight !== wanted) this.spacer.style.height = `${(this.spacerHeight = wanted)}px`;
    const top = this.scroller.scrollTop;
    const clock = { now, left: LEFT, width: width - LEFT - RIGHT };
    timeAxis(c, colors, clock, 0, HEIGHT - AXIS);
    c.save();
    c.beginPath();
    c.rect(0, 0, width, HEIGHT - AXIS);
    c.clip();
    const first = Math.floor(top / ROW);
    const end = Math.min(this.rows.length, Math.ceil((top + HEIGHT) / ROW));
    for (let i = first; i < end; i++) this.row(this.rows[i], i, i * ROW - top, width, clock);
    c.restore();
    const foreign = others(state);
    if (!this.rows.length) {
      c.fillStyle = colors.muted;
      c.font = `14px ${colors.font}`;
      c.textAlign = "center";
      c.fillText(foreign === null ? "No request yet. Type a prompt, or start some users." : "No request of ours yet. Type a prompt, or start some users.", width / 2, HEIGHT / 2 - 10);
      c.textAlign = "left";
    }
    if (foreign) this.others(foreign, width);
  }

  row(request, i, y, width, clock) {
    const { context: c, colors } = this;
    const picked = selection.picked.includes(request.request);
    const shown = selection.shown.includes(request.request);
    if (picked || this.hot === i || this.cursor === i) {
      c.fillStyle = colors.panel;
      c.fillRect(0, y, width, ROW);
    }
    if (picked || shown) {
      c.fillStyle = picked ? colors.focus : colors.muted;
      c.fillRect(0, y + 3, 3, ROW - 6);
    }
    if (this.cursor === i) {
      c.strokeStyle = colors.focus;
      c.lineWidth = 2;
      c.strokeRect(1, y + 1, width - 2, ROW - 2);
    }
    const used = chip(c, colors, request.request, 8, y + 3);
    c.font = `12px ${colors.font}`;
    c.fillStyle = request.state === "finished" ? colors.muted : colors.text;
    c.fillText(clipped(c, request.user || request.id, LEFT - used - 22), used + 14, y + ROW / 2 + 0.5);
    const ink = { prefill: colors.prefillText, decode: colors.decodeText, preempted: colors.evictedText };
    c.fillStyle = (this.state.scrape && request.state === "prefill" ? "" : ink[request.state]) || colors.muted;
    c.fillText(statusLine(request, clock.now, Boolean(this.state.scrape)), width - RIGHT + 10, y + ROW / 2 + 0.5);
    const drawn = (phase) => (this.state.scrape && phase === "prefill" ? "queued" : phase); // an attached engine tells neither
    for (const [phase, from, to] of request.spans) this.span(drawn(phase), from, to ?? clock.now, to === null, y, clock);
  }

  /** Requests that somebody else sent to an attached engine: known by its gauges only, so there is no bar to draw. */
  others(foreign, width) {
    const { context: c, colors } = this;
    const text = `+ ${count(foreign)} ${foreign === 1 ? "other" : "others"}, known by number only`;
    c.font = `600 12px ${colors.font}`;
    const wide = c.measureText(text).width + 20;
    c.fillStyle = colors.panel;
    roundedBar(c, (width - wide) / 2, HEIGHT - AXIS - 28, wide, 22, 6);
    c.fill();
    c.strokeStyle = colors.line;
    c.lineWidth = 1;
    c.stroke();
    c.fillStyle = colors.text;
    c.fillText(text, (width - wide) / 2 + 10, HEIGHT - AXIS - 17);
  }

  span(phase, from, to, open, y, { now, left, width }) {
    const { context: c, colors } = this;
    const x = (t) => left + width * Math.max(0, 1 - (now - t) / WINDOW_S);
    if (to < now - WINDOW_S) return;
    const a = x(from);
    const b = Math.max(a + 1, x(to));
    const middle = y + ROW / 2;
    if (phase === "queued") {
      c.strokeStyle = colors.muted;
      c.lineWidth = 1;
      roundedBar(c, a + 0.5, middle - 3.5, b - a - 1, 7, 3);
      c.stroke();
    } else if (phase === "prefill") {
      c.fillStyle = colors.prefill;
      roundedBar(c, a, middle - 7, Math.max(2, b - a), 14, 2);
      c.fill();
      if (b - a > 16) {
        c.fillStyle = colors.background;
        c.beginPath();
        c.moveTo(a + 5, middle + 4);
        c.lineTo(a + 13, middle + 4);
        c.lineTo(a + 9, middle - 4);
        c.fill();
      }
    } else if (phase === "decode") {
      c.fillStyle = colors.decode;
      c.fillRect(a, middle - 2.5, b - a, 5);
      if (open) {
        c.beginPath();
        c.arc(b - 1, middle, 4.5, 0, 7);
        c.fill();
      }
    } else if (phase === "preempted") {
      c.fillStyle = this.ink.hatch;
      c.fillRect(a, middle - 7, Math.max(3, b - a), 14);
      c.strokeStyle = colors.evicted;
      c.lineWidth = 1;
      c.strokeRect(a + 0.5, middle - 6.5, Math.max(2, b - a - 1), 13);
    }
  }

  report() {
    const now = this.state.t;
    const live = this.rows.filter((r) => r.state !== "finished");
    this.canvas.dataset.step = this.state.step;
    this.canvas.dataset.rows = this.rows.length;
    this.canvas.dataset.live = live.length;
    this.canvas.dataset.others = others(this.state) ?? "";
    this.canvas.dataset.preempted = live.filter((r) => r.state === "preempted").length;
    if (this.cursor < 0) {
      this.say(() => {
        const words = live.slice(0, 5).map((r) => `${letters(r.request)} ${statusLine(r, now, Boolean(this.state.scrape))}`);
        const foreign = others(this.state);
        return `${live.length} live, ${foreign === null ? "" : `${foreign} of others, `}${this.rows.length - live.length} finished in the last ${WINDOW_S} seconds. ${words.join("; ")}`;
      });
    }
  }

  end() {
    super.end();
    selection.removeEventListener("change", this.onpick);
  }
}
