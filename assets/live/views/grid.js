// The block pool as cells: fill height is slots used, texture and border are the state, hue and letter the owner.
import { letters, ownerHue, patterns, percent } from "./draw.js";

const FLASH_MS = 400;
const MARK_MS = 2000; // with reduced motion a mark stays, still, instead of flashing

/** What a block is: free | cached | shared | used. */
export function kindOf(blocks, i) {
  const owners = blocks.owners[i].length;
  if (owners > 1) return "shared";
  if (owners === 1) return "used";
  return blocks.sealed[i] ? "cached" : "free";
}

/** Index from which on cells without a known hash stand for blocks that an attached engine says are in use.
 *
 * It tells how many, not which: they are drawn in the last cells, because new hashes get the first. */
export function anonymousFrom(state) {
  if (!state.scrape) return Infinity;
  const { used_blocks: used, cached_blocks: cached, resident_blocks: resident } = state.pool;
  const { sealed } = state.blocks;
  let left = Math.max(0, used + cached - resident);
  let i = sealed.length;
  while (left > 0 && i > 0) if (!sealed[--i]) left -= 1;
  return i;
}

/** One line for a person who hovers over or steps through the pool. */
export function describe(state, i, inferred) {
  const { blocks, block_size: size } = state;
  const owners = blocks.owners[i];
  const kind = kindOf(blocks, i);
  if (state.scrape) return cell(state, i, kind, inferred);
  if (kind === "free") return `Block ${i}: free`;
  if (kind === "cached") return `Block ${i}: cached, no owner, its ${size} tokens can be reused`;
  const names = owners.slice(0, 6).map(letters).join(", ") + (owners.length > 6 ? " …" : "");
  const shared = kind === "shared" ? `, shared ×${owners.length}` : "";
  return `Block ${i}: ${blocks.fill[i]} of ${size} slots used${shared}, owned by ${names}`;
}

/** A cell of an attached engine's map: its place is ours. */
function cell(state, i, kind, inferred) {
  if (inferred?.cells.has(i)) return `Cell ${i}: a cached block of ${state.block_size} tokens; of request ${letters(inferred.request)}, inferred from its tokens, not told`;
  if (kind === "cached") return `Cell ${i}: a cached block of ${state.block_size} tokens; who uses it now is not told`;
  if (i >= anonymousFrom(state)) return `Cell ${i}: a block in use, by the server's gauge; which one is not told`;
  return `Cell ${i}: free`;
}

export class Pool {
  constructor(canvas, context, still) {
    this.canvas = canvas;
    this.context = context;
    this.still = still;
    this.flashes = new Map(); // block → until when its mark shows
    this.count = 0;
    this.anonymous = Infinity; // see anonymousFrom
    this.lit = null; // request whose blocks stand out; null: all alike
    this.inferred = { request: 0, cells: new Set() }; // of an attached engine's request of ours, by its tokens
  }

  theme(colors) {
    this.colors = colors;
    this.ink = null;
  }

  /** The largest cells that fit, a little taller than wide at most; sizes in device pixels. True when anything changed. */
  layout(count, width, height, unit, { gutter = 0, largest = 56 } = {}) {
    const key = [count, width, height, unit, gutter].join();
    if (this.key === key) return false;
    this.key = key;
    this.count = count;
    this.unit = unit;
    const w = Math.round((width - gutter) * unit);
    const h = Math.round(height * unit);
    const side = (columns) => Math.min(Math.floor(w / columns), Math.floor(h / Math.ceil(count / columns)), Math.floor(largest * unit));
    let columns = 1;
    let best = 0;
    for (let n = 1; n <= Math.min(count, w); n++) if (side(n) > best) best = side((columns = n));
    for (const step of [64, 32, 16, 8]) {
      // Rows that begin at a round block number, where that makes the cells only a little smaller.
      const round = [Math.floor(columns / step) * step, Math.ceil(columns / step) * step].find((n) => n && n <= count && side(n) >= 0.8 * best);
      if (round) {
        columns = round;
        break;
      }
    }
    this.columns = columns;
    this.rows = Math.ceil(count / columns);
    this.width = Math.max(1, Math.min(Math.floor(w / columns), Math.floor(largest * unit)));
    this.height = Math.max(1, Math.min(Math.floor(h / this.rows), Math.floor(this.width * 1.3)));
    this.left = Math.round(gutter * unit);
    this.canvas.width = Math.round(width * unit);
    this.canvas.height = h;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const side1 = Math.min(this.width, this.height);
    this.gap = side1 >= 14 * unit ? Math.round(2 * unit) : side1 >= 5 ? Math.max(1, Math.round(unit / 2)) : side1 >= 4 ? 1 : 0;
    this.ink = null;
    return true;
  }

