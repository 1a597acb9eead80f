"""Percentiles by one rule, stated wherever they are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

RULE = (
    "Percentile p of n sorted samples: the value at place (n - 1) p / 100, linear between neighbours "
    "(numpy's default, Hyndman and Fan's type 7)."
)


def percentiles(samples: Iterable[float], wanted: Sequence[float]) -> list[float | None]:
    """One value for each of `wanted` (0 to 100); None without samples. Raises ValueError for NaN or a wish outside."""
    ordered = sorted(samples)
    if any(math.isnan(value) for value in ordered):
        raise ValueError("a sample is not a number")
    return [_at(ordered, p) for p in wanted]


def _at(ordered: Sequence[float], p: float) -> float | None:
    if not 0 <= p <= 100:
        raise ValueError(f"percentile {p}")
    if not ordered:
        return None
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    share = place - low
    # As numpy does it: from the nearer neighbour, so that equal ones give exactly their value.
    step = ordered[high] - ordered[low]
    return ordered[low] + step * share if share < 0.5 else ordered[high] - step * (1 - share)
