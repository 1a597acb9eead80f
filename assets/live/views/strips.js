// Sensors over time, one panel each: its own axis with its unit, the words for where the value is from, its age, and shading
// by what the engine did then. A sensor without a value says why, and has no number and no axis.
import { bytes, figures, fit, paintTokens, themeOf } from "./draw.js";
import { rate } from "./axes.js";
import { element, heading, setText } from "./dom.js";
import { WINDOW_S } from "./clock.js";
import { picked } from "./device_panel.js";
import { ageWords, chosenGpu, clockReasons, hostIndex, labelOf, newest, phases, values } from "./sensors.js";

const REFRESH_MS = 250;
const HEIGHT = 84;
const LEFT = 58;
const STALE_S = 10;

const TITLES = {
  dram_bandwidth: "DRAM bandwidth", memory_busy: "Memory busy", gpu_busy: "GPU busy", power: "Power", power_limit: "Power limit",
  sm_clock: "SM clock", memory_clock: "Memory clock", clock_reasons: "Why the clocks are low", temperature: "Temperature",
  memory_temperature: "Memory temperature", memory_used: "Memory used", pcie_tx: "PCIe, sent by the GPU", pcie_rx: "PCIe, received by the GPU",
  nvlink_tx: "NVLink, sent", nvlink_rx: "NVLink, received", cpu_busy: "CPU busy", load_average: "Load average", memory_reserved: "Memory reserved by the driver", memory_available: "Memory available",
  process_memory: "Memory of the engine's process", process_cpu: "CPU of the engine's process", sm_active: "SMs active",
  sm_occupancy: "SM occupancy", tensor_active: "Tensor pipes active", energy: "Energy counter",
};

export const titleOf = (name) => TITLES[name] ?? name.replaceAll("_", " ").replace(/^./, (c) => c.toUpperCase());

/** A value with its unit, in the prefix that is spoken. */
export function valueWords(value, unit, units = "GiB") {
  if (unit === "B") return bytes(value, units);
  if (unit === "B/s") return rate(value, "B/s");
  if (unit === "J") return value >= 1e6 ? `${figures(value / 1e6)} MJ` : value >= 1e3 ? `${figures(value / 1e3)} kJ` : `${figures(value)} J`;
  if (unit === "%" || unit === "MHz" || unit === "°C") return `${Math.round(value * 10) / 10} ${unit}`;
  return unit && unit !== "1" ? `${figures(value)} ${unit}` : figures(value);
}

