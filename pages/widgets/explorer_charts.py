"""The explorer's figures of one moment: memory, a decode step, money; and the tables that say the same."""

from __future__ import annotations

from typing import Any

import pandas as pd

from backend.planner.plan import Plan
from backend.planner.results import Result
from backend.planner.units import from_si

Figure = dict[str, Any]
Colours = dict[str, Any]  # of one mode, as assets/tokens.json has them
MARKS = {"A": {"symbol": "circle", "dash": "solid"}, "B": {"symbol": "diamond", "dash": "dash"}}
MEMORY = (  # segment, colour token, pattern
    ("weights", "weights", ""),
    ("activations", "evicted", "/"),
    ("graphs and context", "wastedDot", "x"),
    ("KV of the batch", "kv", ""),
    ("KV, free", "cachedSoft", ""),
    ("kept back", "line", "."),
    ("missing", "bad", "\\"),
)


def colour(colours: Colours, which: str) -> str:
    return colours["primary"] if which == "A" else colours["sharedText"]


def figure(traces: list[dict], height: int, **layout: Any) -> Figure:
    base = {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 34, "b": 8},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "hoverlabel": {"align": "left"},
        "bargap": 0.25,
    }
    return {"data": traces, "layout": base | layout}


def axis(title: str, **more: Any) -> dict:
    return {"title": {"text": title, "standoff": 6}, "automargin": True} | more


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(plans: dict[str, Plan], colours: Colours, units: str) -> Figure:
    traces = []
    parts = {which: plan.memory_parts() for which, plan in plans.items()}
    for name, token, pattern in MEMORY:
        sizes = [from_si(part[name], units) for part in parts.values()]
        if not any(sizes):
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": list(parts),
                "x": sizes,
                "marker": {"color": colours[token], "pattern": {"shape": pattern}, "line": {"width": 0}},
                "hovertemplate": f"%{{y}}, {name}: %{{x:,.2f}} {units}<extra></extra>",
            }
        )
    return figure(
        traces,
        210,
        barmode="stack",
        xaxis=axis(f"{units} of one GPU"),
        yaxis={"autorange": "reversed", "automargin": True},
    )


def memory_table(plans: dict[str, Plan], units: str) -> pd.DataFrame:
    parts = {which: plan.memory_parts() for which, plan in plans.items()}
    return pd.DataFrame(
        {"part": [name for name, _, _ in MEMORY]}
        | {
            f"{which} ({units} of one GPU)": [round(from_si(part[name], units), 3) for name, _, _ in MEMORY]
            for which, part in parts.items()
        }
    )


# ---- time ------------------------------------------------------------------------------------------------------------


def step(plans: dict[str, Plan], colours: Colours) -> Figure:
    """What a decode step reads, stacked, what it computes below, and where servers get to."""
    traces = []
    rows = {which: (f"{which} reads", f"{which} computes") for which in plans}
    for name, token, index in (("weights", "weights", 0), ("KV", "kv", 0), ("arithmetic", "prefill", 1)):
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [rows[which][index] for which in plans],
                "x": [ms(next(t.value for t in plan["step"].terms if t.name == name)) for plan in plans.values()],
                "marker": {"color": colours[token], "line": {"width": 0}},
                "hovertemplate": f"%{{y}}, {name}: %{{x:,.3g}} ms (bound)<extra></extra>",
            }
        )
    estimates = [plan["step_estimate"] for plan in plans.values()]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "a server (estimate, 8 in 10)",
            "y": [rows[which][0] for which in plans],
            "x": [ms(found.value) for found in estimates],
            "error_x": spread(estimates, 1e3),
            "marker": {"color": colours["text"], "symbol": "line-ns-open", "size": 12},
            "hovertemplate": "%{y}: %{x:,.3g} ms (estimate)<extra></extra>",
        }
    )
    order = [row for pair in rows.values() for row in pair]
    return figure(
        traces,
        250,
        barmode="stack",
        xaxis=axis("ms a decode step", rangemode="tozero"),
        yaxis={"categoryorder": "array", "categoryarray": order[::-1], "automargin": True},
    )


def step_table(plans: dict[str, Plan]) -> pd.DataFrame:
    rows = []
    for which, plan in plans.items():
        terms = {term.name: ms(term.value) for term in plan["step"].terms}
        found = plan["step_estimate"]
        rows.append(
            {
                "": which,
                "weights (ms)": terms["weights"],
                "KV (ms)": terms["KV"],
                "arithmetic (ms)": terms["arithmetic"],
                "at least (ms, bound)": ms(plan["step"].value),
                "a server (ms, estimate)": ms(found.value),
                "from (ms)": ms(found.low),
                "to (ms)": ms(found.high),
            }
        )
    return pd.DataFrame(rows)


def ms(value: float) -> float:
    return round(from_si(value, "ms"), 4)


def spread(results: list[Result], scale: float = 1.0) -> dict:
    return {
        "type": "data",
        "symmetric": False,
        "array": [scale * (found.high - found.value) if found.high is not None else 0 for found in results],
        "arrayminus": [scale * (found.value - found.low) if found.low is not None else 0 for found in results],
        "thickness": 1.5,
    }


# ---- money -----------------------------------------------------------------------------------------------------------

PRICES = {"cost": "output", "cost_input": "input", "cost_cached": "input, cached"}


def prices(plans: dict[str, Plan], colours: Colours) -> Figure:
    traces = []
    for which, plan in plans.items():
        found = [plan[name] for name in PRICES]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": which,
                "y": list(PRICES.values()),
                "x": [result.value for result in found],
                "error_x": spread(found),
                "marker": {"color": colour(colours, which), "symbol": MARKS[which]["symbol"], "size": 12},
                "hovertemplate": f"{which}, %{{y}}: $%{{x:,.3g}} a million tokens (estimate)<extra></extra>",
            }
        )
    return figure(
        traces,
        210,
        xaxis=axis("$ a million tokens (estimate)", type="log", tickprefix="$", dtick=1, exponentformat="none"),
        yaxis={"autorange": "reversed", "automargin": True, "type": "category"},
    )


def prices_table(plans: dict[str, Plan]) -> pd.DataFrame:
    return pd.DataFrame(
        {"tokens": list(PRICES.values())}
        | {f"{which} ($/M, estimate)": [round(plan[name].value, 5) for name in PRICES] for which, plan in plans.items()}
    )
