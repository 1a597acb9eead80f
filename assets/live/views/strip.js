// The pool as a small picture: the same cells as on the blocks page, without numbers or hover.
import { PoolPicture } from "./pool.js";

export class Strip extends PoolPicture {
  constructor(root, live) {
    super(root, live, { height: 72, name: "Block pool, small" }, { largest: 22 });
  }
}