/** A top for an axis: 100 for percent, else a round number above all values. */
export function topOf(all, unit, least = 0) {
  if (unit === "%") return 100;
  const most = Math.max(least, ...all.map(([, v]) => v));
  if (!(most > 0)) return 1;
  const base = unit === "B" ? 2 ** Math.floor(Math.log2(most)) : 10 ** Math.floor(Math.log10(most));
  for (const lead of [1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (lead * base >= most * 1.02) return lead * base;
  return most * 1.1;
}

class Strips {
  constructor(root, live, find) {
    this.root = root;
    this.live = live;
    this.find = find;
    this.grid = element("div", { class: "strips" });
    root.append(this.grid);
    this.panels = [];
    this.made = null; // what the panels were built for
    this.heard = performance.now();
    this.question = { telemetry: [] }; // panels that are open and cost something
    this.ends = [live.lease(this.question)];
    this.timer = setInterval(() => this.draw(), REFRESH_MS);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.grid);
    picked.addEventListener("change", (this.onpick = () => this.draw()));
  }

  options({ title, units, empty }) {
    heading(this.root, title);
    this.units = units ?? "GiB";
    this.empty = empty ?? "";
    this.made = null;
    this.draw();
  }

  theme(host) {
    this.colors = themeOf(host);
    paintTokens(this.root, this.colors);
    this.draw();
  }

  update(state) {
    if (state.t !== this.t) this.heard = performance.now();
    this.t = state.t;
    this.state = state;
  }

  draw() {
    const { state, colors } = this;
    if (!state?.devices || !colors || document.hidden) return;
    const index = this.find(state);
    const device = state.devices.devices[index];
    const key = device ? `${device.uuid} ${device.sensors.map((s) => `${s.name}:${s.note}`).join()}` : "";
    if (key !== this.made) this.build(device, key);
    if (!device) return;
    const now = state.t + (performance.now() - this.heard) / 1000;
    const shade = phases(state.series, now - WINDOW_S);
    for (const panel of this.panels) this.panel(panel, index, now, shade);
    this.grid.dataset.step = state.step;
    this.grid.dataset.samples = (state.samples ?? []).length;
  }

  build(device, key) {
    this.made = key;
    this.panels = [];
    const nodes = [];
    // Those that can be read first, then those that cannot: a page should not begin with what it lacks.
    const order = (device?.sensors ?? []).map((sensor, i) => [sensor, i]).sort((a, b) => Boolean(a[0].note) - Boolean(b[0].note));
    for (const [sensor, i] of order) {
      const value = element("span", { class: "now" });
      const label = element("div", { class: "from" });
      const canvas = element("canvas", { role: "img", "aria-label": titleOf(sensor.name) });
      const words = element("div", { class: "words", hidden: true });
      const node = element("div", { class: "strip", "data-sensor": sensor.name, "aria-label": `${titleOf(sensor.name)}, ${device.name}`, role: "group" },
        element("header", {}, element("span", { class: "name" }, titleOf(sensor.name)), value));
      if (this.closed(sensor)) {
        const button = element("button", { type: "button", class: "open" }, "Read it");
        button.addEventListener("click", () => this.open("pcie"));
        node.append(button);
        node.classList.add("missing");
      } else if (sensor.note) node.classList.add("missing");
      else if (sensor.name === "energy") node.append(element("div", { class: "words" }, "A counter: its rise over a window gives the J/token of the table."));
      else node.append(element("div", { class: "plot" }, canvas), words);
      node.append(label);
      nodes.push(node);
      this.panels.push({ sensor, i, node, value, label, canvas, words });
    }
    this.grid.replaceChildren(...(device ? nodes : [element("p", { class: "empty" }, this.empty)]));
  }

  /** PCIe is read without waiting where there are GPM counters; elsewhere only while somebody wants it, says the engine. */
  closed(sensor) {
    return /panel is open/.test(sensor.note) && !this.question.telemetry.includes("pcie");
  }

  open(panel) {
    this.question.telemetry.push(panel);
    this.live.ask(this.question);
    this.made = null; // drawn anew with its plot
    this.draw();
  }

  panel({ sensor, i, value, label, canvas, words, node }, index, now, shade) {
    const { state } = this;
    const device = state.devices.devices[index];
    const reading = sensor.note ? null : newest(state, index, i);
    const age = reading ? now - reading.t : 0;
    const old = age > Math.max(STALE_S, 4 * sensor.period_s);
    setText(value, reading ? this.spoken(sensor, reading.value) : sensor.note ? "–" : "waiting");
    node.classList.toggle("old", old);
    const lost = device.state && device.state !== "ok" ? ` · device ${device.state}` : "";
    setText(label, `${labelOf(sensor, reading)}${reading ? ` · ${ageWords(age)}` : ""}${lost}`);
    if (sensor.note || !canvas.parentElement) return;
    const all = values(state, index, i, now - WINDOW_S - 5);
    if (sensor.name === "clock_reasons") {
      canvas.parentElement.hidden = true;
      words.hidden = false;
      setText(words, reasonsOver(all));
      return;
    }
    this.plot(canvas, sensor, all, now, shade);
    canvas.setAttribute("aria-label", `${titleOf(sensor.name)}: ${value.textContent}, ${label.textContent}`);
  }

  spoken(sensor, value) {
    if (sensor.name === "clock_reasons") return clockReasons(value)[0] ?? "at full clock";
    return valueWords(value, sensor.unit, this.units);
  }

  plot(canvas, sensor, all, now, shade) {
    const { colors } = this;
    const width = Math.floor(canvas.parentElement.clientWidth);
    if (!width) return;
    const unit = fit(canvas, width, HEIGHT);
    const c = canvas.getContext("2d");
    c.setTransform(unit, 0, 0, unit, 0, 0);
    c.clearRect(0, 0, width, HEIGHT);
    const bottom = HEIGHT - 4, top = 8, right = width - 2;
    const x = (t) => LEFT + (right - LEFT) * (1 - (now - t) / WINDOW_S);
    const most = topOf(all, sensor.unit);
    const y = (v) => bottom - ((bottom - top) * v) / most;
    c.globalAlpha = colors.dark ? 0.3 : 0.18;
    for (const [from, to, kind] of shade) {
      const a = Math.max(LEFT, x(from)), b = x(to);
      if (b <= LEFT) continue;
      c.fillStyle = kind === "prefill" ? colors.prefill : colors.decode;
      c.fillRect(a, top, Math.max(0.6, b - a), bottom - top);
    }
    c.globalAlpha = 1;
    c.font = `11px ${colors.font}`;
    c.textAlign = "right";
    c.textBaseline = "middle";
    c.strokeStyle = colors.line;
    c.lineWidth = 1;
    for (const share of [0, 1]) {
      const at = Math.round(y(most * share)) + 0.5;
      c.beginPath();
      c.moveTo(LEFT, at);
      c.lineTo(right, at);
      c.stroke();
      c.fillStyle = colors.muted;
      c.fillText(axisWords(most * share, sensor.unit, this.units), LEFT - 4, share ? at + 3 : at - 4);
    }
    if (!all.length) return;
    c.beginPath();
    let before = null;
    for (const [t, v] of all) {
      const px = Math.max(LEFT, x(t));
      if (before === null || t - before > Math.max(3, 3 * sensor.period_s)) c.moveTo(px, y(v)); // a hole in the readings stays one
      else c.lineTo(px, y(v));
      before = t;
    }
    c.strokeStyle = colors.text;
    c.lineWidth = 1.6;
    c.stroke();
    c.fillStyle = colors.text;
    c.beginPath();
    c.arc(Math.max(LEFT, x(before)), y(all[all.length - 1][1]), 2.4, 0, 7);
    c.fill();
  }

  end() {
    clearInterval(this.timer);
    this.observer.disconnect();
    picked.removeEventListener("change", this.onpick);
    for (const end of this.ends) end();
  }
}

function axisWords(value, unit, units) {
  if (!value) return "0";
  return valueWords(value, unit, units).replace(/\.0+(?= )/, "").replace(/(\.\d)0(?= )/, "$1");
}

/** "power cap 80 % of the time, idle 20 %" over the readings of the window. */
export function reasonsOver(all) {
  if (!all.length) return "waiting for a reading";
  const shares = new Map();
  for (const [, mask] of all) for (const word of clockReasons(mask).length ? clockReasons(mask) : ["nothing holds them back"]) shares.set(word, (shares.get(word) ?? 0) + 1);
  return [...shares].sort((a, b) => b[1] - a[1]).map(([word, n]) => `${word}: ${Math.round((100 * n) / all.length)} % of the readings`).join("; ");
}

export class GpuStrips extends Strips {
  constructor(root, live) {
    super(root, live, (state) => chosenGpu(state, picked.uuid));
  }
}

export class HostStrips extends Strips {
  constructor(root, live) {
    super(root, live, hostIndex);
  }
}
