// The devices that can be read here, and what NVIDIA's library says about itself. Which one the page is about is picked here.
import { bytes } from "./draw.js";
import { rate } from "./axes.js";
import { DevicePanel, picked } from "./device_panel.js";
import { element, setText } from "./dom.js";
import { chosenGpu } from "./sensors.js";

const STATES = { ready: "", absent: "No NVIDIA GPU can be read here", mismatch: "Driver and library do not match", no_permission: "Reading is not permitted", error: "NVIDIA's library reports an error" };

export class Devices extends DevicePanel {
  constructor(root, live) {
    super(root, live);
    this.banner = element("div", { class: "banner", role: "status", hidden: true });
    this.message = element("p", { class: "message", hidden: true });
    this.list = element("div", { class: "devices" });
    root.append(this.banner, this.message, this.list);
  }

  write() {
    const { state } = this;
    const told = state?.devices;
    if (!told) return;
    const index = chosenGpu(state, picked.uuid);
    const key = JSON.stringify([told, index, this.units]);
    if (key === this.key) return;
    this.key = key;
    const fakes = told.devices.filter((d) => d.fake);
    this.banner.hidden = !fakes.length;
    if (fakes.length) setText(this.banner, fakesAre(fakes.map((d) => d.name)));
    const problem = told.state && told.state !== "ready";
    const waiting = !told.state;
    this.message.hidden = !problem && !waiting;
    if (waiting) setText(this.message, "Asking the engine what can be read here …");
    if (problem) setText(this.message, `${STATES[told.state] ?? told.state}: ${told.message}`);
    this.list.replaceChildren(...told.devices.map((device, i) => this.card(device, i === index, told.devices)));
    this.root.dataset.devices = told.devices.length;
    this.root.dataset.state = told.state;
  }

  card(device, chosen, all) {
    const facts = [
      device.arch, device.driver && `driver ${device.driver}`, device.memory_bytes ? bytes(device.memory_bytes, this.units) : "",
      device.peak_bandwidth_bytes_per_s ? `peak ${rate(device.peak_bandwidth_bytes_per_s, "B/s")} (${device.peak_source || "source unknown"})` : "",
    ].filter(Boolean);
    const badges = [device.used && "the engine computes here", device.fake && "fake device", device.state && device.state !== "ok" && device.state].filter(Boolean);
    const several = all.filter((d) => d.kind !== "host").length > 1 && device.kind !== "host";
    const name = element("strong", {}, device.name || (device.kind === "host" ? "This machine" : device.uuid));
    const node = element(several ? "button" : "section", {
      class: `device${chosen && several ? " chosen" : ""}`, type: several ? "button" : null, "aria-pressed": several ? String(chosen) : null, "data-uuid": device.uuid, "data-state": device.state,
    }, element("div", {}, name, ...badges.map((b) => element("span", { class: "badge" }, b))), element("div", { class: "facts" }, facts.join(" · ")));
    for (const note of device.notes) node.append(element("div", { class: "note" }, note));
    if (several) node.addEventListener("click", () => picked.pick(device.uuid));
    return node;
  }
}

function fakesAre(names) {
  const what = names.length > 1 ? `Fake devices: ${names.join(", ")} are stand-ins` : `Fake device: ${names[0]} is a stand-in`;
  return `${what} for tests. Readings come from a script; no such hardware is here.`;
}
