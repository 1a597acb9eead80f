"""The explorer's map of models on accelerators, and its board of levers; and the tables that say the same."""

from __future__ import annotations

import math

import pandas as pd

from backend.planner.levers import Lever
from backend.planner.sweep import Cell
from backend.planner.words import figures
from pages.widgets.explorer_charts import Colours, Figure, axis, figure

MAPS = {"GPUs needed": "gpus", "Sequences at once": "room", "Decode ceiling (tok/s)": "ceiling"}


def heat(cells: list[list[Cell]], models: list[str], parts: list[str], shown: str, colours: Colours) -> Figure:
    name = MAPS[shown]
    values = [[getattr(cell, name) or None for cell in row] for row in cells]
    words = [["–" if value is None else _short(value) for value in row] for row in values]
    hover = [
        [f"{model} on {part}<br>{_cell_words(cell)}" for part, cell in zip(parts, row, strict=True)]
        for model, row in zip(models, cells, strict=True)
    ]
    trace = {
        "type": "heatmap",
        "x": parts,
        "y": models,
        "z": [[None if value is None else _level(value) for value in row] for row in values],
        "text": words,
        "texttemplate": "%{text}",
        "customdata": hover,
        "hovertemplate": "%{customdata}<extra></extra>",
        "colorscale": "Cividis",
        "reversescale": name == "gpus",
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": True,
    }
    return figure(
        [trace],
        90 + 24 * len(models) + 60,
        xaxis={"tickangle": -40, "automargin": True, "showgrid": False, "side": "top"},
        yaxis={"autorange": "reversed", "automargin": True, "showgrid": False},
        plot_bgcolor=colours["free"],
    )


def _level(value: float) -> float:
    """Colours by the order of magnitude."""
    return math.log10(value)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value < 10_000 else f"{value / 1000:,.0f}k"


def _cell_words(cell: Cell) -> str:
    needed = f"one sequence needs {cell.gpus} GPU{'s' * (cell.gpus > 1)}" if cell.gpus else "not even on 16 GPUs"
    if cell.why:
        return f"{cell.why} on the group chosen; {needed}"
    rate = f", at most {figures(cell.ceiling)} tok/s" if cell.ceiling else ""
    return f"{cell.room:,} at once{rate}; {needed}"


def heat_table(cells: list[list[Cell]], models: list[str], parts: list[str], shown: str) -> pd.DataFrame:
    values = [[getattr(cell, MAPS[shown]) or None for cell in row] for row in cells]
    return pd.DataFrame(values, columns=parts).assign(model=models).set_index("model").reset_index()


GAINS = {"Decode tok/s": "throughput", "Sequences at once": "concurrency", "TTFT": "ttft"}
MOST_SHOWN = 16.0  # a bar for what makes an impossible thing possible


def board(levers: list[Lever], shown: str, colours: Colours) -> Figure:
    gains = [getattr(lever, GAINS[shown]) for lever in levers]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [lever.name for lever in levers],
        "x": [max(min(gain, MOST_SHOWN), 0.01) - 1 for gain in gains],
        "base": 1,
        "text": [gain_words(lever, gain) for lever, gain in zip(levers, gains, strict=True)],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": [colours["cached"] if gain > 1.005 else colours["weights"] for gain in gains]},
        "customdata": [lever.words for lever in levers],
        "hovertemplate": "%{y}: %{text}<br>%{customdata}<extra></extra>",
        "showlegend": False,
    }
    right = max([2.0, *(min(gain, MOST_SHOWN) for gain in gains)]) * 1.18
    return figure(
        [trace],
        90 + 26 * len(levers),
        xaxis=axis(f"factor on {shown}, computed", range=[min([0.9, *gains]) * 0.95, right]),
        yaxis={"autorange": "reversed", "automargin": True},
    )


def gain_words(lever: Lever, gain: float) -> str:
    if not lever.applies:
        return "–"
    return "makes it fit" if gain == float("inf") else f"× {gain:.2f}"


def board_table(levers: list[Lever]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "lever": lever.name,
                **{name: gain_words(lever, getattr(lever, field)) for name, field in GAINS.items()},
                "what is changed": lever.words,
            }
            for lever in levers
        ]
    )
