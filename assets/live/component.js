// The component that Streamlit mounts, once for each picture:
//     data {view, url, options}   a picture on the WebSocket at `url`; without a url, one that is fed by reruns
//     data bytes                  a frame for those; this mount draws nothing. What the pictures ask comes back as the
//                                 state "ask": {watch: [...], block: n, table: n, snapshot: times asked}, each as last asked
// The state "transport" becomes "rerun" when no WebSocket can be opened here. The trigger "pulse" asks for a rerun. The state
// "chosen" is what a person clicked in a picture that lets one choose.
//
// Streamlit calls the default export again on every change of data or theme, so each call must be harmless; and it may run
// the cleanup of a call that was overtaken while the element stays mounted, so only the newest call may tear down.
import { RERUN, live } from "./link.js";
import { Bandwidth } from "./views/bandwidth.js";
import { Blocks } from "./views/blocks.js";
import { BytesByBatch, BytesByContext } from "./views/bytes.js";
import { Devices } from "./views/devices.js";
import { BlockTable } from "./views/table.js";
import { Fleet } from "./views/fleet.js";
import { Gantt } from "./views/gantt.js";
import { Numbers } from "./views/numbers.js";
import { Parts } from "./views/parts.js";
import { PhaseNumbers } from "./views/phase_numbers.js";
import { Processes } from "./views/processes.js";
import { Pulse } from "./views/pulse.js";
import { Race } from "./views/race.js";
import { Requests } from "./views/requests.js";
import { Roofline } from "./views/roofline.js";
import { Scores } from "./views/scores.js";
import { Split } from "./views/split.js";
import { Strip } from "./views/strip.js";
import { GpuStrips, HostStrips } from "./views/strips.js";
import { Text } from "./views/text.js";
import { TokensPerStep } from "./views/tokens.js";
import { PrefixTree } from "./views/tree.js";
import { Usage } from "./views/usage.js";
import { Windows } from "./views/windows.js";

export const VIEWS = {
  blocks: Blocks, gantt: Gantt, numbers: Numbers, requests: Requests, split: Split, strip: Strip, table: BlockTable, text: Text,
  tokens: TokensPerStep, tree: PrefixTree, usage: Usage,
  bandwidth: Bandwidth, bytes_by_batch: BytesByBatch, bytes_by_context: BytesByContext, devices: Devices, gpu_strips: GpuStrips,
  host_strips: HostStrips, parts: Parts, phase_numbers: PhaseNumbers, processes: Processes, pulse: Pulse, roofline: Roofline, scores: Scores,
  fleet: Fleet, race: Race, windows: Windows,
};

const ASK_MS = 100; // questions of this time go into one rerun
const MOUNTED = new WeakMap(); // parentElement -> Mount or Feeder

export default function ({ data, parentElement, setStateValue, setTriggerValue }) {
  const kind = data instanceof Uint8Array ? Feeder : Mount;
  let mounted = MOUNTED.get(parentElement);
  if (!(mounted instanceof kind)) {
    mounted?.end();
    MOUNTED.set(parentElement, (mounted = new kind(parentElement)));
  }
  const generation = ++mounted.generation;
  mounted.set(data, setStateValue, setTriggerValue);
  return () =>
    setTimeout(() => {
      if (mounted.generation !== generation || MOUNTED.get(parentElement) !== mounted) return;
      MOUNTED.delete(parentElement);
      mounted.end();
    });
}

/** One picture and the live that it is on. */
class Mount {
  constructor(parent) {
    this.generation = 0;
    this.parent = parent;
    this.root = parent.querySelector(".kv") ?? parent;
    this.view = null;
    this.what = "";
  }

  set(data, setStateValue, setTriggerValue) {
    const { view = "", url = RERUN, options = {} } = data ?? {};
    this.setStateValue = setStateValue;
    if (this.what !== `${view} ${url}`) {
      this.end();
      this.what = `${view} ${url}`;
      this.begin(view, url);
    }
    if (!this.view) return;
    this.view.theme(this.parent.host ?? this.parent);
    this.view.rerun = (pulse) => setTriggerValue("pulse", pulse);
    this.view.chose = (key) => setStateValue("chosen", key);
    this.view.options?.(options);
  }

  begin(name, url) {
    const View = VIEWS[name];
    if (!View) {
      this.root.textContent = `No such picture: ${name}`;
      return;
    }
    this.live = live(url);
    this.view = new View(this.root, this.live);
    this.ends = [
      this.live.on("status", (status) => (this.root.dataset.live = status)),
      this.live.on("dead", () => this.setStateValue("transport", "rerun")),
      this.live.on(this.view),
    ];
    this.root.dataset.live = this.live.status;
    if (this.live.status === "dead") this.setStateValue("transport", "rerun");
  }

  end() {
    if (!this.view) return;
    for (const end of this.ends) end();
    this.view.end();
    this.view = null;
    this.what = "";
    this.root.replaceChildren();
  }
}

/** Passes frames on that come with reruns, and questions back. */
class Feeder {
  constructor() {
    this.generation = 0;
    this.asked = {};
    this.live = live(RERUN);
    this.live.asker = (question) => this.ask(question);
  }

  set(frame, setStateValue) {
    this.setStateValue = setStateValue;
    this.live.push(frame);
  }

  ask(question) {
    Object.assign(this.asked, question);
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      this.setStateValue("ask", { ...this.asked });
    }, ASK_MS);
  }

  end() {
    clearTimeout(this.timer);
    if (this.live) this.live.asker = null;
  }
}
