// The block table of the followed request: logical block → physical block, its tokens as text.
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
    this.empty = element("p", { class: "empty" }, "Choose a request, or click a block: its block table appears here.");
    this.body = element("tbody");
    const column = (text, title) => element("th", { scope: "col", title }, text);
    this.table = element(
      "table",
      {},
      element("thead", {}, element("tr", {}, column("logical → physical", "place in the request → block of the pool"), column("slots", "filled slots"), column("tokens", "· is a space, ⏎ a line break"))),
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
    this.asked = undefined;
    this.body.replaceChildren();
    if (this.number) {
      setText(this.chip, letters(this.number));
      if (this.colors) hueChip(this.chip, this.colors, this.number);
    }
    this.due = true;
    this.write();
  }

  ask(request) {
    const now = performance.now();
    const key = `${request.table.length}:${request.computed}`;
    if (key === this.asked || now - (this.askedAt ?? -Infinity) < ASK_MS) return;
    this.asked = key;
    this.askedAt = now;
    this.live.askTable?.(request.request);
  }

  answered({ request, blocks }) {
    if (request !== this.number) return;
    for (const [block, text] of blocks) this.texts.set(block, text);
    this.due = true;
  }

  write() {
    const { state } = this;
    const request = this.number ? state?.requests[this.number] : null;
    this.empty.hidden = Boolean(request);
    this.head.hidden = this.scroller.hidden = !request;
    if (!request || !this.due) return;
    this.due = false;
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

  end() {
    super.end();
    this.off?.();
  }
}
