// The block table of the followed request: logical block → physical block, its tokens as text. An attached engine tells no
// tables: of requests of our own, the cells that their tokens lead to on the map are shown, as inferred.
import { STATES, count, letters } from "./draw.js";
import { chipElement, element, hueChip, setText, visible } from "./dom.js";
import { kindOf } from "./grid.js";
import { Panel } from "./panel.js";
import { selection } from "./select.js";

const REFRESH_MS = 250;
const ASK_MS = 600; // how often the text of a growing table is asked for again

export class BlockTable extends Panel {
  constructor(root, live) {
    super(root, live, REFRESH_MS);
    this.chip = chipElement(1);
    this.title = element("span", { class: "who" });
    this.head = element("header", { hidden: true }, this.chip, this.title);
    this.empty = element("p", { class: "empty" }, CHOOSE);
    this.body = element("tbody");
    const column = (text, title) => element("th", { scope: "col", title }, text);
    this.columns = [column(...COLUMNS.told[0]), column(...COLUMNS.told[1]), column("tokens", "· is a space, ⏎ a line break")];
    this.table = element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...this.columns)),
      this.body,
    );
    this.scroller = element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Block table", hidden: true }, this.table);
    this.box = element("div", { class: "blocktable" }, this.head, this.empty, this.scroller);
    root.append(this.box);
    this.texts = new Map(); // physical block → text, of the followed request
    this.off = live.on?.("table", (answer) => this.answered(answer));
  }

  coloured() {
    if (this.number) hueChip(this.chip, this.colors, this.number);
  }

  picked() {
    if (this.number === selection.focus) return;
    this.number = selection.focus;
    this.texts.clear();
    this.asked = this.cells = undefined;
    this.body.replaceChildren();
    if (this.number) {
      setText(this.chip, letters(this.number));
      if (this.colors) hueChip(this.chip, this.colors, this.number);
    }
    this.due = true;
    this.write();
  }

  ask(request, key = `${request.table.length}:${request.computed}`) {
    const now = performance.now();
    if (key === this.asked || now - (this.askedAt ?? -Infinity) < ASK_MS) return;
    this.asked = key;
    this.askedAt = now;
    this.live.askTable?.(request.request);
  }

  answered({ request, blocks, inferred }) {
    if (request !== this.number) return;
    if (inferred) this.cells = blocks.map(([cell]) => cell);
    for (const [block, text] of blocks) this.texts.set(block, text);
    this.due = true;
  }

  write() {
    const { state } = this;
    const request = this.number ? state?.requests[this.number] : null;
    if (state) setText(this.empty, state.scrape ? CHOOSE_OURS : CHOOSE);
    this.empty.hidden = Boolean(request);
    this.head.hidden = this.scroller.hidden = !request;
    if (!request || !this.due) return;
    this.due = false;
    if (state.scrape) return this.guess(request);
    if (this.box.classList.contains("inferred")) this.said("told");
    const { word } = STATES[request.state] ?? STATES.queued;
    const held = request.table.length;
    setText(this.title, held ? `${request.user || request.id} · ${count(request.computed)} tokens in ${count(held)} blocks` : `${request.user || request.id} · ${word}: holds no block now`);
    if (!held) {
      this.body.replaceChildren();
      return;
    }
    this.ask(request);
    while (this.body.children.length > held) this.body.lastChild.remove();
    request.table.forEach((block, logical) => {
      if (!this.body.children[logical]) this.body.append(element("tr", {}, element("td"), element("td"), element("td", { class: "tokens" })));
      const row = this.body.children[logical];
      const owners = state.blocks.owners[block].length;
      const shared = kindOf(state.blocks, block) === "shared";
      setText(row.children[0], `${logical} → ${block}${shared ? ` ×${owners}` : ""}`);
      row.children[0].classList.toggle("shared", shared);
      setText(row.children[1], `${state.blocks.fill[block]}/${state.block_size}`);
      setText(row.children[2], visible(this.texts.get(block) ?? ""));
    });
    this.scroller.dataset.rows = held;
    this.scroller.dataset.request = this.number;
  }

  /** "told" or "inferred": what the columns are. */
  said(how) {
    this.box.classList.toggle("inferred", how === "inferred");
    COLUMNS[how].forEach(([text, title], i) => {
      setText(this.columns[i], text);
      this.columns[i].title = title;
    });
    this.body.replaceChildren();
  }

  /** What an attached engine's map says of a request of our own. */
  guess(request) {
    if (!this.box.classList.contains("inferred")) this.said("inferred");
    this.ask(request, `${this.state.seq}`);
    const { cells } = this, size = this.state.block_size;
    setText(this.title, guessed(request, cells));
    while (this.body.children.length > (cells?.length ?? 0)) this.body.lastChild.remove();
    cells?.forEach((cell, i) => {
      if (!this.body.children[i]) this.body.append(element("tr", {}, element("td"), element("td"), element("td", { class: "tokens" })));
      const row = this.body.children[i];
      setText(row.children[0], `${i} ⇢ ${cell}`);
      setText(row.children[1], count(i * size));
      setText(row.children[2], visible(this.texts.get(cell) ?? ""));
    });
    this.scroller.dataset.rows = cells?.length ?? 0;
    this.scroller.dataset.request = this.number;
  }

  end() {
    super.end();
    this.off?.();
  }
}

const CHOOSE = "Choose a request, or click a block: its block table appears here.";
const CHOOSE_OURS = "Choose a request: the cached cells that its tokens lead to appear here. Inferred: no engine tells a block table.";
const COLUMNS = {
  told: [["logical → physical", "place in the request → block of the pool"], ["slots", "filled slots"]],
  inferred: [["logical ⇢ cell", "inferred: place in the request ⇢ cell of the map with the same tokens after the same tokens"], ["from token", "number of its first token in the request"]],
};

/** The line above an inferred table. `cells`: undefined before an answer came. */
export function guessed(request, cells) {
  const who = request.user || request.id;
  if (!cells) return `Inferring from its tokens · ${who}`;
  if (!cells.length) return `Nothing to infer: its token ids are not told, or no full block of it is cached · ${who}`;
  return `Inferred from its tokens, not told: ${count(cells.length)} full ${cells.length === 1 ? "cell" : "cells"} · ${who}`;
}
