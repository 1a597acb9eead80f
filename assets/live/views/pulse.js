// Draws nothing: asks for a rerun when the page was drawn from something that has changed since.
export class Pulse {
  constructor(root, live) {
    this.live = live;
    this.drawn = undefined; // the pulse that the page was drawn with
    this.told = "";
    this.rerun = () => {}; // set by the component
    this.off = live.on("pulse", () => this.compare());
  }

  theme() {}

  update() {}

  options({ pulse }) {
    this.drawn = pulse;
    this.told = "";
    this.compare();
  }

  compare() {
    const { pulse } = this.live;
    if (!pulse || this.drawn === undefined || pulse === this.drawn || pulse === this.told) return;
    this.told = pulse;
    this.rerun(pulse);
  }

  end() {
    this.off();
  }
}
