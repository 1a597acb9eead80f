// The whole pool as one bar: filled, wasted, cached, free; what sharing saves stands beyond its end. Formulas with live values.
import { Picture, bytes, count, figures, patterns, percent } from "./draw.js";
import { element, setText } from "./dom.js";
import { poolSplit } from "../fold.js";
import { kept, media } from "./scraped.js";

const HEIGHT = 108;
const BAR_TOP = 10;
const BAR = 34;

const UNTOLD = "how many bytes a token takes is not told";

/** The formulas under the bar, values filled in. */
export function formulas(state, units) {
  const { pool, block_size: slots, model } = state;
  const { layers, kv_heads: heads, head_dim: width, kv_bytes_per_token: perToken } = model;
  const lines = [];
  if (layers && heads && width && perToken) {
    const each = perToken / (2 * layers * heads * width);
    lines.push([
      "block = 2 (K, V) × layers × KV heads × head size × bytes × slots",
      `2 × ${layers} × ${heads} × ${width} × ${figures(each)} B × ${slots} = ${bytes(perToken * slots, units)}`,
    ]);
  }
  lines.push([
    "used = used blocks × block",
    perToken ? `${count(pool.used_blocks)} × ${bytes(perToken * slots, units)} = ${bytes(pool.used_blocks * perToken * slots, units)}` : UNTOLD,
  ]);
  if (state.scrape) {
    const told = media(state);
    if (told.length) lines.push(["cached, in use or not, by medium (KV events)", told.map(kept(state, units)).join(" · ")]);
    lines.push(["filled slots, wasted slots, holders of a block", "not exported: of an attached engine only the number of used blocks is known"]);
    return lines;
  }
  lines.push([
    "waste = 1 − filled slots ÷ (used blocks × slots)",
    pool.used_blocks
      ? `1 − ${count(pool.filled_slots)} ÷ (${count(pool.used_blocks)} × ${slots}) = ${percent(1 - pool.filled_slots / (pool.used_blocks * slots))}`
      : "no block is used now",
  ]);
  lines.push([
    "saved = Σ (holders − 1) over used blocks",
    `${count(pool.shared_saved_blocks)} blocks = ${bytes(pool.shared_saved_blocks * perToken * slots, units)}`,
  ]);
  return lines;
}

/** What is known of an attached engine's pool: how many blocks are used, and how many hashes are cached beside them. */
function attached([filled, , cached, free]) {
  return [{ ...filled, name: "used" }, { ...cached, name: "cached, not used" }, { ...free, name: "the rest" }];
}

export class Split extends Picture {
  constructor(root, live) {
    super(root, live, { height: HEIGHT, fps: 5, name: "Pool split" });
    this.units = "GiB";
  }

  build() {
    this.formula = element("dl", { class: "formulas" });
    this.root.append(element("div", {}, this.canvas), this.formula);
  }

  options(options) {
    super.options(options);
    const { units } = options;
    this.units = units ?? "GiB";
    this.kick();
  }

  paint(width) {
    const { context: c, colors, state } = this;
    if (!state.num_blocks) return;
    this.clear(width);
    const parts = poolSplit(state);
    this.waste ??= patterns(c, colors, 1).waste;
    const scale = (width - 2) / (parts.total + parts.saved);
    let drawn = [
      { name: "filled", sign: "■", blocks: parts.filled, fill: colors.kv, ink: colors.kvText },
      { name: "wasted", sign: "⁙", blocks: parts.wasted, fill: this.waste, ink: colors.wastedText, edge: colors.wastedDot },
      { name: "cached", sign: "┅", blocks: parts.cached, fill: colors.cachedSoft, ink: colors.cachedText, edge: colors.cached, dash: [4, 3] },
      { name: "free", sign: "□", blocks: parts.free, fill: colors.background, ink: colors.muted, edge: colors.line },
      { name: "saved by sharing", sign: "×N", blocks: parts.saved, fill: colors.sharedSoft, ink: colors.sharedText, edge: colors.shared, double: true },
    ];
    if (state.scrape) drawn = attached(drawn);
    let x = 1;
    for (const part of drawn) {
      const w = part.blocks * scale;
      if (w > 0.2) this.segment(part, x, Math.max(1, w));
      x += w;
      if (part.name === "free" && parts.saved) {
        // The pool ends here; what follows would be needed on top if nothing were shared.
        c.fillStyle = colors.text;
        c.fillRect(Math.round(x) - 1, BAR_TOP - 6, 2, BAR + 12);
      }
    }
    this.legend(drawn, parts, width);
  }

  theme(host) {
    this.waste = undefined;
    super.theme(host);
  }

  report() {
    const { canvas, state } = this;
    this.write();
    canvas.dataset.step = state.step;
    canvas.dataset.saved = state.pool.shared_saved_blocks;
    this.say(() => {
      const parts = poolSplit(state);
      const names = state.scrape ? ["filled", "cached", "free"] : ["filled", "wasted", "cached", "free", "saved"];
      return names.map((name) => `${name} ${figures(parts[name])} blocks${this.size(parts, parts[name], ", ")}`).join("; ");
    });
  }

  segment({ fill, edge, dash, double }, x, w) {
    const { context: c } = this;
    c.fillStyle = fill;
    c.fillRect(x, BAR_TOP, w, BAR);
    if (!edge || w < 3) return;
    c.strokeStyle = edge;
    c.lineWidth = 1;
    c.setLineDash(dash ?? []);
    c.strokeRect(x + 0.5, BAR_TOP + 0.5, w - 1, BAR - 1);
    if (double && w > 8) c.strokeRect(x + 3.5, BAR_TOP + 3.5, w - 7, BAR - 7);
    c.setLineDash([]);
  }

  legend(drawn, parts, width) {
    const { context: c, colors } = this;
    const column = width / drawn.length;
    drawn.forEach((part, i) => {
      const x = i * column + 1;
      c.font = `600 13px ${colors.font}`;
      c.fillStyle = part.ink;
      c.fillText(`${part.sign} ${part.name}`, x, BAR_TOP + BAR + 20);
      c.fillStyle = colors.text;
      c.font = `13px ${colors.font}`;
      const blocks = part.blocks > 0 && part.blocks < 100 && !Number.isInteger(part.blocks) ? part.blocks.toFixed(1) : count(part.blocks);
      c.fillText(`${blocks} blocks${this.size(parts, part.blocks, " · ")}`, x, BAR_TOP + BAR + 40);
    });
  }

  /** Bytes of so many blocks, "" where an attached engine does not tell what a token takes. */
  size(parts, blocks, before) {
    return parts.block_bytes ? before + bytes(blocks * parts.block_bytes, this.units) : "";
  }

  /** The DOM under the bar changes a few times a second, and only where a number changed. */
  write() {
    const lines = formulas(this.state, this.units);
    while (this.formula.children.length > lines.length * 2) this.formula.lastChild.remove();
    lines.forEach(([name, value], i) => {
      if (!this.formula.children[2 * i]) this.formula.append(element("dt"), element("dd"));
      setText(this.formula.children[2 * i], name);
      setText(this.formula.children[2 * i + 1], value);
    });
  }
}
