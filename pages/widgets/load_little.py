"""Little's law on the page: measured beside the book's exercise."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from backend.experiments.little import RULE, Capacity
from pages.widgets import load_charts
from pages.widgets.format import figures, plain

ICONS = {"steady": ":material/check_circle:", "unstable": ":material/warning:", "too early": ":material/hourglass_top:"}


def show(row: dict | None, law: pd.DataFrame, colours: load_charts.Colours) -> None:
    """`row` of the sweep's table for the rate at hand; None: nothing was measured yet."""
    st.subheader("Little's law: L = λW", anchor=False)
    measured, book = st.columns([3, 2], gap="medium")
    with measured:
        if row is None:
            st.caption("Run a load: L, λ and W are then measured apart from each other, and what is left is drawn.")
        else:
            st.markdown(f"{ICONS[row['little']]} **{row['little']}** – {plain(row['little_why'])}")
        if row is not None and not law.empty:
            working = (
                f"L = {row['l_mean']:.2f} in flight · λ = {row['left_per_s']:.3f} req/s · W = {row['w_mean_s']:.3f} s "
                f"· λW = {row['left_per_s'] * row['w_mean_s']:.2f} · residual {row['little_residual']:+.1%}"
            )
            st.caption(working, help=plain(f"measured. {RULE}"))
            st.plotly_chart(
                load_charts.little(law, colours), key="load_chart_little", config={"displaylogo": False},
                alt="L and λW over time, and their difference: the table has the numbers",
            )  # fmt: skip
            box = st.expander("Table: Little's law", icon=":material/table:", type="compact", on_change="rerun")
            if box.open:
                box.dataframe(law, hide_index=True, height=240, alt="L, λ, W and the residual over time")
    with book:
        _exercise()


def _exercise() -> None:
    st.markdown("**How much can so many places sustain?**")
    with st.container(horizontal=True, gap="small"):
        places = st.number_input("In flight (L)", 1, 100_000, 40, key="little_l", width=120)
        tokens = st.number_input("Tokens each", 1, 1_000_000, 1000, key="little_tokens", width=130)
        tpot = st.number_input("TPOT (ms)", 0.01, 60_000.0, 25.0, 5.0, "%g", key="little_tpot", width=120)
    found = Capacity(places, tokens, tpot / 1000)
    st.markdown(
        f"- W = {tokens:,} × {tpot:g} ms = **{figures(found.w_s)} s**\n"
        f"- λ = L / W = {places:,} / {figures(found.w_s)} s = **{figures(found.rate_per_s)} requests/s**\n"
        f"- {places:,} streams × {figures(1000 / tpot)} tok/s = **{figures(found.tokens_per_s)} tok/s** in all"
    )
    st.caption(
        f"Computed; time to first token left out. If more than {figures(found.rate_per_s)} requests arrive each "
        "second, the queue grows without bound, whatever its length is now: the residual of an overloaded run shows it."
    )
