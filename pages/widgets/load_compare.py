"""Our own engine and another server under the same load, side by side."""

from __future__ import annotations

import time

import pandas as pd
import streamlit as st

from backend.experiments import Experiment, ExperimentError, Progress, load
from backend.experiments.compare import NAME, compare
from backend.experiments.job import Job
from backend.sources import Source
from backend.sources.remote import EngineError
from pages.widgets import load_charts, service
from pages.widgets.format import plain
from pages.widgets.theme import tokens

OURS = "our own engine"
START_S = 180.0  # for an engine that was stopped, with its model
LOOK_S = 0.2
METRICS = ("ttft", "tpot", "e2e")


def show(server: load.Server | None, settings: load.Settings | None) -> None:
    """The button, once there is a second server, and what was found."""
    found = service.get()
    own = found.own
    other = server if server is not None and own is not None and _elsewhere(server, own) else None
    job = found.lab.last(NAME)
    if other is None and job is None:
        return
    st.markdown("**Side by side: our own engine and another server**")
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="load_compare"):
        st.button(
            "Compare",
            key="compare_start",
            icon=":material/compare_arrows:",
            disabled=other is None or settings is None or found.lab.running is not None,
            help="The same words at the same times, to our own engine first, then to the other one. An engine of ours "
            "that is stopped is started for it, and stopped again.",
            on_click=_start,
            args=(own, other, settings),
        )
        where = plain(other.url) if other is not None else "another server: attach to one, or choose it above"
        st.caption(f"With the load above: {OURS}, then {where}.")
    if job is not None and not job.running:
        _outcome(job)


def _elsewhere(server: load.Server, own: Source) -> bool:
    try:
        return server.url != own.client.url
    except EngineError:  # it is stopped, so this is not it
        return True


def _start(own: Source, other: load.Server, settings: load.Settings) -> None:
    try:
        service.get().lab.start(NAME, both(own, other, settings))
    except ExperimentError as error:
        st.toast(plain(str(error)), icon=":material/error:", duration="long")


def both(own: Source, other: load.Server, settings: load.Settings) -> Experiment:
    """`compare`, with our own engine running for as long as it takes."""
    stopped = own.engine is not None and own.engine.url is None
    try:
        if stopped:
            own.engine.start()
        yield from _until_ready(own)
        ours = load.Server(own.client.url, own.client.headers)
        return (yield from compare([(OURS, ours), (other.url, other)], settings))
    except (EngineError, OSError) as error:
        raise ExperimentError(f"{OURS}: {error}") from None
    finally:
        if stopped and service.get().attached:  # meanwhile a person may have come back to it
            own.engine.stop()


def _until_ready(own: Source):
    deadline = time.monotonic() + START_S
    while (status := own.status).phase != "ready":
        if status.phase in ("dead", "refused") or time.monotonic() > deadline:
            raise ExperimentError(f"{OURS} does not serve: {status.message or status.phase}")
        yield Progress(0, 1, None, f"{OURS} is starting")
        time.sleep(LOOK_S)


def _outcome(job: Job) -> None:
    if job.state == "failed":
        st.error(plain(job.error), title="It could not be compared", icon=":material/error:")
    result = job.result
    if result is None or result.table.empty:
        return
    colours = tokens()["dark" if st.context.theme.type == "dark" else "light"]
    for column, metric in zip(st.columns(len(METRICS), gap="small"), METRICS, strict=True):
        with column:
            st.markdown(f"**{metric.upper()} against achieved rate**")
            st.plotly_chart(
                load_charts.compared(result.table, metric, colours),
                key=f"compare_{metric}",
                config={"displaylogo": False},
                alt=f"{metric.upper()} of both servers: the table has its numbers",
            )
    side: pd.DataFrame = result.tables["ratio"]
    if len(side):
        st.dataframe(side.round(4), hide_index=True, key="compare_ratio", alt="Both servers side by side")
    for note in result.notes:
        st.caption(plain(note))
    st.caption(plain("; ".join(f"{name}: {what}" for name, what in result.machine.items())))
