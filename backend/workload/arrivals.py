"""When requests arrive: an open loop, so that times are drawn before anything is sent and nothing moves them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from enum import StrEnum

MAX_RATE_PER_S = 2_000.0  # more than one Python client sends on time
MAX_REQUESTS = 20_000  # of one run: what is kept of each stays below some hundred megabytes


class Arrivals(StrEnum):
    """poisson: independent people. constant: a metronome. bursty: gamma-distributed gaps, in clumps."""

    poisson = "poisson"
    constant = "constant"
    bursty = "bursty"


class LoadError(ValueError):
    """A load that cannot be made as it was asked for; plain words, with what to do."""


def check_rate(rate_per_s: float) -> float:
    """Raises LoadError for a rate that is none or that no client here could keep."""
    if not math.isfinite(rate_per_s) or rate_per_s <= 0:
        raise LoadError(f"a rate of {rate_per_s:g} requests/s cannot be sent: give a number above 0")
    if rate_per_s > MAX_RATE_PER_S:
        raise LoadError(
            f"{rate_per_s:g} requests/s are more than one client sends on time; at most {MAX_RATE_PER_S:,.0f}"
        )
    return rate_per_s


def check_count(count: int) -> int:
    if not 1 <= count <= MAX_REQUESTS:
        raise LoadError(f"{count:,} requests in one run: give 1 to {MAX_REQUESTS:,}")
    return count


def times(kind: Arrivals, rate_per_s: float, count: int, seed: int = 0, burstiness: float = 0.25) -> list[float]:
    """`count` arrival times in seconds from 0, the same for the same seed.

    `burstiness` is the shape of the gamma distribution, as in `vllm bench serve`: 1 is Poisson, less comes in bursts.
    As there, gaps are stretched so that the last arrival falls where the rate says: two runs of one rate differ in
    their order of crowds and pauses, not in their load. Raises LoadError.
    """
    check_rate(rate_per_s)
    check_count(count)
    if not (math.isfinite(burstiness) and 0.01 <= burstiness <= 100):
        raise LoadError(f"a burstiness of {burstiness:g}: give 0.01 (all in crowds) to 100 (nearly even)")
    gap = 1 / rate_per_s
    if kind is Arrivals.constant:
        return [i * gap for i in range(count)]
    shape = 1.0 if kind is Arrivals.poisson else burstiness
    lots = random.Random(f"{seed} arrivals")
    gaps = [lots.gammavariate(shape, gap / shape) for _ in range(count)]
    return _stretched(gaps, count * gap)


def _stretched(gaps: Sequence[float], whole_s: float) -> list[float]:
    factor = whole_s / (sum(gaps) or 1.0)
    now, out = 0.0, []
    for gap in gaps:
        now += gap * factor
        out.append(now)
    return out
