// What up to four requests say, as they say it. Model text is data: it only ever becomes text nodes.
import { count, letters, stateOf } from "./draw.js";
import { chipElement, element, hueChip, setText } from "./dom.js";
import { Panel } from "./panel.js";
import { selection } from "./select.js";

const PANES = 4;
const REFRESH_MS = 200; // of the lines about state; text itself is appended as it comes

/**
 * Whom to show: the requests a person picked; else this tab's newest prompt, then those shown before that still
 * live, then running ones. At most four.
 */
export function whomToShow(state, { picked, shown, own }) {
  const known = (number) => state.requests[number] !== undefined;
  const chosen = picked.filter(known);
  if (chosen.length) return chosen;
  const mine = Object.values(state.requests).filter((r) => own.has(r.id)).sort((a, b) => b.request - a.request);
  const result = mine.slice(0, 1).map((r) => r.request);
  const add = (number) => result.length < PANES && !result.includes(number) && result.push(number);
  const live = (number) => known(number) && state.requests[number].state !== "finished";
  shown.filter(live).forEach(add);
  state.running.forEach(add);
  if (!state.running.length) shown.filter(known).forEach(add); // all is said: leave it to be read
  return result;
}

export class Text extends Panel {
  constructor(root, live) {
    super(root, live, REFRESH_MS);
    this.panes = new Map();
    this.box = this.list = element("div", { class: "panes" });
    this.empty = element("p", { class: "empty" }, "What the model says appears here, token by token.");
    root.append(this.list);
    this.list.append(this.empty);
    this.off = live.on?.("text", (piece) => this.said(piece));
  }

  options(options) {
    super.options(options);
    for (const id of options.own ?? []) selection.own.add(id);
    if (this.state) this.picked();
  }

  coloured() {
    for (const [number, pane] of this.panes) hueChip(pane.chip, this.colors, number);
  }

  update(state) {
    if (this.epoch !== undefined && this.epoch !== state.epoch) this.panes.forEach((pane, number) => this.close(number));
    this.epoch = state.epoch;
    super.update(state);
  }

  picked() {
    if (!this.state) return;
    const numbers = whomToShow(this.state, selection);
    selection.show(numbers);
    const wanted = new Set(numbers);
    let changed = false;
    for (const number of [...this.panes.keys()]) if (!wanted.has(number)) changed = this.close(number);
    for (const number of numbers) if (!this.panes.has(number)) changed = this.open(number);
    if (changed || this.watching !== numbers.join()) {
      this.watching = numbers.join();
      this.live.watch?.(numbers);
    }
    numbers.forEach((number, i) => {
      const { node } = this.panes.get(number);
      if (this.list.children[i] !== node) this.list.insertBefore(node, this.list.children[i] ?? null);
    });
    this.empty.hidden = numbers.length > 0;
    this.list.dataset.panes = numbers.length;
  }

  open(number) {
    const chip = chipElement(number);
    const state = element("span", { class: "state" });
    const prompt = element("span", { class: "prompt" });
    const answer = element("span", { class: "answer" });
    const body = element("div", { class: "said", tabindex: 0, role: "region", "aria-label": `Text of request ${letters(number)}` }, prompt, answer);
    const who = element("span", { class: "who" });
    const node = element("article", { "data-request": number }, element("header", {}, chip, who, state), body);
    if (this.colors) hueChip(chip, this.colors, number);
    this.panes.set(number, { node, chip, who, state, prompt, answer, body, length: 0, follow: true, top: 0 });
    body.addEventListener("scroll", () => {
      // Up by a person: leave it there. Down to the end: go on following. Text that arrives meanwhile is no scrolling.
      const pane = this.panes.get(number);
      if (!pane) return;
      if (body.scrollTop < pane.top - 4) pane.follow = false;
      else if (body.scrollTop + body.clientHeight >= body.scrollHeight - 8) pane.follow = true;
      pane.top = body.scrollTop;
    });
    return true;
  }

  close(number) {
    this.panes.get(number)?.node.remove();
    this.panes.delete(number);
    return true;
  }

  /** `from` is where this piece begins in the answer: pieces may come again or anew after a reconnection. */
  said({ request, prompt, from = 0, text = "" }) {
    const pane = this.panes.get(request);
    if (!pane) return;
    if (prompt !== undefined) setText(pane.prompt, prompt);
    if (from > pane.length) return;
    const fresh = from === pane.length ? text : null;
    if (fresh !== null) pane.answer.append(fresh);
    else pane.answer.textContent = pane.answer.textContent.slice(0, from) + text;
    pane.length = pane.answer.textContent.length;
    this.follow(pane);
  }

  follow(pane) {
    if (!pane.follow) return;
    pane.body.scrollTop = pane.body.scrollHeight;
    pane.top = pane.body.scrollTop;
  }

  write() {
    const { state } = this;
    if (!state || !this.due || document.hidden) return;
    this.due = false;
    this.picked();
    for (const [number, pane] of this.panes) {
      const request = state.requests[number];
      if (!request) continue;
      setText(pane.who, request.user || request.id);
      const { glyph, word } = stateOf(state, request);
      const cached = request.cached_tokens ? ` · ${count(request.cached_tokens)} cached` : "";
      setText(pane.state, `${glyph} ${request.reason && request.reason !== "stop" ? request.reason : word} ·${request.prompt_tokens ? ` ${count(request.prompt_tokens)} in${cached} ·` : ""} ${count(request.output_tokens)} out`);
      pane.node.dataset.state = request.state;
      pane.node.dataset.output = request.output_tokens;
      this.follow(pane); // panes that come and go change the others' heights
    }
  }

  end() {
    super.end();
    this.off?.();
  }
}
