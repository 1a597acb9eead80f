"""What counters and histograms grew between two scrapes. Never negative: a counter that fell was started anew."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from backend.sources.attach.exposition import MAX_SERIES, Exposition, Labels

Grown = dict[str, dict[Labels, float]]  # sample name -> labels -> growth


PROCESS_START = "process_start_time_seconds"
KEPT_LIVES = 10_000


class Quantile(NamedTuple):
    value: float  # estimated: interpolated in its bucket
    low: float  # the true value is above this (or equal, at the very first bucket's lower end)
    high: float | None  # and at most this; None: it lies above the last bound


def quantile(buckets: list[tuple[float, float]], share: float) -> Quantile | None:
    """Of observations counted in `buckets`: (upper bound, how many are at most that), ascending, the last bound +Inf.

    It is the value of the observation whose rank is share × count, rounded up. None when there is none.
    """
    total = buckets[-1][1] if buckets else 0.0
    if not total > 0:
        return None
    rank, below, low = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound):
                break
            first = min(low, bound)
            return Quantile(first + (bound - first) * min(1.0, (rank - below) / (count - below)), first, bound)
        below = max(below, count)  # a scrape may catch a histogram in the middle of its own update
        low = bound
    return Quantile(low, low, None)


class Counters:
    """The last value of each series."""

    def __init__(self, names: Iterable[str]):
        self._names = frozenset(names)
        self._last: dict[str, dict[Labels, float]] = {}
        self._born: dict[tuple[str, Labels], float] = {}
        self._lives: set[tuple[str, Labels, float]] = set()  # births that were seen before
        self._heard = self._cut = False
        self.restarts = 0  # of the process behind them
        self.turns = 0  # answers of a process that was there before: several servers answer in turn

    def take(self, told: Exposition) -> Grown | None:
        """Growth since the last call; None for the first. A series that is missing keeps its last value."""
        first, fell, grown = not self._heard, False, Grown()
        reborn, turned = self._births(told)
        for name in self._names & told.series.keys():
            last, growth = self._last.setdefault(name, {}), {}
            for labels, value in told.series[name].items():
                if not math.isfinite(value):
                    continue
                before = last.get(labels)
                last[labels] = value
                if turned:
                    growth[labels] = 0.0
                elif before is None:  # new: it began at 0, if nothing was cut off before
                    growth[labels] = 0.0 if self._cut else max(0.0, value)
                elif value < before:
                    growth[labels], fell = max(0.0, value), True
                else:
                    growth[labels] = max(0.0, value if reborn else value - before)
            if len(last) > 2 * MAX_SERIES:  # labels that are new each time: what is gone is forgotten
                self._last[name] = {labels: last[labels] for labels in told.series[name] if labels in last}
            if growth:
                grown[name] = growth
        self._heard, self._cut = True, told.cut
        self.turns += turned
        if not first and not turned and (fell or reborn):
            self.restarts += 1
        return None if first else grown

    def _births(self, told: Exposition) -> tuple[bool, bool]:
        """(a new process answers, one that was there before answers again), by `_created` and the process's start."""
        reborn = turned = False
        if len(self._born) > 2 * MAX_SERIES:
            self._born.clear()
        births = {**told.created, PROCESS_START: told.series.get(PROCESS_START, {})}
        for name, series in births.items():
            for labels, t in series.items():
                key, life = (name, labels), (name, labels, t)
                before = self._born.get(key, t)
                if t < before or (t != before and life in self._lives):
                    turned = True
                elif t != before:
                    reborn = True
                self._born[key] = t
                if len(self._lives) < KEPT_LIVES:
                    self._lives.add(life)
        return reborn, turned


class Recent:
    """Growths of one histogram, summed over the last `span_s`."""

    def __init__(self, span_s: float):
        self.span_s = span_s
        self._parts: deque[tuple[float, float, dict[float, float]]] = deque()  # begin, end, bound -> growth

    def add(self, begin: float, end: float, growth: dict[float, float]) -> None:
        parts = self._parts
        if any(growth.values()):
            parts.append((begin, end, growth))
        while parts and parts[0][0] < end - self.span_s - 1e-9:
            parts.popleft()

    def clear(self) -> None:
        self._parts.clear()

    def buckets(self) -> list[tuple[float, float]]:
        """As `quantile` wants them; only bounds that all parts have, as versions may differ within the span."""
        if not self._parts:
            return []
        common = set.intersection(*(set(growth) for _, _, growth in self._parts)) | {math.inf}
        return [(bound, sum(growth.get(bound, 0.0) for _, _, growth in self._parts)) for bound in sorted(common)]
