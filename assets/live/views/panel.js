// A picture made of DOM instead of canvas that follows the selection: its frame, its colours, and a timer, because words
// that change with every step cannot be read. A panel sets `box` and has write(); coloured() and picked() if it cares.
import { paintTokens, themeOf } from "./draw.js";
import { heading } from "./dom.js";
import { selection } from "./select.js";

export class Panel {
  constructor(root, live, refresh_ms) {
    this.root = root;
    this.live = live;
    this.onpick = () => this.picked();
    selection.addEventListener("change", this.onpick);
    this.timer = setInterval(() => this.write(), refresh_ms);
  }

  options({ title, height }) {
    heading(this.root, title);
    if (height) this.box.style.height = `${height}px`;
  }

  theme(host) {
    this.colors = themeOf(host);
    paintTokens(this.root, this.colors);
    this.coloured();
  }

  update(state) {
    this.state = state;
    this.due = true;
  }

  coloured() {}

  picked() {}

  end() {
    clearInterval(this.timer);
    selection.removeEventListener("change", this.onpick);
  }
}
