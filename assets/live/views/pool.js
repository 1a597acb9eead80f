// A picture of the pool that paints only the cells a new state changed.
import { Picture, reducedMotion } from "./draw.js";
import { Pool, anonymousFrom, summary } from "./grid.js";

const FADE_CHECK_MS = 100;

export class PoolPicture extends Picture {
  constructor(root, live, options, layout) {
    super(root, live, options);
    this.layout = layout;
    this.pool = new Pool(this.canvas, this.context, reducedMotion());
    this.dirty = new Set();
    this.seen = 0; // number of the last step in the painted state
    this.blocks = null; // of the painted state
    this.full = true; // paint every cell
  }

  resized() {
    this.full = true;
    this.kick();
  }

  theme(host) {
    super.theme(host);
    this.pool.theme(this.colors);
    this.full = true;
  }

  update(state) {
    this.collect(state);
    super.update(state);
  }

  /** Which cells the new state changed. */
  collect(state) {
    const { blocks } = state;
    const since = this.seen;
    this.seen = state.step;
    if (blocks !== this.blocks || blocks.changed.length !== this.pool.count) {
      // Another pool: a snapshot, another engine, or switches that made it anew.
      this.blocks = blocks;
      this.full = true;
      this.pool.anonymous = anonymousFrom(state);
      this.pool.flashes.clear();
      return;
    }
    const anonymous = anonymousFrom(state);
    if (anonymous !== this.pool.anonymous) this.full = true;
    this.pool.anonymous = anonymous;
    const now = performance.now();
    for (let i = 0; i < blocks.changed.length; i++) {
      // `>=`: a request can also finish between steps, under the number of the step before.
      if (blocks.changed[i] >= since) this.dirty.add(i);
      if (blocks.mark[i] && blocks.marked[i] > since) this.pool.flash(i, now);
    }
  }

  prepare(width) {
    if (this.pool.layout(this.state.num_blocks, width, this.height, Math.min(3, devicePixelRatio || 1), this.layout)) this.full = true;
  }

  paint() {
    const { pool, state } = this;
    for (const i of pool.faded(performance.now())) this.dirty.add(i);
    if (this.full) pool.all(state);
    else for (const i of this.dirty) pool.block(state, i);
    this.full = false;
    this.dirty.clear();
    if (pool.flashes.size) this.fading ??= setTimeout(() => ((this.fading = undefined), this.kick()), FADE_CHECK_MS);
  }

  report() {
    const { canvas, state } = this;
    canvas.dataset.step = state.step;
    canvas.dataset.blocks = state.num_blocks;
    canvas.dataset.used = state.pool.used_blocks;
    canvas.dataset.cached = state.pool.cached_blocks;
    canvas.dataset.saved = state.pool.shared_saved_blocks;
    canvas.dataset.preemptions = state.totals.preemptions;
    canvas.dataset.evictions = state.totals.evictions;
    this.say(() => summary(state));
  }

  end() {
    super.end();
    clearTimeout(this.fading);
  }
}
