// Tokens computed by each step, stacked: decode below (the steady part), prefill above.
import { Picture, count } from "./draw.js";
import { element } from "./dom.js";
import { LEFT, RIGHT, ROW_DECODE, ROW_PREFILL, ROW_STEP_S, ROW_T, WINDOW_S, firstAfter, timeAxis } from "./clock.js";

const HEIGHT = 150;
const AXIS = 20;
const TOP = 8;

/** A top for the axis whose quarters and sixteenths are whole numbers. */
function evenCeil(most) {
  let top = 16;
  while (top < most) top *= 2;
  return top * 0.75 >= most && top > 16 ? top * 0.75 : top;
}

export class TokensPerStep extends Picture {
  constructor(root, live) {
    super(root, live, { height: HEIGHT, fps: 20, name: "Tokens per step" });
    this.top = 16;
  }

  build() {
    // The same gutter as the request rows above, whose scroll bar takes room: one instant stays one vertical line.
    this.root.append(element("div", { class: "gutter" }, element("div", {}, this.canvas)));
  }

  paint(width) {
    const { context: c, colors, state } = this;
    this.clear(width);
    const now = state.t;
    const plot = { now, left: LEFT, width: width - LEFT - RIGHT };
    const bottom = HEIGHT - AXIS;
    const from = firstAfter(state.series, now - WINDOW_S);
    const rows = state.series;
    let most = 0;
    for (let i = from; i < rows.length; i++) most = Math.max(most, rows[i][ROW_PREFILL] + rows[i][ROW_DECODE]);
    this.top = evenCeil(most);
    timeAxis(c, colors, plot, TOP, bottom);
    this.scale(plot, bottom);
    // One pass a colour: each step is a bar as wide as the step was long, at least a pixel.
    const x = (t) => plot.left + plot.width * Math.max(0, 1 - (now - t) / WINDOW_S);
    const y = (tokens) => bottom - (bottom - TOP) * this.share(tokens);
    const bar = (row, below, tokens) => {
      const right = x(row[ROW_T]);
      const left = Math.min(right - 1 / this.unit, x(row[ROW_T] - row[ROW_STEP_S]));
      c.fillRect(left, y(below + tokens), right - left, y(below) - y(below + tokens));
    };
    c.fillStyle = colors.decode;
    for (let i = from; i < rows.length; i++) bar(rows[i], 0, rows[i][ROW_DECODE]);
    c.fillStyle = colors.prefill;
    for (let i = from; i < rows.length; i++) if (rows[i][ROW_PREFILL]) bar(rows[i], rows[i][ROW_DECODE], rows[i][ROW_PREFILL]);
    this.words(width, rows.length > from ? rows[rows.length - 1] : null);
  }

  report() {
    const { state, canvas } = this;
    canvas.dataset.step = state.step;
    this.say(() => {
      const last = state.series[state.series.length - 1];
      return last ? `${this.state.scrape ? "time between the last two scrapes" : "last step"} computed ${last[ROW_PREFILL]} prefill and ${last[ROW_DECODE]} decode tokens` : "no step yet";
    });
  }

  /** Square root: a step of 1,000 prefill tokens and one of 8 decode tokens are both to be seen. Edges read against the axis. */
  share(tokens) {
    return Math.sqrt(tokens / this.top);
  }

  scale({ left, width }, bottom) {
    const { context: c, colors } = this;
    c.strokeStyle = colors.line;
    c.fillStyle = colors.muted;
    c.font = `12px ${colors.font}`;
    c.textAlign = "right";
    for (const share of [0, 1 / 16, 1 / 4, 9 / 16, 1]) {
      const y = Math.round(bottom - (bottom - TOP) * this.share(this.top * share)) + 0.5;
      c.beginPath();
      c.moveTo(left, y);
      c.lineTo(left + width, y);
      c.stroke();
      c.fillText(count(this.top * share), left - 8, y);
    }
    c.textAlign = "left";
    c.fillText("tokens", 8, TOP + 4);
    c.fillText("√ scale", 8, TOP + 20);
  }

  words(width, last) {
    const { context: c, colors } = this;
    const x = width - RIGHT + 10;
    const lines = [
      ["▲ prefill", last?.[ROW_PREFILL], colors.prefillText],
      ["● decode", last?.[ROW_DECODE], colors.decodeText],
    ];
    c.font = `600 12px ${colors.font}`;
    lines.forEach(([word, value, ink], i) => {
      c.fillStyle = ink;
      c.fillText(value === undefined ? word : `${word} ${count(value)}`, x, TOP + 12 + i * 20);
    });
    c.fillStyle = colors.muted;
    c.font = `12px ${colors.font}`;
    c.fillText(!last ? "no step yet" : this.state.scrape ? "since the last scrape" : "in the last step", x, TOP + 52);
  }
}
