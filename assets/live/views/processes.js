// Who computes on the chosen GPU and with how much of its memory. What the driver does not say is not written as 0.
import { bytes } from "./draw.js";
import { DevicePanel, picked } from "./device_panel.js";
import { element, setText } from "./dom.js";
import { chosenGpu } from "./sensors.js";

export class Processes extends DevicePanel {
  constructor(root, live) {
    super(root, live);
    this.body = element("tbody");
    this.table = element("table", {}, element("thead", {}, element("tr", {}, ...["process", "pid", "memory"].map((n) => element("th", { scope: "col" }, n)))), this.body);
    this.none = element("p", { class: "empty" });
    root.append(this.table, this.none);
  }

  write() {
    const { state } = this;
    if (!state?.devices) return;
    const device = state.devices.devices[chosenGpu(state, picked.uuid)];
    const key = JSON.stringify([device?.processes, device?.processes_note, this.units, Boolean(device)]);
    if (key === this.key) return;
    this.key = key;
    const rows = device?.processes ?? [];
    this.table.hidden = !rows.length;
    this.none.hidden = Boolean(rows.length);
    setText(this.none, device ? device.processes_note ? `not available: ${device.processes_note}` : "No process computes on this GPU now." : "not available: no GPU can be read here.");
    this.body.replaceChildren(
      ...rows.map((p) =>
        element("tr", {}, element("td", {}, p.name || "name not readable from here"), element("td", {}, String(p.pid)),
          element("td", {}, p.memory_bytes === null || p.memory_bytes === undefined ? "not told by the driver" : bytes(p.memory_bytes, this.units))),
      ),
    );
  }
}
