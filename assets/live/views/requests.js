// Who owns what: the requests of the pool as a list; choosing one lights up its blocks and shows its block table.
import { count, letters, stateOf } from "./draw.js";
import { chipElement, element, hueChip, setText } from "./dom.js";
import { Panel } from "./panel.js";
import { selection } from "./select.js";

const REFRESH_MS = 250;
const FINISHED_SHOWN = 8;

/** Live requests by arrival, then the last few that finished. */
export function listed(state) {
  const all = Object.values(state.requests);
  const live = all.filter((r) => r.state !== "finished").sort((a, b) => a.request - b.request);
  const finished = all.filter((r) => r.state === "finished").sort((a, b) => b.t_end - a.t_end || b.request - a.request);
  return [...live, ...finished.slice(0, FINISHED_SHOWN)];
}

export class Requests extends Panel {
  constructor(root, live) {
    super(root, live, REFRESH_MS);
    this.list = element("div", { class: "requests", role: "listbox", tabindex: 0, "aria-label": "Requests" });
    this.empty = element("p", { class: "empty" }, "No request yet. Start some users, or type a prompt in the cockpit.");
    this.empty.hidden = this.list.hidden = true; // until it is known which of the two is true
    this.rows = new Map();
    this.box = element("div", {}, this.empty, this.list);
    root.append(this.box);
    this.list.addEventListener("click", (e) => {
      const row = e.target.closest("[data-request]");
      if (row) selection.pick(Number(row.dataset.request));
    });
    this.list.addEventListener("keydown", (e) => this.key(e));
  }

  coloured() {
    for (const [number, row] of this.rows) hueChip(row.chip, this.colors, number);
  }

  key(event) {
    const numbers = [...this.list.children].map((node) => Number(node.dataset.request));
    const at = numbers.indexOf(selection.focus);
    const to = { ArrowDown: at + 1, ArrowUp: Math.max(0, at - 1), Home: 0, End: numbers.length - 1 }[event.key];
    if (event.key === "Escape") selection.clear();
    else if (to !== undefined && numbers.length) {
      const next = numbers[Math.min(to, numbers.length - 1)];
      if (next !== selection.focus) selection.pick(next);
      this.rows.get(next)?.node.scrollIntoView({ block: "nearest" });
    } else return;
    event.preventDefault();
  }

  write() {
    const { state } = this;
    if (!state || !this.due || !this.colors || document.hidden) return;
    this.due = false;
    const wanted = listed(state);
    const keep = new Set(wanted.map((r) => r.request));
    for (const [number, row] of this.rows) {
      if (keep.has(number)) continue;
      row.node.remove();
      this.rows.delete(number);
    }
    wanted.forEach((request, i) => {
      const row = this.rows.get(request.request) ?? this.row(request.request);
      if (this.list.children[i] !== row.node) this.list.insertBefore(row.node, this.list.children[i] ?? null);
      const { glyph, word } = stateOf(state, request);
      setText(row.who, request.user || request.id);
      setText(row.state, `${glyph} ${word}`);
      // Blocks of an attached engine's requests are not told, nor a prompt's tokens before it says them.
      setText(row.size, request.state === "finished" || state.scrape ? `${count(request.prompt_tokens + request.output_tokens)} tokens` : `${count(request.table.length)} blocks`);
      row.node.dataset.state = request.state;
    });
    this.empty.hidden = wanted.length > 0;
    this.list.hidden = wanted.length === 0;
    this.list.dataset.rows = wanted.length;
    this.picked();
  }

  row(number) {
    const chip = chipElement(number);
    const who = element("span", { class: "who" });
    const state = element("span", { class: "state" });
    const size = element("span", { class: "size" });
    const node = element("div", { role: "option", id: `request-${number}`, "data-request": number, "aria-label": `Request ${letters(number)}` }, chip, who, state, size);
    hueChip(chip, this.colors, number);
    const row = { node, chip, who, state, size };
    this.rows.set(number, row);
    return row;
  }

  picked() {
    for (const [number, { node }] of this.rows) node.setAttribute("aria-selected", String(number === selection.focus));
    const focus = selection.focus;
    if (this.rows.has(focus)) this.list.setAttribute("aria-activedescendant", `request-${focus}`);
    else this.list.removeAttribute("aria-activedescendant");
  }
}
