// The prefix tree of the cache: a column a block of a prompt, a row an ending. A block that several prompts begin with is
// drawn once, as tall as all that follows it. Made from the message "tree" (backend/prefix_tree.py), asked for on demand.
import { Picture, count, letters, ownerHue } from "./draw.js";
import { element, setText, visible } from "./dom.js";
import { selection } from "./select.js";
import { describe, layout, runs, summary, wrapped } from "./tree_layout.js";

const TALLEST = 280; // of the picture, whatever is in it: nothing below it may jump; what is more scrolls
const ROW = { most: 30, least: 7 };
const COLUMN = { most: 190, least: 3 };
const AXIS = 20;
const LINE = 16; // of text
const LINES = 8; // that are written into a run, at most
const ASK_MS = 1000; // between two questions, while something changes

export class PrefixTree extends Picture {
  constructor(root, live) {
    super(root, live, { height: 120, fps: 10, focusable: true, name: "Prefix tree" });
    this.tree = null;
    this.plan = { nodes: [], depth: 0, rows: 0 };
    this.hot = -1; // node under the pointer or the keyboard
    this.keyboard = false;
    this.askedAt = -Infinity;
    this.askedSeq = -1;
    this.waiting = undefined;
    const { canvas } = this;
    canvas.addEventListener("pointermove", (e) => this.point(this.at(e.offsetX, e.offsetY), false));
    canvas.addEventListener("pointerleave", () => this.keyboard || this.point(-1, false));
    canvas.addEventListener("click", () => this.choose());
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("blur", () => this.point(-1, false));
    this.scroller.addEventListener("scroll", () => this.tell(), { passive: true });
    this.onpick = () => this.kick();
    selection.addEventListener("change", this.onpick);
    this.off = live.on?.("tree", (answer) => this.answered(answer));
  }

  build() {
    this.tip = element("div", { class: "tip" }); // there only while it says something
    this.spoken = element("p", { class: "hidden", role: "status" });
    this.scroller = element("div", { class: "scroller", style: `height:${TALLEST}px` }, element("div", {}, this.canvas));
    this.words = element("p", { class: "rule" });
    this.around = element("div", { class: "pool" }, this.scroller);
    this.legend = legend(OWN);
    this.root.append(this.around, this.legend, this.words, this.spoken);
  }

  /** What is drawn changes with the answers, not with the steps. */
  update(state) {
    const attached = Boolean(state.scrape);
    if (attached !== this.attached) {
      this.attached = attached;
      this.legend.replaceWith((this.legend = legend(attached ? ATTACHED : OWN)));
      this.kick();
    }
    this.state = state;
    this.want();
  }

  sighted(visible) {
    super.sighted(visible);
    this.want();
  }

  /** Asks for the tree when something has changed, not more often than ASK_MS. */
  want() {
    if (!this.state || !this.visible || this.state.seq === this.askedSeq || this.waiting) return;
    const wait = this.askedAt + ASK_MS - performance.now();
    this.waiting = setTimeout(() => {
      this.waiting = undefined;
      this.askedAt = performance.now();
      this.askedSeq = this.state.seq;
      this.live.askTree?.();
    }, Math.max(0, wait));
  }

  answered(tree) {
    this.tree = tree;
    if (tree.seq < this.askedSeq) this.askedSeq = tree.seq; // older than what was asked for: asked again in a while
    const hot = this.plan.nodes[this.hot]?.hash;
    this.plan = layout(tree.nodes ?? []);
    this.hot = this.plan.nodes.findIndex((n) => n.hash === hot);
    setText(this.words, `${summary(tree)[0].toUpperCase()}${summary(tree).slice(1)}`);
    const [, height] = this.cell();
    this.height = Math.max(64, Math.ceil(this.plan.rows * height) + AXIS);
    this.kick();
    this.want();
    this.tell();
  }

  /** Width and height of a cell. */
  cell() {
    const { depth, rows } = this.plan;
    const wide = Math.min(COLUMN.most, Math.max(COLUMN.least, (this.width - 2) / Math.max(1, depth)));
    return [wide, Math.max(ROW.least, Math.min(ROW.most, (TALLEST - AXIS) / Math.max(1, rows)))];
  }

