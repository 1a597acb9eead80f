// The big numbers of the phases page and of the hardware page.
import { bytes, figures, percent, seconds } from "./draw.js";
import { rate } from "./axes.js";
import { picked } from "./device_panel.js";
import { MISSING, NONE, Numbers } from "./numbers.js";
import { ownRoof, roofWords } from "./roofs.js";
import { SCRAPED_PHASES } from "./scraped.js";
import { chosenGpu, hostIndex, labelOf, newest, sensorOf } from "./sensors.js";
import { valueWords } from "./strips.js";

const moved = (s) => s.weight_bytes + s.kv_read_bytes + s.kv_write_bytes + s.activation_bytes;

/** Seconds a token of prefill and of decode, and how many times as much decode is; null until both were seen. */
export function perToken(message) {
  const { prefill, decode } = message?.phases ?? {};
  if (!prefill?.tokens || !decode?.tokens) return null;
  const p = prefill.seconds / prefill.tokens, d = decode.seconds / decode.tokens;
  return { prefill: p, decode: d, ratio: d / p, batch: decode.batch };
}

function ceiling(message, phase, share, what) {
  const s = message?.phases?.[phase];
  if (!s) return [NONE, phase === "prefill" ? "no step of prefill alone yet" : "nothing was decoded yet"];
  const roof = ownRoof(message);
  if (!roof || !s.verdict) return [MISSING, roofWords(message?.roofs)];
  const speeds = what === "bandwidth" ? `${rate(moved(s) / s.seconds, "B/s")} of ${rate(roof.bandwidth, "B/s")}` : `${rate(s.flops / s.seconds, "FLOP/s")} of ${rate(roof.flops, "FLOP/s")}`;
  return [percent(s.verdict[share]), `${s.verdict.regime}-bound · ${speeds}`];
}

/** A sensor of the chosen GPU or of the host as a card; the reason where there is no value. */
function reading(state, index, name, units) {
  if (!state.devices?.state) return [MISSING, "waiting for what the engine can read"];
  if (index < 0) return [MISSING, state.devices.message || "no GPU can be read here"];
  const at = sensorOf(state, index, name);
  const sensor = state.devices.devices[index].sensors[at];
  if (!sensor || sensor.note) return [MISSING, sensor?.note || "this device does not tell it"];
  const found = newest(state, index, at);
  return found ? [valueWords(found.value, sensor.unit, units), labelOf(sensor, found)] : [MISSING, "waiting for the first reading"];
}

const gpu = (state) => chosenGpu(state, picked.uuid);

const CARDS = {
  mbu: [
    "Decode, of the bandwidth ceiling",
    (state, now, units, live) => ceiling(live.phases, "decode", "mbu", "bandwidth"),
    "Bytes that the newest decode steps must move (weights, KV, activations; counted) ÷ their whole time (measured) ÷ the read bandwidth of this device (measured; of the data sheet where the device is modelled).",
  ],
  mfu: [
    "Prefill, of the compute ceiling",
    (state, now, units, live) => ceiling(live.phases, "prefill", "mfu", "compute"),
    "FLOPs of the newest steps that only prefill (counted) ÷ their whole time (measured) ÷ the matrix-product rate of this device (measured; of the data sheet where the device is modelled).",
  ],
  ridge: [
    "Ridge of this device",
    (state, now, units, live) => {
      const roof = ownRoof(live.phases);
      return roof ? [`${figures(roof.ridge)} FLOP/byte`, `${rate(roof.flops, "FLOP/s")} ÷ ${rate(roof.bandwidth, "B/s")}`] : [MISSING, roofWords(live.phases?.roofs)];
    },
    "Matrix-product rate ÷ read bandwidth, both measured on this device (of the data sheet where it is modelled). Left of it a step waits for memory, right of it for arithmetic.",
  ],
  ratio: [
    "A decoded token costs",
    (state, now, units, live) => {
      const cost = perToken(live.phases);
      if (!cost) return [NONE, "needs a prefill and a decode"];
      return [`${figures(cost.ratio)} ×`, `${seconds(cost.decode)} at batch ${figures(cost.batch)} · prefill ${seconds(cost.prefill)}`];
    },
    "Time a token in decode steps ÷ time a token in prefill steps, each over the newest steps of that phase. Batching decode lowers it.",
  ],
  computed: [
    "Decode bandwidth, computed",
    (state, now, units, live) => {
      const s = live.phases?.phases?.decode, roof = ownRoof(live.phases);
      if (!s) return [NONE, "nothing was decoded yet"];
      const speed = moved(s) / s.seconds;
      return [rate(speed, "B/s"), roof ? `${percent(speed / roof.bandwidth)} of ${rate(roof.bandwidth, "B/s")}, ${roof.evidence}` : roofWords(live.phases?.roofs)];
    },
    "Bytes that the newest decode steps must move ÷ their time. Computed, not read from the device: see the chart for counters.",
  ],
  energy: [
    "Energy of a decoded token",
    (state, now, units, live) => {
      const found = live.phases?.window?.phases?.decode?.joules_per_token;
      if (typeof found?.value === "number") return [`${figures(found.value)} J/token`, found.label];
      return [MISSING, found?.reason || "nothing was decoded in the last seconds"];
    },
    "Rise of the device's energy counter over decode ÷ tokens decoded. Refused when the window is too short for the counter.",
  ],
  power: ["Power", (state, now, units) => reading(state, gpu(state), "power", units), "As the device reports it."],
  load: ["Load of this machine", (state, now, units) => reading(state, hostIndex(state), "load_average", units), "Tasks that run or wait to run, averaged over the last minute by the operating system."],
  memory: [
    "Memory in use",
    (state, now, units) => {
      const index = gpu(state);
      const [big, small] = reading(state, index, "memory_used", units);
      const total = state.devices.devices[index]?.memory_bytes;
      return big === MISSING || !total ? [big, small] : [big, `of ${bytes(total, units)} · ${small}`];
    },
    "As the driver reports it.",
  ],
  host_memory: ["Memory of this machine", (state, now, units) => reading(state, hostIndex(state), "memory_available", units), "As the operating system reports it."],
};

export class PhaseNumbers extends Numbers {
  constructor(root, live) {
    super(root, live);
    this.ends = [live.lease({ phases: true })];
  }

  catalogue() {
    return CARDS;
  }

  scraped() {
    return SCRAPED_PHASES;
  }

  options(options) {
    super.options(options);
    if (options.telemetry && this.ends.length === 1) this.ends.push(this.live.lease({ telemetry: [] }));
  }

  end() {
    super.end();
    for (const end of this.ends) end();
  }
}