  place(i) {
    return [this.left + (i % this.columns) * this.width, Math.floor(i / this.columns) * this.height];
  }

  /** Block under a point in CSS pixels, or -1. */
  at(x, y) {
    const column = Math.floor((x * this.unit - this.left) / this.width);
    const row = Math.floor((y * this.unit) / this.height);
    if (column < 0 || column >= this.columns || row < 0 || row >= this.rows) return -1;
    const i = row * this.columns + column;
    return i < this.count ? i : -1;
  }

  all(state) {
    const { context: c, colors } = this;
    this.ink ??= patterns(c, colors, this.unit);
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.fillStyle = colors.background;
    c.fillRect(0, 0, this.canvas.width, this.canvas.height);
    for (let i = 0; i < this.count; i++) this.block(state, i);
    if (this.left) this.rowNumbers();
  }

  rowNumbers() {
    const { context: c, colors, unit } = this;
    const every = Math.max(1, Math.ceil((15 * unit) / this.height));
    c.fillStyle = colors.muted;
    c.font = `${12 * unit}px ${colors.font}`;
    c.textAlign = "right";
    c.textBaseline = "middle";
    for (let row = 0; row < this.rows; row += every) {
      c.fillText(row * this.columns, this.left - 6 * unit, Math.max(7 * unit, (row + 0.5) * this.height));
    }
  }

  /** Marks a block as evicted or taken in a preemption; it is painted again when the mark is over. */
  flash(i, now) {
    this.flashes.set(i, now + (this.still ? MARK_MS : FLASH_MS));
  }

  /** Blocks whose mark is over; they must be painted. */
  faded(now) {
    const over = [];
    for (const [i, until] of this.flashes) if (until <= now) over.push(i);
    for (const i of over) this.flashes.delete(i);
    return over;
  }

  block(state, i) {
    const { context: c, colors, ink, gap, unit } = this;
    const { blocks, block_size: slots } = state;
    const [x, y] = this.place(i);
    const w = this.width - gap;
    const h = this.height - gap;
    const small = Math.min(w, h);
    const owners = blocks.owners[i];
    const line = Math.max(1, Math.round(unit));
    c.fillStyle = colors.background;
    c.fillRect(x, y, this.width, this.height);
    if (this.lit !== null && !owners.includes(this.lit)) c.globalAlpha = 0.28;
    if (!owners.length) {
      if (blocks.sealed[i]) {
        this.cached(x, y, w, h, line);
        if (this.inferred.cells.has(i)) this.guess(x, y, w, h, line);
      }
      else if (i >= this.anonymous) this.unnamed(x, y, w, h, line);
      else this.free(x, y, w, h, line);
    } else {
      const shared = owners.length > 1;
      const used = Math.min(h, Math.round((h * blocks.fill[i]) / slots));
      if (used < h) {
        c.fillStyle = small >= 6 ? ink.waste : colors.wasted;
        c.fillRect(x, y, w, h - used);
      }
      c.fillStyle = shared ? (small >= 8 ? colors.sharedSoft : colors.shared) : ownerHue(colors, owners[0]);
      c.fillRect(x, y + h - used, w, used);
      if (shared && small >= 8) this.doubleBorder(x, y, w, h, line);
      else if (small >= 8) this.border(x, y, w, h, colors.line, 1);
      this.label(x, y, w, h, used, owners);
    }
    c.globalAlpha = 1;
    if (this.flashes.has(i)) this.mark(x, y, w, h, blocks.mark[i] === "preempted", line);
  }

  /** Hatched: all of a block that a preemption took, a corner of one whose cached content was evicted for a new owner. */
  mark(x, y, w, h, whole, line) {
    const { context: c, colors, ink } = this;
    const small = Math.min(w, h);
    if (whole || small < 8) {
      c.fillStyle = small >= 5 ? ink.hatch : colors.evicted;
      c.fillRect(x, y, w, h);
      this.border(x, y, w, h, colors.evicted, line);
      return;
    }
    const edge = line / 2; // within the cell, or painting the cell anew would leave a trace
    c.beginPath();
    c.moveTo(x + edge, y + edge);
    c.lineTo(x + small * 0.6, y + edge);
    c.lineTo(x + edge, y + small * 0.6);
    c.closePath();
    c.fillStyle = ink.hatch;
    c.fill();
    c.strokeStyle = colors.evicted;
    c.lineWidth = line;
    c.stroke();
  }

  border(x, y, w, h, color, line, inset = 0) {
    const { context: c } = this;
    c.strokeStyle = color;
    c.lineWidth = line;
    c.strokeRect(x + inset + line / 2, y + inset + line / 2, w - 2 * inset - line, h - 2 * inset - line);
  }

  free(x, y, w, h, line) {
    const { context: c, colors } = this;
    if (Math.min(w, h) >= 6) this.border(x, y, w, h, colors.line, line);
    else {
      c.fillStyle = colors.free;
      c.fillRect(x, y, w, h);
    }
  }

