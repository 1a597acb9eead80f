// A picture of words about the devices that can be read: its lease on the sensors, and the GPU that a person picked.
// A panel has write(), which draws when `key` says that something of it has changed.
import { paintTokens, themeOf } from "./draw.js";
import { heading } from "./dom.js";

const KEY = "__kvscope_device_1";

/** The GPU that a person picked, "" for none: shared by the pictures of a page, each of which may be a module of its own. */
class Picked extends EventTarget {
  uuid = "";

  pick(uuid) {
    this.uuid = uuid;
    this.dispatchEvent(new Event("change"));
  }
}

export const picked = (globalThis[KEY] ??= new Picked());

export class DevicePanel {
  constructor(root, live) {
    this.root = root;
    this.live = live;
    this.key = "";
    this.lease = live.lease({ telemetry: [] });
    this.onpick = () => this.write();
    picked.addEventListener("change", this.onpick);
  }

  options({ title, units }) {
    heading(this.root, title);
    this.units = units ?? "GiB";
    this.key = "";
    this.write();
  }

  theme(host) {
    paintTokens(this.root, themeOf(host));
  }

  update(state) {
    this.state = state;
    this.write();
  }

  end() {
    picked.removeEventListener("change", this.onpick);
    this.lease();
  }
}
