"""In which order a publisher's batches are taken, what was missed, when it began anew. Pure: no socket, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

MAX_GAPS = 64  # that are remembered one by one


class Verdict(Enum):
    NEXT = "next"  # take it
    OLD = "old"  # known already
    AHEAD = "ahead"  # some before it are missing
    RESTART = "restart"  # another life of the publisher


@dataclass(slots=True)
class Order:
    """Numbers rise by one within a publisher's life. A live message that falls back belongs to a new life; one that was
    replayed already does not, and tells the two apart by its time."""

    last: int = -1  # newest that was taken
    last_t: float = 0.0  # what the engine's clock said in it
    live: int = -1  # newest that came live
    gaps: list[tuple[int, int]] = field(default_factory=list)  # first and last number of batches that are lost
    joined: int | None = None  # number of the first batch that was taken; None: none yet

    def judge(self, seq: int, t: float) -> Verdict:
        if seq <= self.live or (seq <= self.last and t > self.last_t):
            return Verdict.RESTART
        if seq <= self.last:
            return Verdict.OLD
        return Verdict.NEXT if seq == self.last + 1 else Verdict.AHEAD

    def take(self, seq: int, t: float, *, live: bool) -> None:
        """`seq` was applied. What was left out before it is lost, or was before our time."""
        if self.joined is None:
            self.joined = seq
        elif seq > self.last + 1 and len(self.gaps) < MAX_GAPS:
            self.gaps.append((self.last + 1, seq - 1))
        self.last, self.last_t = seq, t
        if live:
            self.live = seq

    def restart(self) -> None:
        self.last = self.live = -1
        self.last_t, self.joined = 0.0, None
        self.gaps.clear()

    def whole(self) -> None:
        """The cache was emptied: whatever was missed does not matter any more."""
        self.gaps.clear()
        self.joined = 0

    @property
    def partial(self) -> bool:
        """Joined late: what was stored before is not known."""
        return self.joined is not None and self.joined > 0
