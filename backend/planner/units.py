"""Units of the planner: bytes are bytes, and only here stands what a GiB or a GB is."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
TFLOPS = 10**12  # FLOP/s

SCALES: dict[str, float] = {
    "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "KB": KB, "kB": KB, "MB": MB, "GB": GB, "TB": TB,
    "s": 1, "ms": 1e-3, "µs": 1e-6,
}  # fmt: skip


def to_si(value: float, unit: str) -> float:
    """`value` of `unit` in bytes or seconds. A unit without a scale (tok/s, FLOP/B, a label) stays as it is."""
    return value * SCALES.get(unit, 1)


def from_si(value: float, unit: str) -> float:
    return value / SCALES.get(unit, 1)
