"""Figures of the load page: results, drawn when a run ends or a person chooses another view."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from backend.experiments.latency import NAMES, SHARES
from pages.widgets.charts import CLEAR, Colours, layout

HEIGHT = 320
LINE = 19  # px of the legend
READING_MS = (100, 200)  # a token: people read 5 to 10 tokens a second
POINTS = 400  # of a distribution's line
SHARE_LOOKS = {50: ("decode", "circle", "solid"), 95: ("evicted", "square", "dash"), 99: ("prefill", "diamond", "dot")}
SYMBOLS = ("x", "triangle-up", "star", "cross", "pentagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def compared(table: pd.DataFrame, metric: str, colours: Colours) -> go.Figure:
    """p50 and p95 of two servers against achieved rate, `source` naming the server."""
    figure = _figure(colours)
    for place, (source, rows) in enumerate(table.groupby("source", sort=False)):
        colour = colours[("decode", "prefill")[place % 2]]
        for share, dash in ((50, "solid"), (95, "dot")):
            figure.add_trace(
                go.Scatter(
                    x=rows["achieved_rate_per_s"], y=_ms(rows[f"{metric}_p{share}_s"]), name=f"{source}, p{share}",
                    mode="lines+markers", line={"color": colour, "dash": dash},
                    marker={"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8},
                    hovertemplate=f"p{share} %{{y:,.1f}} ms at %{{x:.2f}} req/s",
                )
            )  # fmt: skip
    figure.update_xaxes(title="answers/s", rangemode="tozero")
    figure.update_yaxes(title=f"{metric.upper()} (ms)", rangemode="tozero")
    return figure


def latency(table: pd.DataFrame, metric: str, knee: int | None, slo_s: float | None, colours: Colours) -> go.Figure:
    """p50, p95, p99 against achieved rate; our sweep as lines, imported runs as marks."""
    figure = _figure(colours)
    ours = table[table["source"] == "this client"]
    for share in SHARES:
        colour, symbol, dash = SHARE_LOOKS[share]
        column = f"{metric}_p{share}_s"
        figure.add_trace(
            go.Scatter(
                x=ours["achieved_rate_per_s"], y=_ms(ours[column]), name=f"p{share}", mode="lines+markers",
                line={"color": colours[colour], "dash": dash}, marker={"symbol": symbol, "size": 8},
                customdata=ours[["offered_rate_per_s", "ok"]],
                hovertemplate="%{y:,.1f} ms at %{x:.2f} req/s (%{customdata[0]:g} offered, %{customdata[1]} answers)",
            )
        )  # fmt: skip
    others = table[table["source"] != "this client"]
    for place, (source, rows) in enumerate(others.groupby("source", sort=False)):
        told = [share for share in SHARES if f"{metric}_p{share}_s" in rows]
        told = [share for share in told if rows[f"{metric}_p{share}_s"].notna().any()]
        for share in told:
            figure.add_trace(
                go.Scatter(
                    x=rows["achieved_rate_per_s"], y=_ms(rows[f"{metric}_p{share}_s"]), mode="markers", name=source,
                    legendgroup=source, showlegend=share == told[0],
                    marker={
                        "symbol": SYMBOLS[place % len(SYMBOLS)], "size": 10, "color": colours[SHARE_LOOKS[share][0]],
                    },
                    hovertemplate=f"p{share} %{{y:,.1f}} ms at %{{x:.2f}} req/s",
                )
            )  # fmt: skip
    _room(figure, others["source"].nunique())
    over = ours[ours["verdict"] == "over-saturated"] if "verdict" in ours else ours[:0]
    if len(over):
        figure.add_trace(
            go.Scatter(
                x=over["achieved_rate_per_s"], y=_ms(over[f"{metric}_p99_s"]), name="over-saturated", mode="markers",
                marker={"symbol": "circle-open", "size": 18, "color": colours["bad"], "line": {"width": 2}},
                hoverinfo="skip",
            )
        )  # fmt: skip
    if knee is not None:
        figure.add_vline(
            x=ours["achieved_rate_per_s"].iloc[knee], annotation_text="knee", annotation_position="top left",
            line={"color": colours["text"], "dash": "dash", "width": 1},
        )  # fmt: skip
    scale = _scale(table, metric)
    if metric == "tpot":
        figure.add_hrect(*READING_MS, fillcolor=_faint(colours["cached"]), line_width=0, layer="below")
        _word(figure, "reading speed", READING_MS[1], scale, colours["cachedText"], at=0)
    if slo_s:
        figure.add_hline(y=slo_s * 1000, line={"color": colours["good"], "width": 1.5})
        _word(figure, "SLO", slo_s * 1000, scale, colours["good"])
    figure.update_xaxes(title="achieved rate (req/s)", rangemode="tozero")
    figure.update_yaxes(title=f"{NAMES[metric]} (ms)", type=scale)
    return figure


def goodput(good: pd.DataFrame, colours: Colours) -> go.Figure:
    """Answers a second, and those of them that kept the SLO, against offered rate."""
    figure = _figure(colours)
    x = good["offered_rate_per_s"]
    figure.add_trace(
        go.Scatter(
            x=x, y=good["goodput_per_s"], name="goodput", mode="lines+markers", fill="tozeroy",
            line={"color": colours["good"]}, fillcolor=_faint(colours["good"]), marker={"symbol": "circle", "size": 8},
            customdata=100 * good["good_share"],
            hovertemplate="%{y:.2f} req/s good, %{customdata:.0f} % of all",
        )
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=x, y=good["achieved_rate_per_s"], name="answered", mode="lines+markers",
            line={"color": colours["decode"], "dash": "dash"}, marker={"symbol": "square", "size": 7},
        )
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(x=x, y=x, name="offered", mode="lines", line={"color": colours["muted"], "dash": "dot", "width": 1})
    )
    figure.update_xaxes(title="offered rate (req/s)", rangemode="tozero")
    figure.update_yaxes(title="requests/s", rangemode="tozero")
    return figure


def distribution(
    samples: Mapping[str, Sequence[float]], metric: str, slo_s: float | None, colours: Colours
) -> go.Figure:
    """One line a rate: the share of samples that took at most so long. `samples` in s, by name."""
    figure = _figure(colours)
    hues = ("decode", "prefill", "cached", "shared", "kv", "evicted", "weights")
    for place, (name, values) in enumerate(samples.items()):
        ordered = pd.Series(values, dtype=float).sort_values(ignore_index=True)
        every = max(1, len(ordered) // POINTS)
        kept = sorted({*range(0, len(ordered), every), len(ordered) - 1}) if len(ordered) else []
        figure.add_trace(
            go.Scatter(
                x=ordered.iloc[kept] * 1000, y=[100 * (i + 1) / len(ordered) for i in kept], name=name, mode="lines",
                line={"color": colours[hues[place % len(hues)]], "dash": DASHES[place % len(DASHES)], "shape": "hv"},
            )
        )  # fmt: skip
    _room(figure, max(0, len(samples) - 3))
    if slo_s is not None:
        figure.add_vline(x=slo_s * 1000, line={"color": colours["good"], "width": 1.5}, annotation_text="SLO")
    figure.update_xaxes(title=f"{NAMES[metric]} (ms)", rangemode="tozero")
    figure.update_yaxes(title="share of samples (%)", range=[0, 102])
    return figure


def queue(looks: pd.DataFrame, colours: Colours) -> go.Figure:
    """In flight over time, and the server's own queue where it tells one."""
    figure = _figure(colours)
    lines = [("in_flight", "in flight (client)", "decode", "solid")]
    if looks["server_waiting"].notna().any():
        lines += [
            ("server_running", "running (server)", "cached", "dash"),
            ("server_waiting", "waiting (server)", "prefill", "dot"),
        ]
    for column, name, colour, dash in lines:
        figure.add_trace(
            go.Scatter(
                x=looks["t_s"], y=looks[column], name=name, mode="lines",
                line={"color": colours[colour], "dash": dash, "shape": "hv"},
            )
        )  # fmt: skip
    figure.update_xaxes(title="seconds since the run began", rangemode="tozero")
    figure.update_yaxes(title="requests", rangemode="tozero")
    return figure


