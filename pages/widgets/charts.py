"""What the Plotly figures of the experiments have in common."""

from __future__ import annotations

Colours = dict[str, str]  # of one mode, as assets/tokens.json has them
CLEAR = "rgba(0,0,0,0)"


def layout(colours: Colours, **own) -> dict:
    """`own`: height, margin and whatever else a figure has for itself."""
    axis = {"gridcolor": colours["line"], "zerolinecolor": colours["line"], "linecolor": colours["line"]}
    return {
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"color": colours["text"], "size": 12},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hoverlabel": {"bgcolor": colours["panel"], "font": {"color": colours["text"]}},
        "xaxis": axis,
        "yaxis": axis,
        **own,
    }
