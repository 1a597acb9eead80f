// Slots of the blocks in use against tokens held: the gap above is waste, the gap below is what sharing saves.
import { Picture, count, niceCeil } from "./draw.js";
import { LEFT, RIGHT, ROW_FILLED, ROW_HELD, ROW_T, ROW_USED, WINDOW_S, firstAfter, timeAxis } from "./clock.js";

const HEIGHT = 200;
const AXIS = 20;
const TOP = 10;

export class Usage extends Picture {
  constructor(root, live) {
    super(root, live, { height: HEIGHT, fps: 10, name: "Blocks used against tokens held" });
  }

  paint(width) {
    const { context: c, colors, state } = this;
    this.clear(width);
    const now = state.t;
    const plot = { now, left: LEFT - 48, width: width - LEFT + 48 - RIGHT - 30 };
    const bottom = HEIGHT - AXIS;
    const rows = state.series;
    const from = Math.max(0, firstAfter(rows, now - WINDOW_S) - 1);
    const slots = state.block_size;
    let most = slots;
    for (let i = from; i < rows.length; i++) most = Math.max(most, rows[i][ROW_USED] * slots, rows[i][ROW_HELD]);
    const top = niceCeil(most);
    timeAxis(c, colors, plot, TOP, bottom);
    c.strokeStyle = colors.line;
    c.fillStyle = colors.muted;
    c.font = `12px ${colors.font}`;
    c.textAlign = "right";
    const y = (tokens) => bottom - ((bottom - TOP) * tokens) / top;
    for (const share of [0, 0.5, 1]) {
      c.beginPath();
      c.moveTo(plot.left, Math.round(y(top * share)) + 0.5);
      c.lineTo(plot.left + plot.width, Math.round(y(top * share)) + 0.5);
      c.stroke();
      c.fillText(count(top * share), plot.left - 8, y(top * share));
    }
    c.textAlign = "left";
    const x = (t) => plot.left + plot.width * Math.max(0, 1 - (now - t) / WINDOW_S);
    const points = [];
    for (let i = from; i < rows.length; i++) {
      const row = rows[i];
      const point = [x(row[ROW_T]), y(row[ROW_USED] * slots), y(row[ROW_FILLED]), y(row[ROW_HELD])];
      // One point a pixel is enough: the newest of it.
      if (points.length && point[0] - points[points.length - 1][0] < 1 && i < rows.length - 1 && points.length > 1) points[points.length - 1] = [points[points.length - 1][0], ...point.slice(1)];
      else points.push(point);
    }
    if (points.length) {
      this.area(points, 1, bottom, colors.wastedSoft);
      this.area(points, 2, bottom, colors.kv, 0.45);
      this.line(points, 1, colors.text, []);
      if (!state.scrape) this.line(points, 2, colors.kv, []);
      if (!state.scrape) this.line(points, 3, colors.shared, [5, 3]);
    }
    const pool = state.pool;
    if (state.scrape) return this.names(width, [["━ in used blocks", `${count(pool.used_blocks * slots)} slots`, y(pool.used_blocks * slots), colors.text]]);
    this.names(width, [
      ["━ in used blocks", `${count(pool.used_blocks * slots)} slots`, y(pool.used_blocks * slots), colors.text],
      ["━ filled", `${count(pool.filled_slots)} slots`, y(pool.filled_slots), colors.kvText],
      ["┅ held by requests", `${count(pool.held_tokens)} tokens`, y(pool.held_tokens), colors.sharedText],
    ]);
  }

  report() {
    const { canvas, state } = this;
    canvas.dataset.step = state.step;
    this.say(() => {
      const { pool, block_size: slots } = state;
      if (state.scrape) return `${count(pool.used_blocks)} blocks with ${count(pool.used_blocks * slots)} slots are used, as the server says`;
      return (
        `${count(pool.used_blocks)} blocks with ${count(pool.used_blocks * slots)} slots are used, ${count(pool.filled_slots)} slots are filled, ` +
        `requests hold ${count(pool.held_tokens)} tokens`
      );
    });
  }

  /** Steps, not slopes: between two engine steps nothing changes. */
  trace(points, column) {
    const { context: c } = this;
    c.beginPath();
    c.moveTo(points[0][0], points[0][column]);
    for (let i = 1; i < points.length; i++) {
      c.lineTo(points[i][0], points[i - 1][column]);
      c.lineTo(points[i][0], points[i][column]);
    }
  }

  area(points, column, bottom, color, alpha = 1) {
    const { context: c } = this;
    this.trace(points, column);
    c.lineTo(points[points.length - 1][0], bottom);
    c.lineTo(points[0][0], bottom);
    c.fillStyle = color;
    c.globalAlpha = alpha;
    c.fill();
    c.globalAlpha = 1;
  }

  line(points, column, color, dash) {
    const { context: c } = this;
    this.trace(points, column);
    c.strokeStyle = color;
    c.lineWidth = 1.75;
    c.setLineDash(dash);
    c.stroke();
    c.setLineDash([]);
  }

  /** Names at the ends of their lines, moved apart where the lines meet. */
  names(width, lines) {
    const { context: c, colors } = this;
    const x = width - RIGHT - 20;
    const step = 34;
    const sorted = lines.map((line) => [...line]).sort((a, b) => a[2] - b[2]);
    let free = TOP + 12;
    sorted.forEach((line, i) => {
      const lowest = HEIGHT - AXIS - 10 - (sorted.length - 1 - i) * step;
      line[2] = Math.min(lowest, Math.max(line[2], free));
      free = line[2] + step;
    });
    for (const [word, value, y, ink] of sorted) {
      c.fillStyle = ink;
      c.font = `12px ${colors.font}`;
      c.fillText(word, x, y - 7);
      c.font = `600 13px ${colors.font}`;
      c.fillText(value, x + 14, y + 8);
    }
  }
}