  cached(x, y, w, h, line) {
    const { context: c, colors } = this;
    const small = Math.min(w, h);
    if (small < 8) {
      const alpha = c.globalAlpha;
      c.fillStyle = colors.cached;
      c.globalAlpha = alpha * 0.5;
      c.fillRect(x, y, w, h);
      c.globalAlpha = alpha;
      return;
    }
    c.fillStyle = colors.cachedSoft;
    c.fillRect(x, y, w, h);
    c.setLineDash(small >= 20 * line ? [4 * line, 3 * line] : [2 * line, 2 * line]);
    this.border(x, y, w, h, colors.cached, line);
    c.setLineDash([]);
  }

  /** Whose it must be, by its tokens: a dashed frame and a letter in doubt, for no engine tells it. */
  guess(x, y, w, h, line) {
    const { context: c, colors, unit } = this;
    const small = Math.min(w, h), large = small >= 14 * unit;
    c.setLineDash(large ? [5 * line, 3 * line] : [2 * line, 2 * line]);
    this.border(x, y, w, h, colors.text, large ? 2 * line : line);
    c.setLineDash([]);
    if (small / unit < 24) return;
    c.font = `600 ${12 * unit}px ${colors.font}`;
    c.textAlign = "center";
    c.textBaseline = "middle";
    c.fillStyle = colors.cachedText;
    c.fillText(`${letters(this.inferred.request)}?`, x + w / 2, y + h / 2 + unit * 0.5, w - 8 * unit);
  }

  unnamed(x, y, w, h, line) {
    const { context: c, colors, ink } = this;
    const small = Math.min(w, h);
    c.fillStyle = small >= 6 ? ink.unnamed : colors.kv;
    c.fillRect(x, y, w, h);
    if (small >= 8) this.border(x, y, w, h, colors.kv, line);
  }

  doubleBorder(x, y, w, h, line) {
    const { colors } = this;
    const small = Math.min(w, h);
    this.border(x, y, w, h, colors.shared, line);
    if (small >= 12 * line) this.border(x, y, w, h, colors.shared, line, small >= 14 * line ? Math.round(2.5 * line) : 2 * line);
  }

  /** The owner's letter or ×N, where it can be read: never below 12 pixels. */
  label(x, y, w, h, used, owners) {
    const { context: c, colors, unit } = this;
    const shared = owners.length > 1;
    const small = Math.min(w, h) / unit;
    if (small < 17) return;
    c.font = `600 ${Math.max(12, Math.min(18, small * 0.42)) * unit}px ${colors.font}`;
    // Up to a quarter narrower than the font has it, where the cell is small.
    const room = w - (shared ? 5 : 2) * unit;
    const text = shared ? `×${owners.length}` : letters(owners[0]);
    if (c.measureText(text).width * 0.75 > room) return;
    c.textAlign = "center";
    c.textBaseline = "middle";
    this.twoTone(text, x, y, w, h, used, shared ? colors.sharedText : colors.ownerText, room);
  }

  /** One text over two grounds: filled slots below, empty ones above. */
  twoTone(text, x, y, w, h, used, ink, room) {
    const { context: c, colors, unit } = this;
    const draw = (top, height, color) => {
      c.save();
      c.beginPath();
      c.rect(x, top, w, height);
      c.clip();
      c.fillStyle = color;
      c.fillText(text, x + w / 2, y + h / 2 + unit * 0.5, room);
      c.restore();
    };
    if (used > 0.8 * h) draw(y, h, ink);
    else if (used < 0.2 * h) draw(y, h, colors.text);
    else {
      draw(y, h - used, colors.text);
      draw(y + h - used, used, ink);
    }
  }

  ring(i, color, width) {
    const { unit, gap } = this;
    const [x, y] = this.place(i);
    this.border(x, y, this.width - gap, this.height - gap, color, width * unit, -unit);
  }
}

export function summary(state) {
  const { pool, num_blocks: total } = state;
  if (state.scrape) {
    return (
      `${pool.used_blocks} of ${total} blocks used, as the server says (${percent(pool.used_blocks / Math.max(1, total))}), ` +
      `${pool.resident_blocks} hashes cached, positions are the dashboard's`
    );
  }
  const live = Object.values(state.requests).filter((r) => r.state !== "finished" && r.state !== "queued").length;
  return (
    `${pool.used_blocks} of ${total} blocks used (${percent(pool.used_blocks / Math.max(1, total))}), ` +
    `${pool.cached_blocks} cached, ${pool.free_blocks} free, ${pool.shared_saved_blocks} saved by sharing, ` +
    `${live} requests in the batch, ${state.totals.preemptions} preemptions`
  );
}
