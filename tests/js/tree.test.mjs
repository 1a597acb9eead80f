// The prefix tree's arithmetic, without a browser.
import assert from "node:assert/strict";
import { test } from "node:test";
import { describe, layout, node, runs, summary, wrapped } from "../../assets/live/views/tree_layout.js";

const row = (parent, block, more = {}) => {
  const n = { hash: `h${block}`, holders: [], held: 0, copies: 1, size: 1, children: 0, position: 0, lost: 0, text: "", ...more };
  return [parent, block, n.hash, n.holders, n.held, n.copies, n.size, n.children, n.position, n.lost, n.text];
};

test("a shared beginning is as tall as all that follows it", () => {
  // 0 - 1 - 2
  //   \ 3
  // 4
  const { nodes, depth, rows } = layout([row(-1, 0), row(0, 1), row(1, 2), row(0, 3), row(-1, 4)]);
  assert.deepEqual(nodes.map((n) => [n.column, n.row, n.rows]), [[0, 0, 2], [1, 0, 1], [2, 0, 1], [1, 1, 1], [0, 2, 1]]);
  assert.deepEqual([depth, rows], [3, 3]);
  assert.deepEqual(nodes[0].below, [1, 3]);
  assert.deepEqual(layout([]), { nodes: [], depth: 0, rows: 0 });
});

test("no two nodes overlap, and every row is somebody's", () => {
  const parents = [-1, 0, 1, 1, 0, 4, 4, 4, -1, 8, 9, 9];
  const { nodes, depth, rows } = layout(parents.map((parent, i) => row(parent, i)));
  const taken = new Set();
  for (const n of nodes) {
    for (let r = n.row; r < n.row + n.rows; r++) {
      assert.ok(r < rows && n.column < depth);
      assert.ok(!taken.has(`${n.column}:${r}`));
      taken.add(`${n.column}:${r}`);
    }
    if (n.parent >= 0) {
      const above = nodes[n.parent];
      assert.ok(n.row >= above.row && n.row + n.rows <= above.row + above.rows);
    }
  }
  assert.equal(nodes.filter((n) => !n.below.length).length, rows);
});

test("words say who holds a block, where it goes on, and what nobody tells", () => {
  const say = (more, attached) => describe(node(row(-1, 7, more)), 16, attached);
  assert.match(say({ held: 2, holders: [1, 2], position: 32, children: 3 }), /^Block 7: tokens 32 to 47, held by 2 requests: A, B, 3 ways on$/);
  assert.match(say({ held: 1, holders: [3] }), /held by request C, nothing cached after it/);
  assert.match(say({ copies: 2 }, true), /^Cell 7: .*who holds it is not told, 2 copies/);
  assert.match(say({ lost: 1 }), /held by nobody now.*was evicted/);
});

test("what is left out is said", () => {
  assert.equal(summary({ hashes: 0, nodes: [] }), "nothing is cached yet");
  assert.equal(summary(null), "nothing is cached yet");
  const words = summary({ hashes: 1000, blocks: 1002, roots: 1, branching: 2, left_out: 600, nodes: new Array(400) });
  assert.equal(words, "1,000 cached blocks (2 more are copies), 1 beginning; 2 blocks have more than one way on. Shown are the largest 400, 600 are left out.");
});

test("a run goes on as long as nothing forks and the same requests hold it", () => {
  const held = { held: 1, holders: [1] };
  const { nodes } = layout([row(-1, 0, { ...held, children: 1 }), row(0, 1, { ...held, children: 2 }), row(1, 2, { ...held, children: 1 }), row(2, 3), row(1, 4, held)]);
  assert.deepEqual(runs(nodes).map((run) => run.map((n) => n.block)), [[0, 1], [2], [3], [4]]);
  // What follows is not shown: the run ends there all the same.
  assert.deepEqual(runs(layout([row(-1, 0, { children: 1 })]).nodes).map((run) => run.length), [1]);
});

test("text is wrapped, and what does not fit is said to be missing", () => {
  assert.deepEqual(wrapped("abcdefgh", 3, 9), ["abc", "def", "gh"]);
  assert.deepEqual(wrapped("abcdefgh", 3, 2), ["abc", "de…"]);
  assert.deepEqual(wrapped("abcdef", 3, 2), ["abc", "def"]);
  assert.deepEqual(wrapped("abc", 0, 2), []);
  assert.deepEqual(wrapped("", 3, 2), []);
});
