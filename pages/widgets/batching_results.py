"""What an experiment on the batching page ended with: numbers, picture, tables, conditions."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go
import streamlit as st

from backend.experiments import Number, Result
from backend.experiments.job import Job
from backend.experiments.races import course
from pages.widgets import live, modelled
from pages.widgets.charts import Colours
from pages.widgets.format import duration, figures, plain
from pages.widgets.theme import tokens

LANE_POINTS = 300  # of a lane, that travel to the browser


def show(draw: Callable[[Result, Colours], list[tuple[str, go.Figure]]], kept_as: str, job: Job) -> None:
    if job.state == "failed":
        kept = "" if job.result is None else " What was measured until then is below."
        st.error(f"{plain(job.error)}{kept}", title="It could not go on", icon=":material/error:")
    elif job.state == "stopped":
        kept = "Nothing was measured yet." if job.result is None else "What was measured until then is below."
        st.info(kept, title="Stopped", icon=":material/stop_circle:")
    result = job.result
    if result is None or result.table.empty:
        return
    modelled.stamp(result)
    if result.numbers:
        with st.container(horizontal=True, gap="small", key="result_numbers"):
            for number in result.numbers[:5]:
                _number(number)
    if job.running:
        st.caption("The picture is drawn when the run ends.")
        return
    if kept_as.startswith("race"):
        _lanes(result)
    colours = tokens()["dark" if st.context.theme.type == "dark" else "light"]
    drawn = draw(result, colours)
    columns = st.columns(len(drawn), gap="medium")
    for place, (column, (title, figure)) in enumerate(zip(columns, drawn, strict=True)):
        with column:
            st.markdown(f"**{title}**")
            st.plotly_chart(
                figure,
                key=f"{kept_as}-{place}",
                config={"displaylogo": False},
                alt=f"{title}: the table has its numbers",
            )
    _tables(kept_as, result)
    for note in result.notes:
        st.caption(plain(note))
    st.caption(plain(_machine(result, job)))


def _lanes(result: Result) -> None:
    """All lanes on one clock, with their odometers."""
    track = course(result.settings["kind"], result.settings["size"])
    lanes = []
    for name, rows in result.tables["lanes"].groupby("lane", sort=False):
        every = rows[["time (s)", track.odometer, "output tokens"]].round(4).to_numpy().tolist()
        stride = -(-len(every) // LANE_POINTS)
        lanes.append({"name": name, "total": every[-1][2], "points": [*every[:-1:stride], every[-1]]})
    live.view("race", title=track.title, lanes=lanes, odometer=track.odometer, unit=track.unit)


def _number(number: Number) -> None:
    value = "–" if number.value is None else f"{_amount(number.value)} {number.unit}".strip()
    st.metric(
        number.name[:1].upper() + number.name[1:], value, help=plain(f"{number.evidence}: {number.source}"),
        delta=number.conditions, delta_color="off", delta_arrow="off", border=True,
    )  # fmt: skip


def _amount(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else figures(value)


def _tables(kept_as: str, result: Result) -> None:
    st.dataframe(result.table.round(3), hide_index=True, key=f"table-{kept_as}", alt=f"Results of {kept_as}")
    for name, frame in result.tables.items():
        box = st.expander(
            f"Table: {name}", key=f"more-{kept_as}-{name}", icon=":material/table:", type="compact", on_change="rerun"
        )
        if box.open:
            with box:
                st.dataframe(
                    frame.round(4), hide_index=True, height=260, key=f"frame-{kept_as}-{name}", alt=f"{name}, {kept_as}"
                )


def _machine(result: Result, job: Job) -> str:
    model, device = result.machine.get("model", {}), result.machine.get("device", {})
    took = "" if job.took_s is None else f" Took {duration(job.took_s)}."
    threads = f", {device['threads']} threads" if device.get("threads") else ""
    return (
        f"{model.get('name', '?')}, {model.get('dtype', '')}, on {device.get('name') or 'this device'}{threads}.{took}"
        f" Asked for: {_settings(result)}."
    )


def _settings(result: Result) -> str:
    """As they were when it ran: the widgets above may say something else by now."""
    said = []
    for name, value in result.settings.items():
        if isinstance(value, (tuple, list)):
            value = ", ".join(f"{one:,}" for one in value) if len(value) <= 12 else f"{len(value):,} of one's own"
        if value != "":
            said.append(f"{name.replace('_', ' ')} {value}")
    return "; ".join(said)
