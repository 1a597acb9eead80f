// What sensors say of the last seconds, phase by phase: bandwidth by the counters against the computed one, energy of a
// token, time held down by power. What is missing says why.
import { figures, paintTokens, percent, themeOf } from "./draw.js";
import { rate } from "./axes.js";
import { element, heading, setText } from "./dom.js";

const REFRESH_MS = 500;
const COLUMNS = ["phase", "computed", "measured", "measured ÷ computed", "energy", "held down by power"];
const NAMES = { prefill: "▲ prefill", decode: "● decode", mixed: "◆ mixed" };

/** [text, why or source] of a `Value` of backend/telemetry/join.py. */
export function cell(value, words) {
  if (typeof value?.value === "number") return [words(value.value, value.error), value.label];
  return ["–", `not available: ${value?.reason || "nothing was read yet"}`];
}

/** Rows of the table: [[phase], [text, note]…]. */
export function rows(window) {
  return Object.entries(window?.phases ?? {}).map(([phase, p]) => [
    [NAMES[phase] ?? phase, `${p.steps} steps, ${figures(p.seconds)} s`],
    [rate(p.computed, "B/s"), "computed: bytes the model must move / step time"],
    cell(p.measured, (v) => rate(v, "B/s")),
    cell(p.ratio, (v) => `${figures(v)} ×`),
    cell(p.joules_per_token, (v, error) => `${figures(v)} J/token${error ? ` ± ${figures(error)}` : ""}`),
    cell(p.power_capped, percent),
  ]);
}

export class Windows {
  constructor(root, live) {
    this.root = root;
    this.live = live;
    this.body = element("tbody");
    this.none = element("p", { class: "empty" }, "No step in the last seconds.");
    const head = element("tr", {}, ...COLUMNS.map((name) => element("th", { scope: "col" }, name)));
    this.table = element("table", { class: "windows" }, element("thead", {}, head), this.body);
    root.append(element("div", { class: "windowsbox" }, this.table, this.none));
    this.ends = [live.lease({ phases: true }), live.lease({ telemetry: [] })];
    this.timer = setInterval(() => this.write(), REFRESH_MS);
  }

  options({ title }) {
    heading(this.root, title);
  }

  theme(host) {
    paintTokens(this.root, themeOf(host));
  }

  update() {}

  write() {
    if (document.hidden) return;
    const found = rows(this.live.phases?.window);
    this.table.hidden = !found.length;
    this.none.hidden = Boolean(found.length);
    this.root.dataset.rows = found.length;
    while (this.body.rows.length > found.length) this.body.lastChild.remove();
    found.forEach((cells, i) => {
      const row = this.body.rows[i] ?? this.body.appendChild(element("tr", {}, ...COLUMNS.map(() => element("td", {}, element("div"), element("small")))));
      cells.forEach(([text, note], k) => {
        const [big, small] = row.cells[k].children;
        setText(big, text);
        setText(small, note);
      });
    });
  }

  end() {
    clearInterval(this.timer);
    for (const end of this.ends) end();
  }
}
