// What devices report: finding a sensor's values in the folded state. Pure; a missing reading stays missing, with its reason.

/** Index of the device that a page is about: the one that was picked, else the one that the engine uses, else the first GPU. */
export function chosenGpu(state, picked = "") {
  const devices = state.devices?.devices ?? [];
  const find = (test) => devices.findIndex((d) => d.kind !== "host" && test(d));
  for (const test of [(d) => d.uuid === picked, (d) => d.used, () => true]) {
    const found = find(test);
    if (found >= 0) return found;
  }
  return -1;
}

export const hostIndex = (state) => (state.devices?.devices ?? []).findIndex((d) => d.kind === "host");

/** [t, value] of one sensor, oldest first, from `from` on. */
export function values(state, device, sensor, from = -Infinity) {
  const found = [];
  for (const [t, , of, all] of state.samples ?? []) {
    if (of === device && t >= from && all[sensor] !== null && all[sensor] !== undefined) found.push([t, all[sensor]]);
  }
  return found;
}

/** {value, t, span} of the newest reading of a sensor; null when there is none. */
export function newest(state, device, sensor) {
  const about = state.devices.devices[device]?.sensors[sensor];
  const samples = state.samples ?? [];
  for (let i = samples.length - 1; i >= 0; i--) {
    const [t, t0, of, all, spans] = samples[i];
    if (of !== device || all[sensor] === null || all[sensor] === undefined) continue;
    return { value: all[sensor], t, span: spans?.[sensor] ?? about?.span_s ?? t - t0 };
  }
  return null;
}

export function sensorOf(state, device, name) {
  return (state.devices?.devices?.[device]?.sensors ?? []).findIndex((s) => s.name === name);
}

/** The words beside a value: as the engine named them, with how long the value speaks for put in. */
export function labelOf(sensor, reading) {
  const text = sensor.label || (sensor.note ? `not available: ${sensor.note}` : "not available");
  return text.replace(/\{ms[^}]*\}/, reading?.span ? Math.round(reading.span * 1000) : "?");
}

export function ageWords(seconds) {
  return seconds < 1 ? "now" : seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

// The bits of NVML's clocks-event-reasons mask, in the words of backend/telemetry/readings.py.
const CLOCK_REASONS = [
  [0x1, "idle"], [0x2, "clocks set by an application"], [0x4, "power cap"], [0x8, "hardware slowdown"], [0x10, "synchronised with other GPUs"],
  [0x20, "temperature (driver)"], [0x40, "temperature (hardware)"], [0x80, "power brake"], [0x100, "display clocks"],
];

export function clockReasons(mask) {
  const words = CLOCK_REASONS.filter(([bit]) => mask & bit).map(([, word]) => word);
  const left = mask & ~CLOCK_REASONS.reduce((all, [bit]) => all | bit, 0);
  return left ? [...words, `reason 0x${left.toString(16)}`] : words;
}

/** What the engine computed when: [[from, to, "prefill" | "decode"]…] since `from`, neighbours of one kind joined. */
export function phases(series, from) {
  const found = [];
  for (const row of series) {
    const [t, step_s, prefill] = row;
    if (t < from) continue;
    const kind = prefill > 0 ? "prefill" : "decode", begin = t - step_s;
    const last = found[found.length - 1];
    if (last && last[2] === kind && begin - last[1] < 0.05) last[1] = t;
    else found.push([begin, t, kind]);
  }
  return found;
}