  box(n) {
    const [w, h] = this.cell();
    return [n.column * w, AXIS + n.row * h, w, n.rows * h];
  }

  at(x, y) {
    return this.plan.nodes.findIndex((n) => {
      const [left, top, w, h] = this.box(n);
      return x >= left && x < left + w && y >= top && y < top + h;
    });
  }

  paint(width) {
    const { context: c, colors, plan } = this;
    this.clear(width);
    c.font = `12px ${colors.font}`;
    if (!plan.nodes.length) {
      c.fillStyle = colors.muted;
      c.fillText("No block is cached yet: a block is cached once it is full.", 4, 40);
      return;
    }
    this.axis();
    for (const n of plan.nodes) this.node(n);
    for (const run of runs(plan.nodes)) this.text(run);
    const hot = plan.nodes[this.hot];
    if (hot) {
      const [x, y, w, h] = this.box(hot);
      c.strokeStyle = colors.focus;
      c.lineWidth = 2;
      c.strokeRect(x + 1, y + 1, Math.max(1, w - 3), h - 3);
    }
  }

  /** First token of some columns. */
  axis() {
    const { context: c, colors, plan, tree } = this;
    const [w] = this.cell();
    c.fillStyle = colors.muted;
    const every = Math.max(1, Math.ceil(64 / w));
    for (let column = 0; column < plan.depth; column += every) {
      const text = `${column ? "" : "token "}${count(column * tree.block_size)}`;
      if (column * w + c.measureText(text).width <= this.width) c.fillText(text, column * w + 2, 9);
    }
  }

  node(n) {
    const { context: c, colors } = this;
    const [x, y, wide, tall] = this.box(n);
    const gap = wide >= 8 ? 2 : wide >= 4 ? 1 : 0.5, w = Math.max(1, wide - gap), h = Math.max(1, tall - (tall >= 8 ? 2 : 1));
    const alpha = this.lit(n) ? 1 : 0.28, small = Math.min(w, h) < 10; // then a dashed border would be all that is seen
    c.globalAlpha = n.held || !small ? alpha : alpha * 0.5;
    c.fillStyle = this.fill(n, small);
    c.fillRect(x, y, w, h);
    c.globalAlpha = alpha;
    c.setLineDash(n.held ? [] : [4, 3]);
    c.lineWidth = 1;
    c.strokeStyle = n.held > 1 ? colors.shared : n.held ? colors.line : colors.cached;
    if (!small) c.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    if (n.held > 1 && w >= 12 && h >= 12) c.strokeRect(x + 3, y + 3, w - 6, h - 6);
    c.setLineDash([]);
    if (n.lost) {
      c.fillStyle = colors.evicted;
      c.fillRect(x, y, Math.min(3, w), h);
    }
    if (n.below.length < n.children && w >= 8) { // something follows that is not shown
      c.fillStyle = colors.muted;
      c.fillRect(x + w - 3, y + 2, 2, h - 4);
    }
    c.globalAlpha = 1;
  }

  /** Whether the followed request holds it, if one is followed. */
  lit(n) {
    const followed = selection.focus;
    return followed === null || !this.state.requests[followed]?.table?.length || n.holders.includes(followed);
  }

  fill(n, small) {
    const { colors } = this;
    if (n.held > 1) return small ? colors.shared : colors.sharedSoft;
    return n.held ? ownerHue(colors, n.holders[0]) : small ? colors.cached : colors.cachedSoft;
  }

