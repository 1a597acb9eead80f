"""The explorer's curves: one knob turned, both configurations, ceilings and what servers reach."""

from __future__ import annotations

import pandas as pd

from backend.planner.machine import Measured
from backend.planner.results import Result
from backend.planner.sweep import Point
from backend.planner.words import figures, value_words
from pages.widgets.explorer_charts import MARKS, Colours, Figure, axis, colour, figure, ms

NAMES = {
    "context": "Context (tokens)",
    "batch": "Batch (sequences at once)",
    "output": "Output (tokens)",
    "tp": "GPUs that share every layer (TP)",
    "shared_prefix": "Shared prefix (tokens)",
}


def rates(
    sweeps: dict[str, list[Point]],
    knob: str,
    now: int,
    colours: Colours,
    dots: list[Measured] = (),
) -> Figure:
    """Ceilings as lines, what servers reach as bands, and this machine's own steps as dots."""
    traces = []
    for which, points in sweeps.items():
        xs, ink = [point.x for point in points], colour(colours, which)
        band = [point.rate.high for point in points] + [point.rate.low for point in reversed(points)]
        traces += [
            {
                "type": "scatter",
                "x": xs + xs[::-1],
                "y": band,
                "fill": "toself",
                "fillcolor": _clear(ink),
                "line": {"width": 0},
                "mode": "lines",
                "name": f"{which}: a server (8 in 10)",
                "hoverinfo": "skip",
            },
            {
                "type": "scatter",
                "x": xs,
                "y": [point.ceiling for point in points],
                "mode": "lines+markers",
                "name": f"{which}: ceiling (bound)",
                "line": {"color": ink, "dash": MARKS[which]["dash"]},
                "marker": {"symbol": MARKS[which]["symbol"], "size": 6},
                "customdata": [[point.running, *_range(point.rate), 1e3 / point.per_user] for point in points],
                "hovertemplate": f"{which} at %{{x:,}}: at most %{{y:,.4g}} tok/s, a server %{{customdata[1]}} to "
                "%{customdata[2]}<br>%{customdata[0]:,} at once, step ≥ %{customdata[3]:.3g} ms<extra></extra>",
            },
        ]
    if dots and knob == "batch":
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured on this machine",
                "x": [dot.batch for dot in dots],
                "y": [dot.tokens_per_s for dot in dots],
                "marker": {"color": colours["good"], "symbol": "star", "size": 12},
                "customdata": [[dot.steps, dot.context] for dot in dots],
                "hovertemplate": "measured: %{y:,.4g} tok/s at batch %{x}<br>median of %{customdata[0]} steps, "
                "%{customdata[1]:,.0f} tokens of context<extra></extra>",
            }
        )
    return figure(traces, 320, xaxis=_steps(NAMES[knob], sweeps), yaxis=_log("output tok/s"), shapes=_now(now, colours))


def room(sweeps: dict[str, list[Point]], now: int, colours: Colours) -> Figure:
    traces = [
        {
            "type": "scatter",
            "x": [point.x for point in points if point.room],
            "y": [point.room for point in points if point.room],
            "mode": "lines+markers",
            "name": which,
            "line": {"color": colour(colours, which), "dash": MARKS[which]["dash"]},
            "marker": {"symbol": MARKS[which]["symbol"], "size": 6},
            "hovertemplate": f"{which}: %{{y:,}} sequences of %{{x:,}} tokens<extra></extra>",
        }
        for which, points in sweeps.items()
    ]
    return figure(
        traces, 320, xaxis=_steps(NAMES["context"], sweeps), yaxis=_log("sequences that fit"), shapes=_now(now, colours)
    )


def sweep_table(sweeps: dict[str, list[Point]], knob: str) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "": which,
                NAMES[knob]: point.x,
                "fit at once": point.room,
                "run": point.running,
                "at most (tok/s, bound)": round(point.ceiling, 2),
                "a server (tok/s, estimate)": round(point.rate.value, 2),
                "from": round(point.rate.low, 2),
                "to": round(point.rate.high, 2),
                "weights (ms)": ms(point.weights_s),
                "KV (ms)": ms(point.kv_s),
                "arithmetic (ms)": ms(point.arithmetic_s),
                "TTFT, at least (ms)": ms(point.ttft_s),
                "$/M output (estimate)": round(point.usd_per_million, 4),
            }
            for which, points in sweeps.items()
            for point in points
        ]
    )


def _log(title: str) -> dict:
    return axis(title, type="log", dtick=1, minor={"showgrid": False}, exponentformat="none", tickformat=",~s")


def _steps(title: str, sweeps: dict[str, list[Point]]) -> dict:
    """The swept values themselves as ticks, every other one where there are many; a knob that begins at 0 is linear."""
    xs = sorted({point.x for points in sweeps.values() for point in points})
    shown = xs[:: 2 if len(xs) > 7 else 1]
    kind = {"type": "log"} if xs and xs[0] > 0 else {}
    return axis(title, tickvals=shown, ticktext=[f"{x:,}" for x in shown], **kind)


def _now(x: int, colours: Colours) -> list[dict]:
    """A line where the knob stands."""
    if x <= 0:
        return []
    line = {"color": colours["muted"], "dash": "dot", "width": 1}
    return [{"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}]


def _range(result: Result) -> tuple[str, str]:
    return figures(result.low), value_words(result.high, result.unit)


def _clear(ink: str) -> str:
    red, green, blue = (int(ink[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"
