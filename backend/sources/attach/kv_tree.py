"""What a foreign engine's KV cache holds, from its events: a multiset of hashes, their tree, their cells on the map.

Each copy of a hash that is resident on the GPU has a cell. Engines whose blocks are smaller than CELL_TOKENS (SGLang's
page is one token by default) get cells of that many tokens of one chain.

Counted per (rank, group, medium, hash), since
- two requests that compute one block in the same step store its hash twice, and each copy's end is told;
- a store that a session reports again (vLLM's full report mode) is no second copy;
- `remaining_copy_counts`, where it is told, is believed more than our own count;
- an engine that tells only the last copy's end would leave copies behind here: they go, oldest first, when there are
  more than the engine has blocks;
- a removal of what is not known (stored before we listened, or lost) takes nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from backend.sources.attach.kv_cells import Cell, Cells, Change, Key
from backend.sources.attach.kv_decode import Batch, Cleared, Removed, Stored

CELL_TOKENS = 16
MAX_NODES = 1 << 19  # hashes that are kept; the oldest are forgotten, and it is said
MAX_TEXT_TOKENS = 1 << 20  # token ids that wait for somebody who can read them
GPU = "GPU"


@dataclass(eq=False, slots=True)
class Node:
    parent: Key | None
    blocks_before: int  # in its chain, as far as known
    on_gpu: int = 0  # copies
    elsewhere: dict[str, int] | None = None  # copies by medium
    cell: Cell | None = None
    copies: list[Cell] | None = None  # cells beyond the first
    step: tuple | None = None  # its key in the index that token walks use

    def count(self, medium: str) -> int:
        return self.on_gpu if medium == GPU else (self.elsewhere or {}).get(medium, 0)

    def set_count(self, medium: str, count: int) -> None:
        if medium == GPU:
            self.on_gpu = count
            return
        self.elsewhere = {**(self.elsewhere or {}), medium: count}
        if not count:
            del self.elsewhere[medium]


@dataclass(slots=True)
class Counts:
    """Since the beginning; for the screen."""

    batches: int = 0
    stored: int = 0  # hashes, as told
    removed: int = 0
    cleared: int = 0
    copies: int = 0  # stores of what was resident already
    reports: int = 0  # of those, told again by a session: no copy
    unknown_removed: int = 0
    orphans: int = 0  # stores whose parent is not known
    forgotten: int = 0  # hashes dropped for want of room
    stale: int = 0  # copies dropped because the engine has fewer blocks
    malformed: int = 0  # messages or events that could not be understood


class Residency:
    """Not thread-safe. `num_blocks`: cells that there are; 0: not known yet, then nothing is on the map."""

    def __init__(self, num_blocks: int = 0, *, max_nodes: int = MAX_NODES, keep_tokens: bool = False):
        self.block_size = 0  # tokens of a block; 0: not known before the first store
        self.counts = Counts()
        self.cells = Cells(num_blocks)
        self.max_nodes = max_nodes
        self.keep_tokens = keep_tokens  # until `take_tokens` asks for them
        self._waiting_tokens = 0
        self._nodes: dict[Key, Node] = {}
        self._walk: dict[tuple, Key] = {}  # (rank, group, parent's hash, digest of its tokens) -> block
        self._media: Counter[str] = Counter()
        self._spaces: dict[tuple[int, int], None] = {}  # (rank, group) that there are
        self._copied: dict[Key, None] = {}  # blocks with more than one cell, in order of the first copy

    # ---- in ------------------------------------------------------------------------------------------------------

    def apply(self, batch: Batch, rank: int = 0) -> Change:
        """`rank`: of the endpoint that it came from, where the batch does not say."""
        rank = rank if batch.rank is None else batch.rank
        self.counts.batches += 1
        self.counts.malformed += batch.malformed
        self.cells.begin()
        for event in batch.events:
            match event:
                case Stored():
                    self._stored(event, rank)
                case Removed():
                    self._removed(event, rank)
                case Cleared():
                    self.counts.cleared += 1
                    self._clear(rank)
        while len(self._nodes) > self.max_nodes:  # copies that an engine never took back, or a cache beyond measure
            self.counts.forgotten += 1
            self._forget(next(iter(self._nodes)))
        if any(isinstance(event, Cleared) for event in batch.events) and all(each == rank for each, _ in self._spaces):
            return self.everything()  # emptied, not evicted block by block
        return self.cells.change()

    def clear(self, rank: int | None = None) -> Change:
        """All of one rank is gone, or (None) all there is."""
        self.cells.begin()
        self._clear(rank)
        change = self.cells.change()
        return Change(cleared=True) if rank is None else change

    # ---- look ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Hashes that are resident anywhere."""
        return len(self._nodes)

    def resident(self, medium: str = GPU) -> Counter[Key]:
        """How many copies of each hash."""
        return Counter({key: count for key, node in self._nodes.items() if (count := node.count(medium))})

    def media(self) -> dict[str, int]:
        """Tokens by medium, copies counted."""
        return {medium: count * self.block_size for medium, count in sorted(self._media.items()) if count}

    def everything(self) -> Change:
        """The whole map, for somebody who has heard nothing."""
        return Change(stored=self.cells.placed(), cleared=True)

    def take_tokens(self, cell: Cell) -> list[int]:
        """Its token ids. When it is full they are forgotten here with that."""
        tokens = cell.tokens
        if len(cell.members) >= self._blocks_of_a_cell:
            cell.tokens = []
            self._waiting_tokens -= len(tokens)
        return tokens

    def table_of(self, tokens: Sequence[int]) -> list[int]:
        """Cells of the longest resident chain that begins with these tokens: a block table that is inferred from
        content, of the full blocks only. [] when none is resident."""
        best: list[int] = []
        size = self.block_size
        if not size:
            return best
        digests = [_digest(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]
        for rank, group in self._spaces:
            found, parent = [], ""
            for digest in digests:
                key = self._walk.get((rank, group, parent, digest))
                cell = self._nodes[key].cell if key else None
                if cell is None or cell.slot < 0:
                    break
                if not found or found[-1] != cell.slot:
                    found.append(cell.slot)
                parent = key[2]
            best = max(best, found, key=len)
        return best

    # ---- stores --------------------------------------------------------------------------------------------------

    def _stored(self, event: Stored, rank: int) -> None:
        size, parent = event.block_size, event.parent
        self.block_size = size
        self._spaces[rank, event.group] = None
        before = self._nodes.get((rank, event.group, parent)) if parent else None
        if parent and before is None:
            self.counts.orphans += 1
        depth = before.blocks_before + 1 if before else 0
        for i, name in enumerate(event.hashes):
            self.counts.stored += 1
            tokens = event.tokens[i * size : (i + 1) * size]
            self._store(event, (rank, event.group, name), parent, depth + i, tokens)
            parent = name

    def _store(self, event: Stored, key: Key, parent: str, depth: int, tokens: list[int]) -> None:
        node = self._nodes.get(key)
        if node is None:
            above = (key[0], key[1], parent)
            node = self._nodes[key] = Node(above if parent and above != key else None, depth)
        if tokens and event.plain and node.step is None:
            node.step = (key[0], key[1], parent, _digest(tokens))
            self._walk[node.step] = key
        have = node.count(event.medium)
        if have:
            self.counts.copies += 1
            if event.session:
                self.counts.reports += 1
                return
        node.set_count(event.medium, have + 1)
        self._media[event.medium] += 1
        if event.medium != GPU:
            return
        if node.cell is None:
            self._settle(key, node, tokens)
        elif self._blocks_of_a_cell == 1:
            self._copied[key] = None
            node.copies = [*(node.copies or ()), self._open(key, node, [])]

    @property
    def _blocks_of_a_cell(self) -> int:
        return max(1, CELL_TOKENS // self.block_size) if self.block_size else 1

    def _settle(self, key: Key, node: Node, tokens: list[int]) -> None:
        """Into the cell of the block before it if that has room and ends with that block, else into a new one."""
        above = self._nodes.get(node.parent) if node.parent else None
        cell = above.cell if above else None
        if cell is None or len(cell.members) >= self._blocks_of_a_cell or cell.members[-1] != node.parent:
            node.cell = self._open(key, node, tokens)
            return
        cell.members.append(key)
        node.cell = cell
        if cell.tokens:
            cell.tokens.extend(tokens)
            self._waiting_tokens += len(tokens)
            self.cells.grow(cell)

    def _open(self, key: Key, node: Node, tokens: list[int]) -> Cell:
        above = self._nodes.get(node.parent) if node.parent else None
        parent = above.cell.name if above and above.cell else named(node.parent) if node.parent else ""
        cell = Cell(named(key), parent, node.blocks_before * self.block_size, [key])
        if self.keep_tokens and self._waiting_tokens < MAX_TEXT_TOKENS:
            cell.tokens = list(tokens)
            self._waiting_tokens += len(tokens)
        if self.cells.full and self.cells.count:
            self._drop_a_copy()
        self.cells.put(cell)
        return cell

    def _drop_a_copy(self) -> None:
        """There cannot be so many: the end of a copy was not told, or not heard."""
        while self._copied:
            key = next(iter(self._copied))
            node = self._nodes.get(key)
            if node and node.copies:
                self.counts.stale += 1
                return self._lower(key, node, GPU, node.on_gpu - 1)
            del self._copied[key]

    # ---- removals ------------------------------------------------------------------------------------------------

    def _removed(self, event: Removed, rank: int) -> None:
        for i, name in enumerate(event.hashes):
            self.counts.removed += 1
            key = (rank, event.group, name)
            node = self._nodes.get(key)
            have = node.count(event.medium) if node else 0
            if not have:
                self.counts.unknown_removed += 1
                continue
            left = have - 1 if event.remaining is None else min(event.remaining[i], have)
            self._lower(key, node, event.medium, left)

    def _lower(self, key: Key, node: Node, medium: str, left: int) -> None:
        """Fewer copies; without any on any medium the hash is forgotten."""
        self._media[medium] -= node.count(medium) - left
        node.set_count(medium, left)
        if medium == GPU:
            while node.copies and len(node.copies) > max(0, left - 1):
                self._close(node.copies.pop())
            if not left and node.cell:
                cell, node.cell = node.cell, None
                cell.members.remove(key)
                if not cell.members:
                    self._close(cell)
        if not node.on_gpu and not node.elsewhere:
            del self._nodes[key]
            if node.step and self._walk.get(node.step) == key:
                del self._walk[node.step]

    def _close(self, cell: Cell) -> None:
        self._waiting_tokens -= len(cell.tokens)
        cell.tokens = []
        self.cells.remove(cell)

    def _forget(self, key: Key) -> None:
        node = self._nodes[key]
        for medium in [*([GPU] if node.on_gpu else []), *(node.elsewhere or {})]:
            self._lower(key, node, medium, 0)

    def _clear(self, rank: int | None) -> None:
        for key in [key for key in self._nodes if rank is None or key[0] == rank]:
            self._forget(key)


def named(key: Key) -> str:
    """A hash as it is told: with rank and group where they are not the first, for the same hash lives in several."""
    rank, group, name = key
    return name if not rank and not group else f"{name}@{rank}.{group}"


def _digest(tokens: Sequence[int]) -> bytes:
    return blake2b(array("I", tokens).tobytes(), digest_size=12).digest()
