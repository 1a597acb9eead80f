"""Figures of the batching experiments: results, drawn when a run ends."""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from backend.experiments import Result
from pages.widgets.charts import Colours, layout

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
LINES = ("decode", "prefill", "cached", "shared", "weights")  # in the order of series, each with its own symbol too
HEIGHT = 340


def sweep(result: Result, colours: Colours) -> list[tuple[str, go.Figure]]:
    """Step time with its lower bound, and tok/s with what one user gets, against the batch."""
    table, marks = result.table, result.tables["marks"]
    how = "modelled" if result.modelled else "measured"
    step, rate = _figure(colours), make_subplots(specs=[[{"secondary_y": True}]])
    rate.update_layout(_layout(colours))
    for index, (prompt, rows) in enumerate(table.groupby("prompt (tokens)")):
        colour, symbol = colours[LINES[index % len(LINES)]], SYMBOLS[index % len(SYMBOLS)]
        name = f"{prompt:,} tokens of context"
        middle = rows["step (ms)"]
        step.add_trace(
            go.Scatter(
                x=places(rows["batch"]), y=middle, name=f"{name}, {how}", mode="lines+markers",
                line={"color": colour}, marker={"symbol": symbol, "size": 8},
                error_y={
                    "type": "data", "array": rows["p90 step (ms)"] - middle,
                    "arrayminus": middle - rows["p10 step (ms)"], "thickness": 1, "width": 3,
                },
            )
        )  # fmt: skip
        if rows["lower bound (ms)"].notna().any():
            step.add_trace(
                go.Scatter(
                    x=places(rows["batch"]), y=rows["lower bound (ms)"], name=f"{name}, lower bound", mode="lines",
                    line={"color": colour, "dash": "dot"},
                )
            )  # fmt: skip
        rate.add_trace(
            go.Scatter(
                x=places(rows["batch"]), y=rows["tok/s"], name=f"{name}, all users", mode="lines+markers",
                line={"color": colour}, marker={"symbol": symbol, "size": 8},
            )
        )  # fmt: skip
        rate.add_trace(
            go.Scatter(
                x=places(rows["batch"]), y=rows["tok/s per user"], name=f"{name}, per user", mode="lines",
                line={"color": colour, "dash": "dash"},
            ),
            secondary_y=True,
        )  # fmt: skip
    for place, mark in marks.iterrows():
        rows = table[table["prompt (tokens)"] == mark["prompt (tokens)"]]
        colour = colours[LINES[place % len(LINES)]]
        at_knee = rows[rows["batch"] == mark["knee (batch)"]]
        rate.add_trace(
            go.Scatter(
                x=places(at_knee["batch"]), y=at_knee["tok/s"], name="knee", mode="markers", showlegend=place == 0,
                marker={"symbol": "circle-open", "size": 18, "color": colours["text"], "line": {"width": 2}},
            )
        )  # fmt: skip
        for column, words in (("KV memory holds (batch)", "KV memory"), ("ridge (batch)", "ridge")):
            value = mark[column]
            if pd.notna(value) and 1 <= value <= 2 * table["batch"].max():
                _mark(rate, math.log2(value), f"{words} {value:.0f}", colour, place)
    _batch_axis(step, table["batch"])
    _batch_axis(rate, table["batch"])
    step.update_yaxes(title="ms a step", rangemode="tozero")
    rate.update_yaxes(title="tok/s", rangemode="tozero", secondary_y=False)
    rate.update_yaxes(title="tok/s per user", rangemode="tozero", showgrid=False, tickformat=",.3~r", secondary_y=True)
    return [("What a step costs", step), ("What it gives", rate)]


