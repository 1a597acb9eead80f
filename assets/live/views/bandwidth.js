// Bandwidth of the device's memory on one axis: computed from the bytes that steps must move, measured by the device's own
// counters where it has them, and the ceiling that was measured with nothing else running.
import { Picture, percent, niceCeil } from "./draw.js";
import { rate } from "./axes.js";
import { element, setText } from "./dom.js";
import { LEFT, RIGHT, WINDOW_S, timeAxis } from "./clock.js";
import { picked } from "./device_panel.js";
import { ownRoof } from "./roofs.js";
import { chosenGpu, hostIndex, sensorOf, values } from "./sensors.js";

const HEIGHT = 220;
const TOP = 14;
const AXIS = 20;
const HOLE_S = 1.2; // without a step between two points: the engine was idle

/** [t, bytes/s] of the message's points, all phases, oldest first: (FLOP/s) ÷ (FLOP/byte). */
export const computed = (message) => (message?.trail ?? []).map(([t, phase, x, y]) => [t, y / x, phase]);

/** [t, bytes/s] by the counters of the GPU that computes, and why there are none: {points, label, reason}. */
export function measured(state, from) {
  const onGpu = state.device?.kind === "cuda" || state.devices.devices.some((d) => d.used && d.kind !== "host");
  const index = onGpu ? chosenGpu(state, picked.uuid) : hostIndex(state); // where the engine computes
  if (index < 0) return { points: [], label: "", reason: state.devices.state ? "nothing here tells it" : "waiting for what the engine can read" };
  const device = state.devices.devices[index], at = sensorOf(state, index, "dram_bandwidth");
  const sensor = device.sensors[at];
  if (!sensor) return { points: [], label: "", reason: "this device reports no DRAM counters" };
  if (sensor.note) return { points: [], label: "", reason: sensor.note };
  if (device.kind !== "host" && !device.used) return { points: [], label: "", reason: "the engine does not compute on the chosen device" };
  const scale = sensor.unit === "%" ? device.peak_bandwidth_bytes_per_s / 100 : 1;
  if (!scale) return { points: [], label: "", reason: "the peak that its percentage refers to is not known" };
  return { points: values(state, index, at, from).map(([t, v]) => [t, v * scale]), label: sensor.label, reason: "" };
}

export class Bandwidth extends Picture {
  constructor(root, live) {
    super(root, live, { height: HEIGHT, fps: 4, name: "Memory bandwidth" });
    this.ends = [live.lease({ phases: true }), live.lease({ telemetry: [] }), live.on("phases", () => this.kick())];
  }

  build() {
    this.words = element("p", { class: "rule" });
    this.root.append(element("div", {}, this.canvas), this.words);
  }

  paint(width) {
    const { context: c, colors, state } = this;
    this.clear(width);
    const now = state.t, message = this.live.phases;
    const left = LEFT - 40, bottom = HEIGHT - AXIS;
    const plot = { now, left, width: width - left - RIGHT - 20 };
    const mine = computed(message).filter(([t]) => t >= now - WINDOW_S), theirs = measured(state, now - WINDOW_S), roof = ownRoof(message);
    const most = Math.max(1, roof?.high.bandwidth ?? 0, ...mine.map(([, v]) => v), ...theirs.points.map(([, v]) => v));
    const top = niceCeil(most * 1.05);
    const x = (t) => plot.left + plot.width * Math.max(0, 1 - (now - t) / WINDOW_S);
    const y = (v) => bottom - ((bottom - TOP) * v) / top;
    timeAxis(c, colors, plot, TOP, bottom);
    c.textAlign = "right";
    c.strokeStyle = colors.line;
    for (const share of [0, 0.5, 1]) {
      c.beginPath();
      c.moveTo(plot.left, Math.round(y(top * share)) + 0.5);
      c.lineTo(plot.left + plot.width, Math.round(y(top * share)) + 0.5);
      c.stroke();
      c.fillStyle = colors.muted;
      c.fillText(rate(top * share, "B/s").replace(/\.0+ /, " "), plot.left - 8, y(top * share));
    }
    c.textAlign = "left";
    if (roof) this.line([[now - WINDOW_S, roof.bandwidth], [now, roof.bandwidth]], x, y, colors.text, [6, 4], Infinity);
    this.line(theirs.points, x, y, colors.cachedText, [], HOLE_S);
    for (const phase of ["prefill", "decode", "mixed"]) this.dots(mine.filter((p) => p[2] === phase), x, y, phase);
    this.names(width, roof, mine, theirs, y);
    this.say_(roof, mine, theirs);
  }