  /** Who holds a run, and what it says, over all its blocks. */
  text(run) {
    const { context: c, colors } = this, [first] = run;
    const [x, y, w, h] = this.box(first), room = run.length * w - 14;
    if (h < 15 || room < 16) return;
    c.globalAlpha = this.lit(first) ? 1 : 0.28;
    c.font = `12px ${colors.mono}`;
    const letter = (this.letter ??= c.measureText("m").width), name = first.held > 1 ? `×${first.held}` : first.held ? letters(first.holders[0]) : "";
    const said = visible(run.map((n) => n.text).join("")).replaceAll("\u200b", "");
    const lines = wrapped(`${name}${name && said ? " " : ""}${said}`, Math.floor(room / letter), Math.min(LINES, Math.floor((h - 6) / LINE)));
    lines.forEach((line, i) => {
      const top = y + Math.max(1, (Math.min(h, lines.length * LINE + 8) - lines.length * LINE) / 2) + i * LINE;
      if (run.length > 1) { // the borders between blocks stay out of the words
        c.fillStyle = this.fill(first, false);
        c.fillRect(x + 5, top, line.length * letter + 2, LINE - 1);
      }
      c.fillStyle = first.held > 1 ? colors.sharedText : first.held ? colors.ownerText : colors.cachedText;
      c.fillText(line, x + 6, top + LINE / 2);
    });
    c.globalAlpha = 1;
  }

  report() {
    this.scroller.dataset.nodes = this.plan.nodes.length;
    this.say(() => summary(this.tree));
  }

  point(i, keyboard) {
    this.keyboard = keyboard;
    if (i === this.hot) return;
    this.hot = i;
    this.tell();
    this.kick();
  }

  tell() {
    const n = this.plan.nodes[this.hot], { tip } = this;
    if (!n) return tip.remove();
    if (!tip.isConnected) this.around.append(tip);
    const line = describe(n, this.tree.block_size, this.attached);
    const code = element("code", {}, `hash ${n.hash.slice(0, 16)}`);
    tip.replaceChildren(element("strong", {}, line), ...(n.text ? [element("q", {}, visible(n.text))] : []), code);
    if (this.keyboard) setText(this.spoken, n.text ? `${line}. Text: ${n.text}` : line);
    const [x, y, w, h] = this.box(n), wide = tip.offsetWidth, top = y - this.scroller.scrollTop;
    tip.style.left = `${Math.max(0, Math.min(this.width - wide, x + w / 2 - wide / 2))}px`;
    const above = top - tip.offsetHeight - 8;
    tip.style.top = `${above >= -60 ? above : Math.min(TALLEST, top + h) + 8}px`;
  }

  choose() {
    const next = selection.cycle(this.plan.nodes[this.hot]?.holders ?? []);
    if (next !== undefined && this.keyboard) setText(this.spoken, `Following request ${letters(next)}`);
  }

  key(event) {
    const { nodes } = this.plan, n = nodes[this.hot];
    if (!nodes.length) return;
    const beside = (step) => {
      const same = nodes.map((other, i) => i).filter((i) => nodes[i].column === n.column);
      return same[same.indexOf(this.hot) + step] ?? this.hot;
    };
    const moves = {
      ArrowRight: () => n.below[0] ?? this.hot, ArrowLeft: () => (n.parent < 0 ? this.hot : n.parent), ArrowDown: () => beside(1),
      ArrowUp: () => beside(-1), Home: () => 0, End: () => nodes.length - 1,
    };
    if (event.key in moves) this.point(n ? moves[event.key]() : 0, true);
    else if (event.key === "Enter" || event.key === " ") this.choose();
    else if (event.key === "Escape") {
      selection.clear();
      this.point(-1, false);
    } else return;
    event.preventDefault();
    const shown = nodes[this.hot];
    if (!shown) return;
    const [, top, , tall] = this.box(shown), { scrollTop } = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = top - AXIS;
    else if (top + Math.min(tall, 2 * ROW.most) > scrollTop + TALLEST) this.scroller.scrollTop = top + Math.min(tall, 2 * ROW.most) - TALLEST;
  }

  end() {
    super.end();
    clearTimeout(this.waiting);
    this.off?.();
    selection.removeEventListener("change", this.onpick);
  }
}

const LOST = ["lost", "", "out of reach: the block before it was evicted"];
const OWN = [["used", "A", "held by one request"], ["shared", "×3", "held by several"], ["cached", "", "cached, held by nobody"], LOST];
const ATTACHED = [["cached", "", "cached; which requests hold it is not told"], LOST];

function legend(words) {
  return element("ul", { class: "legend" }, ...words.map(([kind, text, word]) => element("li", {}, element("i", { class: kind, "aria-hidden": "true" }, text), word)));
}