def little(law: pd.DataFrame, colours: Colours) -> go.Figure:
    """L and λW on one axis, what is left between them below."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.08)
    figure.update_layout(_layout(colours))
    for column, name, colour, dash in (("l", "L", "decode", "solid"), ("rate_times_w", "λW", "prefill", "dash")):
        figure.add_trace(
            go.Scatter(
                x=law["t_s"], y=law[column], name=name, mode="lines", line={"color": colours[colour], "dash": dash}
            ),
            row=1, col=1,
        )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=law["t_s"], y=100 * law["residual_share"], name="(L − λW) / L", mode="lines", fill="tozeroy",
            line={"color": colours["muted"]}, fillcolor=_faint(colours["muted"]),
        ),
        row=2, col=1,
    )  # fmt: skip
    for share in (-5, 5):
        figure.add_hline(y=share, line={"color": colours["good"], "dash": "dot", "width": 1}, row=2, col=1)
    figure.update_yaxes(title="requests", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="residual (%)", row=2, col=1)
    figure.update_xaxes(title="seconds since the run began", row=2, col=1)
    return figure


def _room(figure: go.Figure, lines: int) -> None:
    """For so many more lines of the legend: they would come out of the picture's height."""
    figure.update_layout(height=HEIGHT + LINE * lines)


def _scale(table: pd.DataFrame, metric: str) -> str:
    """Logarithmic where the overloaded end would flatten the rest."""
    columns = [f"{metric}_p{share}_s" for share in SHARES if f"{metric}_p{share}_s" in table]
    values = pd.concat([pd.to_numeric(table[column]) for column in columns]).dropna()
    return "log" if len(values) and values.min() > 0 and values.max() > 20 * values.min() else "linear"


def _word(figure: go.Figure, words: str, y: float, scale: str, colour: str, at: int = 1) -> None:
    """At the right end of a line, or the left (0).

    On a logarithmic axis Plotly places words by their exponent, lines by their value.
    """
    figure.add_annotation(
        text=words, xref="paper", x=at, xanchor="right" if at else "left",
        y=math.log10(y) if scale == "log" else y, yanchor="top", showarrow=False, font={"color": colour, "size": 11},
    )  # fmt: skip


def _ms(values: pd.Series) -> pd.Series:
    return pd.to_numeric(values) * 1000


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _figure(colours: Colours) -> go.Figure:
    return go.Figure(layout=_layout(colours))


def _layout(colours: Colours) -> dict:
    bar = {"bgcolor": CLEAR, "color": colours["muted"], "activecolor": colours["text"]}
    return layout(colours, height=HEIGHT, margin={"l": 56, "r": 16, "t": 28, "b": 44}, modebar=bar)
