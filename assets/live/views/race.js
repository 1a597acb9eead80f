// Lanes of a race on one clock, replayed from what each lane's run measured: how far it is, and its odometer.
import { element, heading, setText } from "./dom.js";
import { count, paintTokens, reducedMotion, themeOf } from "./draw.js";

const LONGEST_MS = 12000; // a race that took longer is shown faster, and says so

/** The last of `points` ([seconds, odometer, output tokens], in order of time) that is not after `t`; before all: zeros. */
export function at(points, t) {
  let low = 0, high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= t) low = middle + 1;
    else high = middle;
  }
  return low ? points[low - 1] : [0, 0, 0];
}

export class Race {
  constructor(root) {
    this.root = root;
    this.frame = 0;
    this.lanes = [];
    this.key = "";
  }

  theme(host) {
    paintTokens(this.root, themeOf(host));
  }

  update() {}

  options({ title, lanes = [], odometer = "", unit = "" }) {
    heading(this.root, title);
    const key = JSON.stringify([lanes, odometer]);
    if (key === this.key) return;
    this.key = key;
    this.unit = unit;
    this.end();
    this.root.querySelector(":scope > .race")?.remove();
    this.lanes = lanes.map((lane) => ({ ...lane, ...row(lane.name, odometer) }));
    this.seconds = Math.max(0, ...lanes.map((lane) => lane.points.at(-1)?.[0] ?? 0));
    this.clock = element("span", { class: "clock" });
    this.button = element("button", { type: "button" }, "Replay");
    this.button.addEventListener("click", () => this.replay());
    this.root.append(element("div", { class: "race" }, ...this.lanes.map((lane) => lane.row), element("footer", {}, this.button, this.clock)));
    this.replay();
  }

  replay() {
    cancelAnimationFrame(this.frame);
    const speed = Math.max(1, (this.seconds * 1000) / LONGEST_MS);
    const words = speed > 1.05 ? `, shown ${speed.toFixed(1)} × as fast` : "";
    if (reducedMotion()) return this.show(this.seconds, "");
    const begin = performance.now();
    const tick = (now) => {
      const t = Math.min(this.seconds, (Math.max(0, now - begin) / 1000) * speed);
      this.show(t, words);
      if (t < this.seconds) this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }

  show(t, words) {
    setText(this.clock, `${t.toFixed(2)} s of ${this.seconds.toFixed(2)} s${words}`);
    for (const lane of this.lanes) {
      const [, odometer, output] = at(lane.points, t), over = t >= (lane.points.at(-1)?.[0] ?? 0);
      lane.bar.style.width = `${(100 * output) / Math.max(1, lane.total)}%`;
      lane.row.dataset.over = over;
      setText(lane.value, this.unit.startsWith("%") ? `${odometer.toFixed(1)} %` : count(odometer));
      setText(lane.said, `${count(output)} of ${count(lane.total)} output tokens${over ? `, in ${lane.points.at(-1)?.[0].toFixed(2) ?? 0} s` : ""}`);
    }
  }

  end() {
    cancelAnimationFrame(this.frame);
  }
}

function row(name, odometer) {
  const bar = element("i"), value = element("strong"), said = element("span", { class: "said" });
  return {
    bar, value, said,
    row: element(
      "div", { class: "lane", role: "group", "aria-label": `lane ${name}` },
      element("span", { class: "name" }, name), element("div", { class: "track" }, bar), said,
      element("span", { class: "odometer" }, value, element("small", {}, odometer)),
    ),
  };
}
