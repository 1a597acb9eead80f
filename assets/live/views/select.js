// What a person looks at: shared by every view of a page (each view is a module of its own, so it lives on globalThis).

const KEY = "__kvscope_selection_1";

class Selection extends EventTarget {
  constructor() {
    super();
    this.picked = []; // request numbers that a person chose, newest last, at most four
    this.shown = []; // what the text view shows: the picked ones, or those it chose itself
    this.own = new Set(); // API ids of this tab's prompts
  }

  pick(number, { add = false } = {}) {
    if (this.picked.includes(number)) this.picked = this.picked.filter((n) => n !== number);
    else this.picked = add ? [...this.picked, number].slice(-4) : [number];
    this.changed();
  }

  /** A shared block has many holders: each call goes on to the next, and is told which; without any, nothing is chosen. */
  cycle(holders) {
    if (!holders.length) return void this.clear();
    const next = holders[(holders.indexOf(this.focus) + 1) % holders.length];
    if (next !== this.focus) this.pick(next);
    return next;
  }

  clear() {
    if (!this.picked.length) return;
    this.picked = [];
    this.changed();
  }

  show(numbers) {
    if (numbers.length === this.shown.length && numbers.every((n, i) => n === this.shown[i])) return;
    this.shown = numbers;
    this.changed();
  }

  /** The one request that block-level pictures follow. */
  get focus() {
    return this.picked.length ? this.picked[this.picked.length - 1] : null;
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }
}

export const selection = (globalThis[KEY] ??= new Selection());
