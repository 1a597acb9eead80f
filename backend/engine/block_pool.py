"""Who holds which block. Reference counts, content hashes, and a free queue that *is* the eviction order.

Contract (after vLLM's BlockPool, in our words):
- A block is held (reference count > 0) or stands in the free queue, never both, never neither.
- Allocation takes from the head of the queue and changes nothing when it fails.
- A released block without a hash goes to the head (it can answer nothing: use it first), one with a
  hash to the tail; a table is released tail first, so the end of a chain is evicted before its start.
- Only full blocks have a hash. A hash names one block: a second block with the same content stays unhashed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class OutOfBlocks(Exception):
    """Fewer blocks are free than asked for; nothing was changed."""


class BlockPool:
    can_share = True  # may a block be in two tables?

    def __init__(self, num_blocks: int, prefix_cache: bool = True):
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.refs = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._free_cached = 0
        self.evictions = 0

    @property
    def free_count(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Free blocks that still answer prefix look-ups."""
        return self._free_cached

    @property
    def used_count(self) -> int:
        return self.num_blocks - len(self._free)

    def eviction_order(self) -> list[int]:
        """Free blocks, next victim first."""
        return list(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each. Raises OutOfBlocks and changes nothing."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self.hash_of[block] is not None:
                self._forget(block)
                self._free_cached -= 1
                self.evictions += 1
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these blocks (found by `lookup`, or forked from another table)."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._free[block]
                if self.hash_of[block] is not None:
                    self._free_cached -= 1
            self.refs[block] += 1

    def release(self, table: list[int]) -> None:
        """One holder less for each block of a table, tail first. Raises ValueError for a block nobody holds."""
        for block in reversed(table):
            if self.refs[block] == 0:
                raise ValueError(f"block {block} released twice")
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            self._free[block] = None
            if self.hash_of[block] is None:
                self._free.move_to_end(block, last=False)
            else:
                self._free_cached += 1

    def seal(self, block: int, content: bytes) -> bool:
        """A held block became full. True when it answers look-ups for `content` from now on."""
        if not self.prefix_cache or content in self._block_of:
            return False
        self.hash_of[block] = content
        self._block_of[content] = block
        return True

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached run of `hashes`; changes nothing."""
        found = []
        if self.prefix_cache:
            for content in hashes:
                block = self._block_of.get(content)
                if block is None:
                    break
                found.append(block)
        return found

    def fits(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Could `count` blocks be handed out once `shared` were shared?"""
        return count <= len(self._free) - sum(1 for block in shared if self.refs[block] == 0)

    @property
    def largest_hole(self) -> int:
        """Most neighbouring blocks that nobody holds. No limit here: a request's blocks may stand anywhere."""
        longest = run = 0
        for count in self.refs:
            run = 0 if count else run + 1
            longest = max(longest, run)
        return longest

    def clear(self) -> None:
        """Forgets every hash. Raises ValueError while a block is held."""
        if self.used_count:
            raise ValueError(f"{self.used_count} blocks are held; the prefix cache is emptied when idle")
        for block in self._block_of.values():
            self.hash_of[block] = None
        self._block_of.clear()
        self._free_cached = 0

    def check(self, tables: Iterable[list[int]]) -> None:
        """Every block is accounted for. Raises AssertionError with the numbers (a bug here, never a user's fault)."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
        if held != self.refs:
            wrong = [(b, held[b], self.refs[b]) for b in range(self.num_blocks) if held[b] != self.refs[b]]
            raise AssertionError(f"(block, holders, reference count) disagree: {wrong[:8]}")
        lost = [b for b in range(self.num_blocks) if (self.refs[b] == 0) != (b in self._free)]
        if lost:
            raise AssertionError(f"blocks neither held nor free, or both: {lost[:8]}")
        cached = sum(1 for b in self._free if self.hash_of[b] is not None)
        if cached != self._free_cached:
            raise AssertionError(f"{cached} free blocks have a hash, {self._free_cached} counted")
        for content, block in self._block_of.items():
            if self.hash_of[block] != content:
                raise AssertionError(f"block {block} is listed under a hash that it does not hold")

    def _forget(self, block: int) -> None:
        del self._block_of[self.hash_of[block]]
        self.hash_of[block] = None
