"""The phases page's comparison of caches and fast paths, which runs in processes of its own."""

from __future__ import annotations

import streamlit as st

from backend.experiments import ExperimentError, caches
from backend.experiments.job import Job
from pages.widgets import progress, service
from pages.widgets.format import plain

NAME = "caches"


def show() -> None:
    found = service.get()
    st.markdown("**The same model, other caches: DynamicCache, StaticCache, paged, and the fast paths off and on**")
    st.caption(
        "One sequence decodes with each, one after the other, each in a process of its own on this machine. The engine "
        "must be idle. Its own fast paths are chosen when it starts: `--attention`, `--linear`, `--fusion`."
    )
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        running = found.lab.running
        st.button(
            "Compare",
            key="compare_caches",
            icon=":material/play_arrow:",
            disabled=found.status.phase != "ready" or found.source.kind != "embedded" or running is not None,
            help="Takes about a minute. For an engine on another machine this would measure the wrong one.",
            on_click=_start,
        )
        if running and running.name == NAME:
            st.button("Stop", key="stop_caches", icon=":material/stop:", on_click=running.stop)
    job = found.lab.last(NAME)
    if job and job.running:
        progress.bar(job, lambda job: job.progress.note)
    if job:
        _outcome(job)


def _start() -> None:
    found = service.get()
    try:
        found.lab.start(NAME, caches.compare(found.client))
    except ExperimentError as error:
        st.toast(plain(str(error)), icon=":material/error:", duration="long")


def _outcome(job: Job) -> None:
    if job.state == "failed":
        st.error(plain(job.error), title="It could not go on", icon=":material/error:")
    result = job.result
    if result is None or result.table.empty:
        return
    longest = float(result.table["ms a step"].max())
    st.dataframe(
        result.table,
        hide_index=True,
        key="caches_table",
        alt="Milliseconds a decode step by cache and context",
        column_config={
            "ms a step": st.column_config.ProgressColumn(format="%.1f ms", min_value=0, max_value=longest, width=160)
        },
    )
    for note in result.notes:
        st.caption(plain(note))
