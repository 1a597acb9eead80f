"""Side by side, and the working behind every figure: formula with its values, parts, kind of statement, source."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import streamlit as st

from backend.planner import compare
from backend.planner.plan import Plan
from backend.planner.results import Result
from backend.planner.words import result_words, value_words
from pages.widgets.format import plain

WIDTHS = (2.4, 1.7, 1.7, 4.2)
KINDS = {
    "exact": ("green", "counted exactly from the configuration"),
    "bound": ("blue", "computed: no machine with these rates does better"),
    "estimate": ("orange", "computed: a bound times what servers reach, or an assumption"),
    "measured": ("green", "measured"),
}
ALSO = {  # without a place in the comparison
    "per_user": "tok/s for each user, at most",
    "step_estimate": "Decode step of a server",
    "rate": "Decode rate of a server",
    "ttft_estimate": "TTFT of a server, no queue",
    "kv_per_token": "KV of a token",
    "weights_read": "Weights that a step reads",
    "cache_equals_weights": "Tokens from which KV outweighs weights",
    "crossover": "Batch that computes longer than it reads",
    "ridge": "Ridge",
    "chunked_step": "Step with a prompt's chunk in it",
    "offload": "A sequence's KV over the bus",
    "exchange": "Exchange between GPUs, a step",
    "cost_input": "Input tokens",
    "cost_cached": "Cached input tokens",
    "joules": "Energy",
}


def side_by_side(plans: dict[str, Plan], units: str) -> None:
    """One row a measure; each value opens its working."""
    a, b = plans["A"], plans.get("B")
    with st.container(gap="xsmall"):
        columns = st.columns(WIDTHS, gap="small", vertical_alignment="bottom")
        for column, which in zip(columns[1:3], plans, strict=False):
            column.markdown(f"**{which}** · {plain(_short_name(plans[which]))}")
        columns[3].markdown("**B against A**, and what makes the difference" if b else "")
        for row in compare.differences(a, b or a):
            label, left, right, why = st.columns(WIDTHS, gap="small", vertical_alignment="center")
            colour = KINDS[row.a.kind][0]
            label.markdown(f"**{row.label}** :{colour}-badge[{row.a.kind}]")
            _figure(left, "A", row.name, row.label, a, units)
            if b:
                _figure(right, "B", row.name, row.label, b, units)
                why.markdown(_words(row))


def _short_name(plan: Plan) -> str:
    setup = plan.setup
    group = f"{setup.gpus} × " if setup.gpus > 1 else ""
    return f"{setup.name}, {group}{setup.accelerator.name.removeprefix('NVIDIA ')}"


def _words(row: compare.Difference) -> str:
    if row.a.value is None or row.b.value is None:
        return "one of them does not fit"
    if not row.better:
        return "the same"
    better = f":{'green' if row.better == 'B' else 'orange'}[**{row.better}** is better]"
    why = f" · {plain(row.why)}" if row.why else ""
    if row.ratio is None:
        return f"{better}{why}"
    factor, way = (row.ratio, "higher") if row.ratio >= 1 else (1 / row.ratio, "lower")
    return f"{factor:.2f} × {way} ({better}){why}"


def also(plans: dict[str, Plan], units: str) -> None:
    """The other figures, each with its working."""
    columns = st.columns(4, gap="small")
    shown = [(which, name, plan) for which, plan in plans.items() for name in ALSO if name in plan.results]
    for index, (which, name, plan) in enumerate(shown):
        place = columns[index % 4].container(gap=None)
        place.caption(f"{which} · {ALSO[name]}")
        _figure(place, which, name, ALSO[name], plan, units)


def _figure(column, which: str, name: str, label: str, plan: Plan, units: str) -> None:
    result = plan[name]
    words = result_words(result, units=units)
    if result.value is None and name == "concurrency":
        words = "does not fit"
    elif result.value is None:
        words = "never" if result.note.startswith("never") else "none"
    with column.popover(plain(words), key=f"work-{which}-{name}", width="stretch", help=KINDS[result.kind][1]):
        working(f"{which}: {label}", result, plan, units)


def working(title: str, result: Result, plan: Plan, units: str) -> None:
    colour, words = KINDS[result.kind]
    st.markdown(f"**{plain(title)}** = **{plain(result_words(result, units=units))}** :{colour}-badge[{result.kind}]")
    st.caption(words)
    if result.low is not None:
        low, high = (result_words(result, end, units) for end in (result.low, result.high))
        st.markdown(plain(f"8 of 10 measurements lay between {low} and {high}."))
    if result.formula:
        st.markdown(f"= {plain(result.formula)}")
    if result.terms:
        shown = [(term, value_words(term.value, term.unit, units)) for term in result.terms]
        lines = [f"- {plain(term.name)}: **{plain(value)}**{_from(term.formula)}" for term, value in shown]
        st.markdown("\n".join(lines))
    if result.note:
        st.caption(plain(result.note))
    part = plan.setup.accelerator
    checked = {"yes": "read there", "partly": "partly read there", "no": "from memory, not checked"}[part.verified]
    st.caption(plain(f"{part.name}, {part.kind}: {part.source}; {checked}. Memory {part.memory_basis}."))


def _from(formula: str) -> str:
    return f" = {plain(formula)}" if formula else ""


@st.fragment
def table(name: str, read: Callable[[], pd.DataFrame], alt: str) -> None:
    """The numbers of a chart; made when it is opened."""
    box = st.expander("Table", key=f"table-{name}", icon=":material/table:", type="compact", on_change="rerun")
    if box.open:
        box.dataframe(read(), hide_index=True, height=260, key=f"frame-{name}", alt=alt)
