"""How far a job of the lab is, on whatever page started it."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from backend.experiments.job import Job
from pages.widgets.format import duration, plain

REFRESH_S = 0.5


def words(job: Job, decimals: int = 0) -> str:
    """What is done, and how long it will take yet; `decimals` of minutes."""
    now = job.progress
    left = "" if now.left_s is None else f", about {duration(now.left_s, decimals)} left"
    return f"{job.name}: {now.note}{left}"


def bar(job: Job, words: Callable[[Job], str] = words, below: Callable[[], None] = lambda: None) -> None:
    """A bar that moves by itself while `job` runs; when it ends, the page is drawn anew. `words` say where it is, as
    data; `below` draws what has been found so far."""

    @st.fragment(run_every=REFRESH_S)
    def moving() -> None:
        if not job.running:
            st.rerun()
        st.progress(job.progress.share, text="stopping" if job.stopping else plain(words(job)))
        below()

    moving()
