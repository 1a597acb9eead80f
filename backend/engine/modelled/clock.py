"""The time of an engine whose steps take as long as somebody says, at a speed of one's choice."""

from __future__ import annotations

import time
from collections.abc import Callable


class ModelledClock:
    """Seconds of the modelled machine. Called, it says how late it is there.

    A step takes exactly its modelled time, whatever Python needs for it: between steps the clock stands, and only while
    the engine has nothing to do does it go with the wall clock, `speed` times as fast. So what is read off the events
    does not depend on the machine that plays the model; one that cannot keep up shows everything later, not longer.
    """

    def __init__(
        self,
        speed: float = 1.0,
        idle: Callable[[], bool] = lambda: True,
        *,
        wall: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.speed, self.idle = speed, idle
        self._wall, self._sleep = wall, sleep
        self._at, self._wall_at = 0.0, wall()
        self._step: tuple[float, float, float] | None = None  # begin, end, wall clock at its begin
        self._due = self._wall_at  # when the wall clock should be here if nothing had been late

    def __call__(self) -> float:
        wall = self._wall()
        step = self._step
        if step is not None:
            begin, end, wall_begin = step
            return min(end, begin + max(0.0, wall - wall_begin) * self.speed)
        if self.idle():
            self._at += max(0.0, wall - self._wall_at) * self.speed
            self._due = wall
        self._wall_at = wall
        return self._at

    def spend(self, seconds: float) -> None:
        """Lets a step of so many modelled seconds pass; returns when it is over, at once when it is late already."""
        begin = self()
        wall = self._wall()
        self._due = max(self._due, wall - seconds / self.speed)  # what is late by more than a step is not caught up
        self._step = (begin, begin + seconds, self._due)
        self._due += seconds / self.speed
        left = self._due - self._wall()
        if left > 0:
            self._sleep(left)
        self._at, self._wall_at, self._step = begin + seconds, self._wall(), None
