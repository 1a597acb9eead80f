"""The prefix tree: which cached block continues which, who shares it, what it says. For any source that tells hashes.

A node is a hash. Its parent is the block before it in every prompt that begins like this; a request that begins like a
path from a root finds all its blocks. Made on demand from what the text channel told, in time that grows with the
number of cached blocks.
"""

from __future__ import annotations

from typing import Any

from backend.fold import State
from backend.texts import Texts

SHOWN = 400  # nodes that are told; those with most blocks behind them first
TEXT = 240  # characters of a block
HOLDERS = 8  # requests that are named for each


def picture(texts: Texts, state: State, shown: int = SHOWN) -> dict[str, Any]:
    """The protocol's "tree" object. `nodes` come parents first and each branch whole, as rows of

        [index of its parent or -1, a block that holds it, hash, requests that hold it now, how many there are,
         copies (blocks with this hash), nodes in its subtree, children, position of its first token, lost, text]

    `lost`: what is before it was evicted, so that no look-up gets here. The nodes with most behind them are told first:
    none is without its parent.
    """
    sealed, owners = state.blocks.sealed, state.blocks.owners
    rows: dict[str, tuple] = {}
    copies: dict[str, list[int]] = {}
    for block, row in texts.sealed().items():
        if block < len(sealed) and sealed[block]:
            rows.setdefault(row[1], row)
            copies.setdefault(row[1], []).append(block)
    children: dict[str, list[str]] = {}
    for digest, row in rows.items():
        parent = row[2] if row[2] in rows and row[2] != digest else ""
        children.setdefault(parent, []).append(digest)
    sizes = _sizes(children)
    order = sorted(sizes, key=lambda digest: (-sizes[digest], rows[digest][4], digest))
    kept = set(order[:shown])  # a parent's subtree is larger than its child's: whoever is in, its ancestors are too
    nodes: list[list[Any]] = []
    stack = [(digest, -1) for digest in sorted(children.get("", ()), key=order_of(sizes), reverse=True)]
    while stack:
        digest, parent = stack.pop()
        if digest not in kept:
            continue
        row, blocks = rows[digest], copies[digest]
        held = dict.fromkeys(owner for block in blocks for owner in owners[block])
        below = children.get(digest, ())
        nodes.append(
            [
                parent,
                blocks[0],
                digest,
                list(held)[:HOLDERS],
                len(held),
                len(blocks),
                sizes[digest],
                len(below),
                row[4],
                int(bool(row[2]) and parent < 0),
                texts.text_of(blocks[0])[:TEXT],
            ]
        )
        index = len(nodes) - 1
        stack += [(child, index) for child in sorted(below, key=order_of(sizes), reverse=True)]
    return {
        "type": "tree",
        "nodes": nodes,
        "left_out": len(rows) - len(nodes),
        "blocks": sum(map(len, copies.values())),
        "hashes": len(rows),
        "roots": sum(not row[2] for row in rows.values()),
        "branching": sum(len(below) > 1 for digest, below in children.items() if digest),
        "block_size": state.block_size,
        "seq": state.seq,  # what is told is how it was then
    }


def order_of(sizes: dict[str, int]):
    """Largest first, then by hash, so that the same tree is drawn in the same order."""
    return lambda digest: (-sizes[digest], digest)


def _sizes(children: dict[str, list[str]]) -> dict[str, int]:
    """Nodes in the subtree of each that can be reached from a root: hashes that claim each other as parents cannot."""
    preorder, stack = [], list(children.get("", ()))
    above: dict[str, str] = {}
    while stack:
        digest = stack.pop()
        preorder.append(digest)
        for child in children.get(digest, ()):
            above[child] = digest
            stack.append(child)
    sizes = dict.fromkeys(preorder, 1)
    for digest in reversed(preorder):
        if digest in above:
            sizes[above[digest]] += sizes[digest]
    return sizes
