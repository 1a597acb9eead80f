"""Results as words: one way for the command line, the pages and the explanations between them."""

from __future__ import annotations

from backend.planner.results import Result
from backend.planner.units import GB, GIB, KB, KIB, MB, MIB, TB, TIB

_BINARY = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_DECIMAL = ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "kB"))
NONE = "—"


def figures(value: float) -> str:
    """Three figures: 3.21, 32.1, 321, 3,210; smaller ones as 0.0321."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 or value == 0 else f"{value:.3g}"


def size_words(count: float, units: str = "GiB") -> str:
    for scale, name in _DECIMAL if units == "GB" else _BINARY:
        if abs(count) >= scale:
            return f"{figures(count / scale)} {name}"
    return f"{count:,.0f} B"


def value_words(value: float, unit: str, units: str = "GiB") -> str:
    if unit == "B":
        return size_words(value, units)
    if unit == "s":
        return f"{figures(value * 1e3)} ms" if value < 1 else f"{figures(value)} s"
    if unit in ("parameters", "FLOP"):
        for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G" if unit == "FLOP" else "B"), (1e6, "M")):
            if value >= scale:
                return f"{figures(value / scale)} {letter}{'FLOP' if unit == 'FLOP' else ''}"
    if unit.startswith("$"):
        return f"${value:,.2f}{unit[1:]}" if value >= 0.1 else f"${value:.2g}{unit[1:]}"
    if unit in ("sequences", "tokens"):
        return f"{value:,.0f} {unit}"
    return f"{figures(value)} {unit}"


def result_words(result: Result, value: float | None = None, units: str = "GiB") -> str:
    """The value of a result (or another one of its unit), or a dash where there is none."""
    shown = result.value if value is None else value
    return NONE if shown is None else value_words(shown, result.unit, units)
