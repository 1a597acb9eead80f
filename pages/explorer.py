"""Which model fits which GPU, how fast, at what cost?"""

import streamlit as st

from backend.planner import catalogue, levers, plan, sweep
from backend.planner.errors import CatalogueError, PlannerError
from pages.widgets import (
    explorer,
    explorer_board,
    explorer_charts,
    explorer_curves,
    explorer_map,
    explorer_working,
    modelled,
    theme,
)
from pages.widgets.format import plain

units = st.session_state.units
colours = theme.tokens()["dark" if st.context.theme.type == "dark" else "light"]
MODE = explorer.MODE
CHART = {"displayModeBar": False}

st.subheader("Explorer: which model fits which GPU, how fast, at what cost?", anchor=False)
try:
    own, own_model, dots = explorer.this_machine()
    known = explorer.parts(own)
    catalogue.models()
except CatalogueError as error:
    st.error(plain(str(error)), title="A catalogue cannot be used", icon=":material/error:")
    st.stop()

side_a, side_b = st.columns(2, gap="large")
for column, which in ((side_a, "A"), (side_b, "B")):
    with column.container(border=True, gap="small"):
        explorer.configuration(which, known)
explorer.workload()

plans: dict[str, plan.Plan] = {}
for column, which in ((side_a, "A"), (side_b, "B")):
    with column:
        try:
            plans[which] = plan.make(explorer.setup(which, known))
        except PlannerError as error:
            explorer.refusal(which, error)
        else:
            modelled.play(which, plans[which].setup, *explorer.chosen(which))
            for note in plans[which].notes:
                st.caption(f":material/info: {plain(note)}")
if "A" not in plans:
    st.stop()  # B is told against A

# ---- the answers -----------------------------------------------------------------------------------------------------

explorer_working.side_by_side(plans, units)

left, right = st.columns(2, gap="medium")
with left:
    st.markdown("**Memory of one GPU** · computed")
    st.plotly_chart(
        explorer_charts.memory(plans, colours, units),
        key="chart_memory",
        config=CHART,
        alt="Memory of one GPU by what holds it, for each configuration",
    )
    explorer_working.table("memory", lambda: explorer_charts.memory_table(plans, units), "Memory of one GPU by part")
with right:
    st.markdown("**A decode step**: what it reads, what it computes · bound, and estimate")
    st.plotly_chart(
        explorer_charts.step(plans, colours),
        key="chart_step",
        config=CHART,
        alt="Milliseconds of a decode step by weights, KV and arithmetic, with the range of servers",
    )
    explorer_working.table("step", lambda: explorer_charts.step_table(plans), "Milliseconds of a decode step")

# ---- curves ----------------------------------------------------------------------------------------------------------

left, right = st.columns([3, 2], gap="medium")
with left:
    knob = st.segmented_control(
        "Output tok/s against",
        [*sweep.KNOBS],
        default="batch",
        required=True,
        key="sweep",
        format_func=lambda name: "TP" if name == "tp" else name.replace("_", " "),
        **MODE,
    )
    sweeps = {which: sweep.sweep(made.setup, knob) for which, made in plans.items()}
    here = [
        which
        for which, made in plans.items()
        if own and made.setup.accelerator is own and st.session_state.get(f"{which.lower()}_model") == own_model
    ]
    st.plotly_chart(
        explorer_curves.rates(sweeps, knob, getattr(plans["A"].setup, knob), colours, dots if here else []),
        key="chart_rates",
        config=CHART,
        alt=f"Output tokens a second against {explorer_curves.NAMES[knob]}: ceilings, and the range of servers",
    )
    explorer_working.table("sweep", lambda: explorer_curves.sweep_table(sweeps, knob), "The curves as numbers")
with right:
    st.markdown("**Sequences that fit, against context** · computed")
    rooms = {which: sweep.sweep(made.setup, "context") for which, made in plans.items()}
    st.plotly_chart(
        explorer_curves.room(rooms, plans["A"].setup.context, colours),
        key="chart_room",
        config=CHART,
        alt="Sequences that fit at once against context, for each configuration",
    )
    explorer_working.table("room", lambda: explorer_curves.sweep_table(rooms, "context"), "Sequences that fit")

left, right = st.columns([3, 2], gap="medium")
with left:
    choose, of = st.columns([3, 1], gap="small")
    shown = choose.segmented_control(
        "Levers, ranked by computed gain on",
        [*explorer_board.GAINS],
        default="Decode tok/s",
        required=True,
        key="gain",
        **MODE,
    )
    of_which = of.segmented_control("of", [*plans], default="A", required=True, key="gain_of", **MODE)
    ranked = levers.rank(plans.get(of_which, plans["A"]).setup, explorer_board.GAINS[shown])
    st.plotly_chart(
        explorer_board.board(ranked, shown, colours),
        key="chart_levers",
        config=CHART,
        alt=f"Levers ranked by their computed gain on {shown}",
    )
    explorer_working.table("levers", lambda: explorer_board.board_table(ranked), "Levers and their gains")
with right:
    st.markdown("**What a million tokens cost** · estimate")
    st.plotly_chart(
        explorer_charts.prices(plans, colours),
        key="chart_prices",
        config=CHART,
        alt="Dollars a million tokens: output, input and cached input, for each configuration",
    )
    explorer_working.table("prices", lambda: explorer_charts.prices_table(plans), "Dollars a million tokens")

explorer_map.show(plans["A"].setup, colours)

with st.expander(
    "All other figures, each with its working", key="also", icon=":material/calculate:", on_change="rerun"
) as box:
    if box.open:
        explorer_working.also(plans, units)
