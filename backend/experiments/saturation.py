"""Is it too much, and where does it begin to be? Rules in words beside each verdict."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from backend.workload.job import Tick

GROWTH = 0.1  # of the arrivals meanwhile
RULE = (
    "Over-saturated: the mean number in flight grew, from the middle fifth of the run to its last fifth, by more than "
    "10 % of the requests that arrived meanwhile and by more than chance explains (twice the root of the mean; four "
    "times, to end a run early), and at least half of that growth is still there at its end."
)
KNEE_RULE = (
    "Knee: where achieved rate over mean E2E latency is largest (Kleinrock's power, 1979): beyond it, latency grows "
    "by a larger share than throughput."
)


@dataclass(frozen=True)
class Verdict:
    state: str  # steady | over-saturated | too short
    why: str


def judge(ticks: Sequence[Tick], until_s: float, chance: float = 2.0) -> Verdict:
    """Of the time from 0 to `until_s`, the last arrival or now. `ticks` in order of time.

    `chance`: roots of the mean number in flight that growth must exceed.
    """
    early = next((tick.t for tick in ticks if tick.left), math.inf)
    if len(ticks) < 10 or early > 0.4 * until_s:
        return Verdict("too short", "nothing had left before two fifths of the run were over: a longer run can tell")
    middle, last, end = (_mean(ticks, a * until_s, b * until_s) for a, b in ((0.4, 0.6), (0.8, 1.0), (0.95, 1.0)))
    if middle is None or last is None or end is None:
        return Verdict("too short", "there are too few looks at the number in flight")
    arrived = _arrived(ticks, 0.9 * until_s) - _arrived(ticks, 0.5 * until_s)
    growth = last - middle
    if growth > max(GROWTH * arrived, chance * math.sqrt(middle + 1)) and end - middle > growth / 2:
        why = f"in flight grew from {middle:.1f} to {last:.1f} while {arrived} requests arrived"
        return Verdict("over-saturated", why)
    return Verdict("steady", f"in flight {middle:.1f}, then {last:.1f}, while {arrived} requests arrived")


def _mean(ticks: Sequence[Tick], begin_s: float, end_s: float) -> float | None:
    found = [tick.in_flight for tick in ticks if begin_s <= tick.t <= end_s]
    return sum(found) / len(found) if found else None


def _arrived(ticks: Sequence[Tick], at_s: float) -> int:
    place = bisect_left(ticks, at_s, key=lambda tick: tick.t)
    return ticks[min(place, len(ticks) - 1)].arrived


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Index of the knee among (achieved rate, mean E2E in s), in the order of the sweep.

    None when it is not in sight: fewer than three points, or the last one still has the most power.
    """
    if len(points) < 3:
        return None
    power = [rate / latency if latency > 0 else 0.0 for rate, latency in points]
    best = max(range(len(power)), key=power.__getitem__)
    return best if best < len(power) - 1 else None
