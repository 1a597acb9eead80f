// The pool, live: hover or step through it with the keyboard, click a block to follow its owner.
import { letters } from "./draw.js";
import { element, setText, visible } from "./dom.js";
import { describe, kindOf } from "./grid.js";
import { PoolPicture } from "./pool.js";
import { selection } from "./select.js";

const HEIGHT = 400;
const GUTTER = 44;
const ASK_MS = 90; // a pointer that only passes by asks nothing

export class Blocks extends PoolPicture {
  constructor(root, live) {
    super(root, live, { height: HEIGHT, focusable: true, name: "Block pool" }, { gutter: GUTTER });
    this.hot = -1; // block under the pointer or the keyboard
    this.keyboard = false;
    this.listen();
  }

  build() {
    this.tip = element("div", { class: "tip", hidden: true });
    this.spoken = element("p", { class: "hidden", role: "status" });
    this.legend = legend(OWN);
    this.root.append(element("div", { class: "pool" }, this.canvas, this.tip), this.legend, this.spoken);
  }

  update(state) {
    const attached = Boolean(state.scrape);
    if (attached !== this.attached) {
      this.attached = attached;
      this.legend.replaceWith((this.legend = legend(attached ? ATTACHED : OWN)));
    }
    super.update(state);
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (e) => this.point(this.pool.at(e.offsetX, e.offsetY), false));
    canvas.addEventListener("pointerleave", () => this.keyboard || this.point(-1, false));
    canvas.addEventListener("click", () => this.choose());
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("blur", () => this.point(-1, false));
    this.onpick = () => {
      this.full = true;
      this.kick();
    };
    selection.addEventListener("change", this.onpick);
    this.offblock = this.live.on?.("block", (answer) => this.answered(answer));
    this.offtable = this.live.on?.("table", (answer) => answer.inferred && this.guessed(answer));
  }

  paint(width) {
    const { pool, state } = this;
    const lit = state.requests[selection.focus]?.table?.length ? selection.focus : null;
    if (pool.inferred.request && (!state.scrape || pool.inferred.request !== selection.focus)) this.guessed({ request: 0, blocks: [] });
    if (lit !== pool.lit) {
      pool.lit = lit;
      this.full = true;
    }
    if (this.moved !== undefined && !this.full) for (const i of this.around(this.moved)) this.dirty.add(i);
    const ringed = this.full || this.moved !== undefined || this.around(this.hot).some((i) => this.dirty.has(i));
    this.moved = undefined;
    super.paint(width);
    if (ringed && this.hot >= 0 && this.hot < state.num_blocks) pool.ring(this.hot, this.colors.focus, 2);
  }

  /** The cells that a ring around block i touches. */
  around(i) {
    const { columns, count } = this.pool;
    if (i < 0) return [];
    return [0, -1, 1, -columns, columns, -columns - 1, -columns + 1, columns - 1, columns + 1].map((d) => i + d).filter((n) => n >= 0 && n < count);
  }

  report() {
    super.report();
    if (this.hot >= 0) this.tell();
  }

  point(i, keyboard) {
    this.keyboard = keyboard;
    if (i === this.hot) return;
    this.moved = this.hot >= 0 ? this.hot : i;
    this.hot = i;
    this.known = null;
    clearTimeout(this.asking);
    if (i < 0) {
      this.tip.hidden = true;
      this.full = true;
    } else {
      this.tell();
      if (this.state && kindOf(this.state.blocks, i) !== "free") this.asking = setTimeout(() => this.live.askBlock?.(i), ASK_MS);
    }
    this.kick();
  }

  /** The cells of the followed request of an attached engine, as the block table has asked for them. */
  guessed({ request, blocks }) {
    const { cells } = this.pool.inferred, now = new Set(request === selection.focus ? blocks.map(([cell]) => cell) : []);
    this.pool.inferred = { request: now.size ? request : 0, cells: now };
    this.canvas.dataset.inferred = now.size;
    for (const i of [...cells, ...now]) if (i < this.pool.count) this.dirty.add(i);
    this.told = undefined;
    this.kick();
  }

  answered(answer) {
    if (answer.block !== this.hot) return;
    this.known = answer;
    this.tell();
  }

  tell() {
    const { state, hot, pool, tip } = this;
    if (!state || hot < 0 || hot >= state.num_blocks) return;
    const line = describe(state, hot, pool.inferred);
    const known = this.known?.block === hot && kindOf(state.blocks, hot) !== "free" ? this.known : null;
    const signature = line + (known ? known.text + known.hash : "");
    if (signature !== this.told) {
      this.told = signature;
      tip.replaceChildren(element("strong", {}, line));
      if (known) {
        if (known.text) tip.append(element("q", {}, visible(known.text)));
        const chain = known.chain?.length ? known.chain : known.hash ? [known.hash] : [];
        if (chain.length) tip.append(element("code", {}, hashLine(chain)));
      }
      if (this.keyboard) setText(this.spoken, known?.text ? `${line}. Text: ${known.text}` : line);
    }
    tip.hidden = false;
    const [x, y] = pool.place(hot).map((v) => v / pool.unit);
    const room = this.width;
    const wide = tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room - wide, x + pool.width / pool.unit / 2 - wide / 2))}px`;
    const above = y - tip.offsetHeight - 8;
    tip.style.top = `${above >= -40 ? above : y + pool.height / pool.unit + 8}px`;
  }

  choose() {
    const next = selection.cycle(this.state?.blocks.owners[this.hot] ?? []);
    if (next !== undefined && this.keyboard) setText(this.spoken, `Following request ${letters(next)}`);
  }

  key(event) {
    if (!this.state) return;
    const { columns, count } = this.pool;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, PageDown: columns * 8, PageUp: -columns * 8 };
    if (event.key in moves) this.point(Math.max(0, Math.min(count - 1, (this.hot < 0 ? 0 : this.hot) + (this.hot < 0 ? 0 : moves[event.key]))), true);
    else if (event.key === "Home") this.point(0, true);
    else if (event.key === "End") this.point(count - 1, true);
    else if (event.key === "Enter" || event.key === " ") this.choose();
    else if (event.key === "Escape") {
      selection.clear();
      this.point(-1, false);
    } else return;
    event.preventDefault();
  }

  end() {
    super.end();
    clearTimeout(this.asking);
    this.offblock?.();
    this.offtable?.();
    selection.removeEventListener("change", this.onpick);
  }
}

/** root → … → this block; a hash is long, its first six figures are enough to compare by eye. */
function hashLine(chain) {
  const short = chain.map((hash) => hash.slice(0, 6));
  const shown = short.length > 4 ? [short[0], `… ${short.length - 3} …`, ...short.slice(-2)] : short;
  return `hash chain: ${shown.join(" → ")}`;
}

/** The cells' vocabulary, drawn with the same colours and textures as the cells. */
const OWN = [
  ["used", "A", "filled slots, owner's letter"],
  ["waste", "", "empty slots of a used block"],
  ["shared", "×3", "held by several requests"],
  ["cached", "", "cached, reusable"],
  ["hatched", "", "evicted or preempted"],
  ["free", "", "free"],
];
const ATTACHED = [
  ["cached", "", "a cached block, in use or not (KV events)"],
  ["inferred", "A?", "of the followed request: inferred from its tokens, not told"],
  ["unnamed", "", "in use, by the server's gauge: how many, not which"],
  ["hatched", "", "evicted"],
  ["free", "", "free"],
  ["", "", "Positions are the dashboard's, not the GPU's."],
];

function legend(words) {
  const item = ([kind, text, word]) => element("li", {}, ...(kind ? [element("i", { class: kind, "aria-hidden": "true" }, text)] : []), word);
  return element("ul", { class: "legend" }, ...words.map(item));
}