def waves(result: Result, colours: Colours) -> list[tuple[str, go.Figure]]:
    """Which request held which slot, static above continuous, on one clock."""
    requests, policies = result.tables["requests"], list(result.table["policy"])
    titles = [f"{policy}: {row:.1f} % of the slots in use" for policy, row in zip(
        policies, result.table["slots in use (%)"], strict=True)]  # fmt: skip
    figure = make_subplots(rows=len(policies), cols=1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=titles)
    figure.update_layout(_layout(colours), barmode="overlay", bargap=0.15, showlegend=True)
    slots = result.settings["slots"]
    for row, policy in enumerate(policies, 1):
        mine = requests[requests["policy"] == policy]
        end = mine["ends (s)"].max()
        figure.add_trace(
            go.Bar(
                orientation="h", y=list(range(1, slots + 1)), x=[end] * slots, name="empty slot", showlegend=row == 1,
                hoverinfo="skip",
                marker={
                    "color": colours["wastedSoft"], "line": {"width": 0},
                    "pattern": {"shape": ".", "fgcolor": colours["wastedDot"], "size": 6, "solidity": 0.3},
                },
            ),
            row=row, col=1,
        )  # fmt: skip
        figure.add_trace(
            go.Bar(
                orientation="h", y=mine["slot"], base=mine["enters (s)"], x=mine["ends (s)"] - mine["enters (s)"],
                name="a request", showlegend=row == 1, customdata=mine[["request", "output tokens"]],
                hovertemplate="request %{customdata[0]}: %{customdata[1]} tokens<extra></extra>",
                marker={"color": colours["decode"], "line": {"color": colours["background"], "width": 1}},
            ),
            row=row, col=1,
        )  # fmt: skip
        figure.update_yaxes(
            title="slot", autorange="reversed", dtick=max(1, slots // 8), showgrid=False, row=row, col=1
        )
    figure.update_xaxes(title="seconds", row=len(policies), col=1)
    figure.update_layout(height=170 * len(policies) + 90)
    return [("Who held which slot", figure)]


def chunked(result: Result, colours: Colours) -> list[tuple[str, go.Figure]]:
    """Every ITL of a decoder around the newcomer's arrival; the worst one beside what the newcomer waits."""
    figure = _figure(colours)
    for index, (name, rows) in enumerate(result.tables["tokens"].groupby("prefill", sort=False)):
        colour = colours[("prefill", "decode", "cached", "shared", "weights")[index % 5]]
        figure.add_trace(
            go.Scatter(
                x=rows["time since arrival (ms)"], y=rows["ITL (ms)"], name=name, mode="lines+markers",
                line={"color": colour, "width": 1.5}, marker={"symbol": SYMBOLS[index % 5], "size": 6},
                customdata=rows["prompt tokens in the step"],
                hovertemplate="%{y:.1f} ms, %{customdata} prompt tokens in the step<extra>%{fullData.name}</extra>",
            )
        )  # fmt: skip
    figure.add_vline(x=0, line={"color": colours["muted"], "dash": "dot"}, annotation_text="the long prompt arrives")
    figure.update_xaxes(title="ms since the long prompt arrived")
    figure.update_yaxes(title="ITL of a decoder (ms)", rangemode="tozero")
    return [("Time between a decoder's tokens", figure), ("What it costs whom", _price(result, colours))]


def _over(shape: str, colours: Colours) -> dict:
    """A pattern over a bar's own colour; as it comes, Plotly would put it in its place."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": colours["background"], "size": 7, "solidity": 0.25}


def _price(result: Result, colours: Colours) -> go.Figure:
    figure, table = _figure(colours), result.table
    for column, name, colour, pattern in (
        ("worst ITL (ms)", "worst ITL of a decoder", "decode", ""),
        ("newcomer's TTFT (ms)", "TTFT of the newcomer", "prefill", "/"),
    ):
        figure.add_trace(
            go.Bar(
                x=table["prefill"], y=table[column], name=name, texttemplate="%{y:,.0f}", textposition="outside",
                cliponaxis=False, hovertemplate="%{y:,.1f} ms",
                marker={"color": colours[colour], "pattern": _over(pattern, colours)},
            )
        )  # fmt: skip
    figure.update_yaxes(title="ms", rangemode="tozero")
    return figure


def race(result: Result, colours: Colours, odometer: str, unit: str) -> list[tuple[str, go.Figure]]:
    """The odometer of every lane on one clock, all lanes started at 0."""
    figure = _figure(colours)
    start = [] if unit.startswith("%") else [0.0]  # what is counted begins at nothing, a share does not
    for index, (name, rows) in enumerate(result.tables["lanes"].groupby("lane", sort=False)):
        figure.add_trace(
            go.Scatter(
                x=[*start, *rows["time (s)"]], y=[*start, *rows[odometer]], name=name, mode="lines",
                line={"color": colours[LINES[index]], "width": 2, "dash": ("solid", "dash", "dot")[index % 3]},
            )
        )  # fmt: skip
    figure.update_xaxes(title="seconds since the lane started", rangemode="tozero")
    figure.update_yaxes(title=unit if odometer == unit else f"{odometer}", rangemode="tozero")
    return [("The lanes on one clock", figure)]


def _mark(figure: go.Figure, at: float, words: str, colour: str, place: int) -> None:
    """A vertical line; the words of the second series stand lower than those of the first."""
    figure.add_vline(x=at, line={"color": colour, "dash": "dot", "width": 1.5})
    figure.add_annotation(
        x=at, y=0.99 - 0.4 * (place % 2), yref="paper", text=words, textangle=-90, showarrow=False, yanchor="top",
        xanchor="right", font={"size": 11, "color": colour},
    )  # fmt: skip


def places(batches: pd.Series) -> list[float]:
    """Doublings: the axis is linear in them, since lines and words cannot both be placed on a logarithmic one."""
    return [math.log2(batch) for batch in batches]


def _batch_axis(figure: go.Figure, batches: pd.Series) -> None:
    ticks = sorted(set(batches))
    figure.update_xaxes(
        title="batch (requests)", tickvals=[math.log2(batch) for batch in ticks],
        ticktext=[f"{batch:,}" for batch in ticks],
    )  # fmt: skip


def _figure(colours: Colours) -> go.Figure:
    return go.Figure(layout=_layout(colours))


def _layout(colours: Colours) -> dict:
    return layout(colours, height=HEIGHT, margin={"l": 56, "r": 56, "t": 36, "b": 48})
