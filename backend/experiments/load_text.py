"""A load sweep as text for a terminal, and as JSON for programs."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from backend.experiments import Result


def render(result: Result, good: pd.DataFrame | None) -> str:
    """The sweep as text, times in ms."""
    heads = ["req/s", "achieved", "ok", "not ok", "tok/s"]
    heads += [f"{name} p{share}" for name in ("TTFT", "TPOT", "ITL", "E2E") for share in (50, 99)]
    heads += ["Little"] + (["good/s"] if good is not None else [])
    lines = []
    for place, row in enumerate(result.table.to_dict("records")):
        cells = [f"{row['offered_rate_per_s']:g}", f"{row['achieved_rate_per_s']:.2f}", f"{row['ok']}"]
        cells += [f"{row['refused'] + row['failed'] + row['cut']}", f"{row['output_tokens_per_s']:.1f}"]
        cells += [_ms(row[f"{name}_p{share}_s"]) for name in ("ttft", "tpot", "itl", "e2e") for share in (50, 99)]
        residual = row["little_residual"]
        cells.append("–" if _missing(residual) else f"{residual:+.1%} {row['little']}")
        if good is not None:
            cells.append(f"{good['goodput_per_s'].iloc[place]:.2f}")
        lines.append(cells)
    widths = [max(len(cells[i]) for cells in [heads, *lines]) for i in range(len(heads))]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in [heads, *lines]
    ]
    machine = result.machine
    told = [
        f"{number.name}: {number.value:.3g} {number.unit}" for number in result.numbers if not _missing(number.value)
    ]
    head = f"{machine['model']} at {machine['url']}{machine['endpoint']}; client on {machine['client']}; times in ms"
    stopped = [] if result.complete else ["Stopped: this is what was kept."]
    return "\n".join([head, *table, " · ".join(told), *stopped, *result.notes])


def as_json(result: Result, good: pd.DataFrame | None) -> dict[str, Any]:
    return {
        "kvscope": "load",
        "complete": result.complete,
        "settings": result.settings,
        "machine": result.machine,
        "rates": _records(result.table),
        "goodput": None if good is None else _records(good),
        "numbers": [
            {"name": n.name, "value": None if _missing(n.value) else n.value, "unit": n.unit, "source": n.source}
            for n in result.numbers
        ],
        "notes": result.notes,
        "little": _records(result.tables["little"]),
        "requests": _records(result.tables["requests"]),
    }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {name: None if _missing(value) else value for name, value in row.items()} for row in table.to_dict("records")
    ]


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _ms(value: float | None) -> str:
    return "–" if _missing(value) else f"{value * 1000:,.1f}"
