// The prefix tree as numbers and words: where its nodes stand, what runs together, what is said of them. No DOM.
import { count, letters } from "./draw.js";

/** Names for the places of a node's row, see backend/prefix_tree.py. */
export function node([parent, block, hash, holders, held, copies, size, children, position, lost, text]) {
  return { parent, block, hash, holders, held, copies, size, children, position, lost: Boolean(lost), text };
}

/** Nodes with their column, first row and number of rows. They come parents first, each branch whole. */
export function layout(rows) {
  const nodes = rows.map(node);
  nodes.forEach((n) => ((n.below = []), (n.rows = 0)));
  let depth = 0;
  nodes.forEach((n, i) => {
    const above = nodes[n.parent];
    n.column = above ? above.column + 1 : 0;
    above?.below.push(i);
    depth = Math.max(depth, n.column + 1);
  });
  for (let i = nodes.length - 1; i >= 0; i--) {
    const n = nodes[i];
    n.rows ||= 1;
    if (n.parent >= 0) nodes[n.parent].rows += n.rows;
  }
  const next = nodes.map(() => 0); // row where the next child of a node begins
  let top = 0;
  nodes.forEach((n, i) => {
    if (n.parent < 0) {
      n.row = top;
      top += n.rows;
    } else {
      n.row = next[n.parent];
      next[n.parent] += n.rows;
    }
    next[i] = n.row;
  });
  return { nodes, depth, rows: top };
}

/** Nodes that follow on each other without a fork and with the same holders; each node is in one run. */
export function runs(nodes) {
  const found = [], seen = new Set();
  nodes.forEach((n, i) => {
    if (seen.has(i)) return;
    const run = [n];
    for (let j = n.below[0]; run.at(-1).children === 1 && j !== undefined && alike(nodes[j], n); j = nodes[j].below[0]) {
      seen.add(j);
      run.push(nodes[j]);
    }
    found.push(run);
  });
  return found;
}

const alike = (a, b) => a.held === b.held && a.holders.join() === b.holders.join();

/** Text in lines of so many characters, the last one with an ellipsis if there is more. */
export function wrapped(text, width, most) {
  const lines = [];
  for (let at = 0; at < text.length && lines.length < most && width > 0; at += width) lines.push(text.slice(at, at + width));
  if (lines.length === most && most && lines.join("").length < text.length && width > 1) lines[most - 1] = `${lines[most - 1].slice(0, width - 1)}…`;
  return lines;
}

/** One line for a person who hovers over or steps through the tree. */
export function describe(n, size, attached) {
  const first = n.position, who = n.holders.slice(0, 6).map(letters).join(", ") + (n.held > 6 ? " …" : "");
  const held = n.held ? `held by ${n.held === 1 ? "request" : `${count(n.held)} requests:`} ${who}` : attached ? "who holds it is not told" : "held by nobody now";
  const goes = n.children > 1 ? `, ${count(n.children)} ways on` : n.children ? "" : ", nothing cached after it";
  const copies = n.copies > 1 ? `, ${count(n.copies)} copies` : "";
  const lost = n.lost ? "; what is before it was evicted, no look-up gets here" : "";
  return `${attached ? "Cell" : "Block"} ${n.block}: tokens ${count(first)} to ${count(first + size - 1)}, ${held}${copies}${goes}${lost}`;
}

/** What the whole tree is, in words. */
export function summary(tree) {
  if (!tree?.hashes) return "nothing is cached yet";
  const begin = tree.roots === 1 ? "1 beginning" : `${count(tree.roots)} beginnings`;
  const fork = tree.branching === 1 ? "1 block has" : `${count(tree.branching)} blocks have`;
  const copies = tree.blocks > tree.hashes ? ` (${count(tree.blocks - tree.hashes)} more are copies)` : "";
  const left = tree.left_out ? ` Shown are the largest ${count(tree.nodes.length)}, ${count(tree.left_out)} are left out.` : "";
  return `${count(tree.hashes)} cached ${tree.hashes === 1 ? "block" : "blocks"}${copies}, ${begin}; ${fork} more than one way on.${left}`;
}
