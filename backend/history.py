"""The lines that a hub still has, bounded by number and by bytes. A cursor is the index of the next line to hear."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple


class Entry(NamedTuple):
    seq: int
    t: float
    line: bytes  # the event as it travels, without the newline
    picture: str | None  # what a browser gets of it; None: nothing


class History:
    def __init__(self, max_lines: int, max_bytes: int):
        self.max_lines, self.max_bytes = max_lines, max_bytes
        self.next = 0  # index of the line that will come next; never falls
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self.before = 0  # number of the event before the oldest line

    @property
    def first(self) -> int:
        """Index of the oldest line that is left."""
        return self.next - len(self._entries)

    def append(self, entry: Entry) -> None:
        entries = self._entries
        entries.append(entry)
        self._bytes += _size(entry)
        self.next += 1
        while len(entries) > self.max_lines or (self._bytes > self.max_bytes and len(entries) > 1):
            gone = entries.popleft()
            self._bytes -= _size(gone)
            self.before = gone.seq

    def restart(self, before: int = 0) -> None:
        """Forgets all lines; the next one follows on event number `before`."""
        self._entries.clear()
        self._bytes = 0
        self.before = before

    def skip(self, seq: int) -> None:
        """Counts a line that is not kept and brings the state of event number `seq`: all cursors before it fall out."""
        self.restart(seq)
        self.next += 1

    def since(self, cursor: int) -> list[Entry] | None:
        """Entries from `cursor` on, oldest first; None when some of them are gone."""
        if not self.first <= cursor <= self.next:
            return None
        # From the new end: a reader is nearly always close to it, and a deque is slow in the middle.
        newest_first = islice(reversed(self._entries), self.next - cursor)
        return list(newest_first)[::-1]

    def newest_first(self) -> Iterator[Entry]:
        return reversed(self._entries)

    def cursor_after(self, seq: int) -> int | None:
        """The cursor of someone who has heard everything up to `seq`; None when lines after it are gone."""
        index = self.next
        if seq > (self._entries[-1].seq if self._entries else self.before):
            return None  # heard from someone else
        for entry in reversed(self._entries):
            if entry.seq <= seq:
                return index
            index -= 1
        return index if seq == self.before else None


def _size(entry: Entry) -> int:
    return len(entry.line) + len(entry.picture or "")
