"""The map of a foreign engine's cached blocks: cells that we number, since engines tell no numbers.

A newcomer gets the lowest free cell and keeps it. Positions are the dashboard's, not the GPU's.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

Key = tuple[int, int, str]  # rank, group, hash


@dataclass(eq=False, slots=True)
class Cell:
    """A chain of one or more blocks, as many as make CELL_TOKENS; or one more copy of a block."""

    name: str  # hash of its first block
    parent: str  # name of the cell before it; "": it begins a prompt, or what is before is not known
    position: int  # of its first token, counted from the first block that is known
    members: list[Key]
    tokens: list[int] = field(default_factory=list)
    slot: int = -1  # -1: there is no room for it


@dataclass(slots=True)
class Change:
    """What became of the map: first `cleared`, then `removed`, then `stored`. A cell is in each at most once."""

    removed: list[int] = field(default_factory=list)
    stored: list[Cell] = field(default_factory=list)
    cleared: bool = False
    grown: list[Cell] = field(default_factory=list)  # cells that stood already and have more blocks now

    def __bool__(self) -> bool:
        return bool(self.removed or self.stored or self.cleared)


class Cells:
    """Changes are collected from `begin` on; what comes and goes in between leaves no trace in them."""

    def __init__(self, count: int):
        self._at: dict[int, Cell] = {}
        self._homeless: dict[Cell, None] = {}  # in order of arrival
        self.resize(count)

    def resize(self, count: int) -> None:
        """Another number of cells: all are given out anew, in the order that they had."""
        cells = [*self.placed(), *self._homeless]
        self.count = count
        self._free = list(range(count))
        self._at, self._homeless = {}, {}
        self.begin()
        for cell in cells:
            self.put(cell)

    def begin(self) -> None:
        self._before: dict[int, Cell | None] = {}  # what stood in the cells that have changed
        self._grown: dict[Cell, None] = {}

    @property
    def full(self) -> bool:
        return not self._free

    def placed(self) -> list[Cell]:
        return [self._at[slot] for slot in sorted(self._at)]

    def holds(self, cell: Cell) -> bool:
        return self._at.get(cell.slot) is cell

    def put(self, cell: Cell) -> None:
        if not self._free:
            cell.slot = -1
            self._homeless[cell] = None
            return
        cell.slot = heapq.heappop(self._free)
        self._before.setdefault(cell.slot, None)
        self._at[cell.slot] = cell

    def grow(self, cell: Cell) -> None:
        self._grown[cell] = None

    def remove(self, cell: Cell) -> None:
        """Who has waited longest for room gets it."""
        self._grown.pop(cell, None)
        if cell.slot < 0:
            self._homeless.pop(cell, None)
            return
        self._before.setdefault(cell.slot, cell)
        del self._at[cell.slot]
        heapq.heappush(self._free, cell.slot)
        if self._homeless:
            waiting = next(iter(self._homeless))
            del self._homeless[waiting]
            self.put(waiting)

    def change(self) -> Change:
        """Since `begin`."""
        change = Change()
        for slot, was in self._before.items():
            now = self._at.get(slot)
            if now is was:
                continue
            if was is not None:
                change.removed.append(slot)
            if now is not None:
                change.stored.append(now)
        fresh = set(change.stored)
        change.grown = [cell for cell in self._grown if cell.slot >= 0 and cell not in fresh]
        return change
