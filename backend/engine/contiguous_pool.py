"""Memory before paging: every allocation is one run of neighbouring blocks, in the first hole that is large enough."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from backend.engine.block_pool import BlockPool, OutOfBlocks


class ContiguousPool(BlockPool):
    """A request's whole table is one allocation. Nothing is shared, so there is no prefix cache either."""

    can_share = False

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks, prefix_cache=False)
        self._holes = [(0, num_blocks)]  # (first block, blocks), in order, never two side by side

    @property
    def largest_hole(self) -> int:
        return max((length for _, length in self._holes), default=0)

    def fits(self, count: int, shared: Sequence[int] = ()) -> bool:
        return count <= self.largest_hole

    def allocate(self, count: int) -> list[int]:
        """Raises OutOfBlocks and changes nothing, also where enough blocks are free but not side by side."""
        index = next((i for i, (_, length) in enumerate(self._holes) if length >= count), None)
        if index is None:
            raise OutOfBlocks(
                f"{count} neighbouring blocks asked for; {self.free_count} are free, "
                f"the largest hole has {self.largest_hole}"
            )
        first, length = self._holes[index]
        self._holes[index : index + 1] = [(first + count, length - count)] if length > count else []
        blocks = list(range(first, first + count))
        for block in blocks:
            del self._free[block]
            self.refs[block] = 1
        return blocks

    def release(self, table: list[int]) -> None:
        super().release(table)
        if not table:
            return
        first, end = table[0], table[-1] + 1
        index = bisect_left(self._holes, (first, 0))
        if index < len(self._holes) and self._holes[index][0] == end:
            end += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == first:
            index -= 1
            first = self._holes.pop(index)[0]
        self._holes.insert(index, (first, end - first))

    def check(self, tables: Iterable[list[int]]) -> None:
        tables = list(tables)
        super().check(tables)
        torn = [table for table in tables if table and table != list(range(table[0], table[0] + len(table)))]
        if torn:
            raise AssertionError(f"tables that are not in one piece: {torn[:4]}")
        if self._holes != holes(self.refs):
            raise AssertionError(f"holes are {holes(self.refs)[:8]}, kept as {self._holes[:8]}")


def holes(refs: list[int]) -> list[tuple[int, int]]:
    """Runs of blocks that nobody holds, (first block, blocks), counted one by one."""
    found, first = [], None
    for block, count in enumerate([*refs, 1]):
        if count == 0 and first is None:
            first = block
        elif count and first is not None:
            found.append((first, block - first))
            first = None
    return found