  line(points, x, y, ink, dash, hole) {
    const { context: c } = this;
    c.beginPath();
    let before = null;
    for (const [t, v] of points) {
      c[before === null || t - before > hole ? "moveTo" : "lineTo"](x(t), y(v));
      before = t;
    }
    c.strokeStyle = ink;
    c.lineWidth = 1.75;
    c.setLineDash(dash);
    c.stroke();
    c.setLineDash([]);
  }

  dots(points, x, y, phase) {
    const { context: c, colors } = this;
    const ink = { prefill: colors.prefill, decode: colors.decode }[phase] ?? colors.muted;
    this.line(points, x, y, ink, [], HOLE_S);
    c.fillStyle = ink;
    for (const [t, v] of points) {
      c.beginPath();
      if (phase === "prefill") {
        c.moveTo(x(t), y(v) - 4);
        c.lineTo(x(t) + 4, y(v) + 3);
        c.lineTo(x(t) - 4, y(v) + 3);
      } else c.arc(x(t), y(v), phase === "decode" ? 2.6 : 2, 0, 7);
      c.fill();
    }
  }

  names(width, roof, mine, theirs, y) {
    const { context: c, colors } = this;
    const x = width - RIGHT - 10;
    const latest = (points) => (points.length ? points[points.length - 1][1] : null);
    const lines = [
      roof && [`┅ ceiling, ${roof.evidence}`, rate(roof.bandwidth, "B/s"), y(roof.bandwidth), colors.text],
      mine.length && ["● ▲ computed", rate(latest(mine), "B/s"), y(latest(mine)), colors.decodeText],
      theirs.points.length && ["━ measured", rate(latest(theirs.points), "B/s"), y(latest(theirs.points)), colors.cachedText],
    ].filter(Boolean);
    let free = TOP + 8;
    for (const [i, [word, value, at, ink]] of lines.sort((a, b) => a[2] - b[2]).entries()) {
      const top = Math.max(free, Math.min(at, HEIGHT - AXIS - 12 - 34 * (lines.length - 1 - i))); // room for those below
      c.fillStyle = ink;
      c.font = `12px ${colors.font}`;
      c.fillText(word, x, top - 7);
      c.font = `600 13px ${colors.font}`;
      c.fillText(value, x, top + 8);
      free = top + 34;
    }
  }

  say_(roof, mine, theirs) {
    const parts = ["Computed: bytes the model must move ÷ step time."];
    if (theirs.reason) parts.push(`Measured: not available: ${theirs.reason}.`);
    else parts.push(`${theirs.label.replace(/^m/, "M")}, as a share of the peak.`);
    const decode = mine.filter((p) => p[2] === "decode");
    if (roof && decode.length) parts.push(`Decode runs at ${percent(decode[decode.length - 1][1] / roof.bandwidth)} of the ceiling (${roof.evidence}).`);
    setText(this.words, parts.join(" "));
    this.spoken = parts.join(" ");
  }

  report() {
    this.canvas.dataset.step = this.state.step;
    this.canvas.dataset.computed = computed(this.live.phases).length;
    const theirs = measured(this.state, this.state.t - WINDOW_S);
    this.canvas.dataset.measured = theirs.points.length;
    this.canvas.dataset.reason = theirs.reason;
    this.say(() => this.spoken ?? "");
  }

  end() {
    super.end();
    for (const end of this.ends) end();
  }
}
