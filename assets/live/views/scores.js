// The shape of the scores, query rows by key columns: a prefill chunk of c tokens asks for c × S at once, a decode step for
// 1 × S. Sizes are those of the newest steps.
import { Picture, count } from "./draw.js";

const HEIGHT = 190;
const TOP = 26;
const GAP = 40;

/** Query-key pairs that are really computed: the mask hides what comes after a token. */
export const pairs = (tokens, before) => tokens * before + (tokens * (tokens + 1)) / 2;

export class Scores extends Picture {
  constructor(root, live) {
    super(root, live, { height: HEIGHT, fps: 4, name: "Shapes of the scores" });
    this.ends = [live.lease({ phases: true }), live.on("phases", () => this.kick())];
  }

  get shapes() {
    const { phases, chunk } = this.live.phases ?? {};
    const decode = phases?.decode;
    return { chunk: chunk ?? null, context: decode?.context ? Math.round(decode.context) : null, batch: decode ? Math.max(1, Math.round(decode.batch)) : null };
  }

  paint(width) {
    this.clear(width);
    const { chunk, context, batch } = this.shapes;
    const half = (width - GAP) / 2;
    const longest = Math.max(context ?? 0, chunk ? chunk[0] + chunk[1] : 0, 1);
    const scale = Math.min((half - 8) / longest, (HEIGHT - TOP - 46) / Math.max(1, chunk?.[0] ?? 1));
    if (chunk) this.prefill(0, chunk, scale);
    else this.nothing(0, "▲ prefill: no prompt was computed yet");
    if (context) this.decode(half + GAP, context, batch, scale);
    else this.nothing(half + GAP, "● decode: no token was decoded yet");
  }

  title(x, text, ink) {
    const { context: c, colors } = this;
    c.font = `600 13px ${colors.font}`;
    c.fillStyle = ink;
    c.fillText(text, x, 10);
  }

  below(x, y, lines) {
    const { context: c, colors } = this;
    c.font = `12px ${colors.font}`;
    c.fillStyle = colors.muted;
    lines.forEach((line, i) => c.fillText(line, x, y + 14 + 17 * i));
  }

  nothing(x, text) {
    this.title(x, text, this.colors.muted);
  }

  prefill(x, [tokens, before], scale) {
    const { context: c, colors } = this;
    const w = Math.max(3, (tokens + before) * scale), h = Math.max(tokens > 1 ? 8 : 3, tokens * scale), past = before * scale;
    this.title(x, `▲ prefill: ${count(tokens)} × ${count(tokens + before)}`, colors.prefillText);
    c.fillStyle = colors.free;
    c.fillRect(x, TOP, w, h);
    c.fillStyle = colors.prefill;
    c.beginPath(); // all of the past, and the lower triangle of the chunk itself
    c.moveTo(x, TOP);
    c.lineTo(x + past, TOP);
    c.lineTo(x + w, TOP + h);
    c.lineTo(x, TOP + h);
    c.fill();
    c.strokeStyle = colors.muted;
    c.lineWidth = 1;
    c.strokeRect(x + 0.5, TOP + 0.5, w, h);
    this.below(x, TOP + h, [`rows: queries · columns: keys · ${count(pairs(tokens, before))} scores a head and layer`, "one read of K and V serves all rows: arithmetic is plenty"]);
  }

  decode(x, context, batch, scale) {
    const { context: c, colors } = this;
    const w = Math.max(3, context * scale), h = Math.max(3, scale);
    this.title(x, `● decode: 1 × ${count(context)}${batch > 1 ? `, for each of ${count(batch)} sequences` : ""}`, colors.decodeText);
    c.fillStyle = colors.decode;
    c.fillRect(x, TOP, w, h);
    this.below(x, TOP + h, [`one query row · ${count(context)} scores a head and layer`, "K and V are read for that one row: bytes are plenty"]);
  }

  report() {
    const { chunk, context } = this.shapes;
    this.canvas.dataset.step = this.state.step;
    this.canvas.dataset.prefill = chunk ? `${chunk[0]}x${chunk[0] + chunk[1]}` : "";
    this.canvas.dataset.decode = context ? `1x${context}` : "";
    this.say(() => `${chunk ? `prefill ${chunk[0]} by ${chunk[0] + chunk[1]}` : "no prefill yet"}; ${context ? `decode 1 by ${context}` : "no decode yet"}`);
  }

  end() {
    super.end();
    for (const end of this.ends) end();
  }
}
