"""Little's law, L = λW, as an instrument: three measurements that know nothing of each other, and what is left over."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from backend.workload.job import Answer, Tick

POINTS = 120
ENOUGH = 200  # requests: below, the ends of the run weigh too much
SMALL = 0.05
WARM_UP = 0.2  # of the run: it begins empty, which no steady state does
RULE = (
    "L: mean of the number in flight, looked at ten times a second. λ: requests that left, over time. W: mean time "
    "from arrival to end of those that left. All from the end of the warm-up (a fifth of the run) to the time on the "
    "axis. Residual: L − λW. When more arrive than leave, λW stays behind L for good."
)


@dataclass(frozen=True)
class Point:
    t: float
    l: float  # noqa: E741  the law's own letters
    rate_per_s: float
    w_s: float
    left: int  # since the warm-up
    left_in_all: int

    @property
    def rate_times_w(self) -> float:
        return self.rate_per_s * self.w_s

    @property
    def residual(self) -> float:
        return (self.l - self.rate_times_w) / self.l if self.l else 0.0


def series(ticks: Sequence[Tick], answers: Sequence[Answer], until_s: float) -> list[Point]:
    """At most POINTS of them, up to `until_s` (the last arrival: after it nothing comes that could balance)."""
    begin = WARM_UP * until_s
    ticks = [tick for tick in ticks if begin <= tick.t <= until_s]
    ends = sorted((answer.end_s, answer.end_s - answer.arrival_s) for answer in answers)
    stays = [0.0, *accumulate(stay for _, stay in ends)]
    first = bisect_left(ends, (begin,))
    points, area = [], 0.0
    every = max(1, len(ticks) // POINTS)
    for i, (before, tick) in enumerate(pairwise(ticks), start=1):
        area += (tick.t - before.t) * (before.in_flight + tick.in_flight) / 2
        last = bisect_left(ends, (tick.t,))
        if last > first and (i % every == 0 or i == len(ticks) - 1):
            lasted, left = tick.t - ticks[0].t, last - first
            points.append(Point(tick.t, area / lasted, left / lasted, (stays[last] - stays[first]) / left, left, last))
    return points


def verdict(points: Sequence[Point], state: str) -> tuple[str, str]:
    """(steady | unstable | too early, why), from the last point and what `saturation.judge` said."""
    if not points and state != "over-saturated":
        return "too early", "no request has left yet"
    last = points[-1] if points else None
    held = f"L − λW is {last.residual:+.1%} of L after {last.left_in_all} requests" if last else "none leaves any more"
    if state == "over-saturated":
        return "unstable", f"more arrive than leave, so there is no mean to settle on: {held}, and both grow"
    if last.left_in_all < ENOUGH:
        return "too early", f"{held}; from {ENOUGH} on it should be below {SMALL:.0%}"
    if abs(last.residual) >= SMALL:
        return "too early", f"{held}: not settled"
    return "steady", held


@dataclass(frozen=True)
class Capacity:
    """What `in_flight` places sustain when each request takes `tokens` steps of `tpot_s`."""

    in_flight: float
    tokens: float
    tpot_s: float

    @property
    def w_s(self) -> float:
        return self.tokens * self.tpot_s

    @property
    def rate_per_s(self) -> float:
        return self.in_flight / self.w_s

    @property
    def tokens_per_s(self) -> float:
        return self.in_flight / self.tpot_s
