"""The batching page: choose an experiment, run it, watch it go on, see the picture with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from backend.experiments import Experiment, ExperimentError, Result, chunked, race, sweep, uploaded, waves
from backend.experiments.client_sweep import client_sweep
from backend.experiments.load import Server
from backend.experiments.races import course
from pages.widgets import batching_charts, batching_results, capabilities, progress, service
from pages.widgets.charts import Colours
from pages.widgets.format import plain

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (16, 64, 256, 512, 1024, 2048, 4096)
CHUNKS = (0, 32, 64, 128, 256, 512, 1024)
RACES = {
    "cache": "No cache | cache",
    "memory": "Reserve | first fit | paged",
    "preemption": "Recompute | swap",
    "prefix": "Prefix cache off | on",
}
KINDS = {"bimodal": "20 or 800", "uniform": "20 to 800", "exponential": "exponential", "uploaded": "my own"}


@dataclass(frozen=True)
class Choice:
    """An experiment on the page. `form` draws its settings; with them it returns the name that a run is kept under."""

    question: str
    form: Callable[[], tuple[str, Any]]
    run: Callable[[Any, Any], Experiment]
    figures: Callable[[Result, Colours], list[tuple[str, go.Figure]]]


def _sweep_form(*, roof: bool = True) -> tuple[str, sweep.Settings]:
    batches = st.pills("Batch sizes", BATCHES, default=BATCHES[:6], selection_mode="multi", key="sweep_batches")
    contexts = st.pills(
        "Context (tokens)", CONTEXTS, default=(64, 256), selection_mode="multi", key="sweep_contexts",
        help="Tokens in the cache of each request when measuring begins.",
    )  # fmt: skip
    steps = st.number_input("Steps a point", 3, 1000, 12, key="sweep_steps", width=125)
    roof = roof and st.toggle(
        "Bound", True, key="sweep_roof",
        help="The lower bound needs the device's ceilings, which are measured first if nobody has yet: some seconds.",
    )  # fmt: skip
    kept_as = f"sweep of {service.get().where}" if service.get().attached else "sweep"
    return kept_as, sweep.Settings(tuple(batches), tuple(contexts), int(steps), measure_roof=roof)


def _waves_form() -> tuple[str, waves.Settings]:
    kind = st.segmented_control(
        "Lengths of the answers (tokens)",
        list(KINDS),
        format_func=KINDS.get,
        default="bimodal",
        required=True,
        key="waves_kind",
    )
    slots = st.number_input("Slots", 1, 256, 8, key="waves_slots", width=105)
    if kind == "uploaded":
        file = st.file_uploader("One number of output tokens a line, or a trace (CSV, JSON lines)", key="waves_file")
        lengths = uploaded.lengths(file.getvalue()) if file else ()
        return "waves", waves.Settings(kind="uploaded", slots=int(slots), lengths=lengths)
    requests = st.number_input("Requests", 1, waves.MOST_REQUESTS, 128, key="waves_requests", width=125)
    scale = st.number_input(
        "Lengths ÷", 1.0, 100.0, 16.0, key="waves_scale", width=125,
        help="So that it ends within a minute on a small machine: 20 or 800 tokens ÷ 16 are 1 or 50.",
    )  # fmt: skip
    seed = st.number_input("Seed", 0, 999, 0, key="waves_seed", width=105)
    return "waves", waves.Settings(kind, int(requests), int(slots), float(scale), seed=int(seed))


def _chunked_form() -> tuple[str, chunked.Settings]:
    chunks = st.pills(
        "Chunks of the prompt (tokens)", CHUNKS, default=(0, 512, 128), selection_mode="multi", key="chunk_sizes",
        format_func=lambda chunk: f"{chunk:,}" if chunk else "whole",
    )  # fmt: skip
    prompt = st.number_input("Prompt (tokens)", 16, 100_000, 1024, key="chunk_prompt", width=160)
    decoders = st.number_input("Decoders", 1, 256, 8, key="chunk_decoders", width=140)
    return "chunked", chunked.Settings(tuple(chunks), int(decoders), int(prompt))


def _race_form() -> tuple[str, race.Settings]:
    kind = st.segmented_control(
        "Lanes", list(RACES), format_func=RACES.get, default="cache", required=True, key="race_kind"
    )
    size = st.segmented_control(
        "Size", ["small", "full"], default="small", required=True, key="race_size",
        help="Full: the numbers of the text, which takes long on a small machine. Small: scaled down, same formula.",
    )  # fmt: skip
    return f"race: {kind}", race.Settings(kind, size)


def _race_figures(result: Result, colours: Colours) -> list[tuple[str, go.Figure]]:
    track = course(result.settings["kind"], result.settings["size"])
    return batching_charts.race(result, colours, track.odometer, track.unit)


CHOICES = {
    "Batch sweep": Choice(
        "What does a batch cost, and what does it give? Decode steps of each batch size, measured.",
        _sweep_form,
        sweep.sweep,
        batching_charts.sweep,
    ),
    "Static or continuous": Choice(
        "The same requests twice: in batches that run until their longest answer ends, and in slots refilled at once.",
        _waves_form,
        waves.waves,
        batching_charts.waves,
    ),
    "Chunked prefill": Choice(
        "A long prompt arrives among decoders. What does it do to the time between their tokens?",
        _chunked_form,
        chunked.chunked,
        batching_charts.chunked,
    ),
    "Race": Choice(
        "The same requests in two or three lanes that differ in one switch, on the real engine, one after the other.",
        _race_form,
        race.race,
        _race_figures,
    ),
}


ATTACHED = {
    "Batch sweep": Choice(
        "What does a batch cost, and what does it give? Requests that stream together, timed where they arrive.",
        lambda: _sweep_form(roof=False),
        lambda client, settings: client_sweep(Server(client.url, client.headers), settings),
        batching_charts.sweep,
    )
}


def show() -> None:
    attached = service.get().attached
    choices = ATTACHED if attached else CHOICES
    name = st.segmented_control(
        "Experiment", list(choices), default="Batch sweep", required=True, key="experiment", bind="query-params",
        label_visibility="collapsed",
    )  # fmt: skip
    choice = choices[name if name in choices else next(iter(choices))]
    if attached:
        _not_ours(choice)
    else:
        st.caption(f"{choice.question} Needs an idle engine; its switches are put back after the run.")
    kept_as, settings, problem = "", None, ""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium", key="settings"):
        try:
            kept_as, settings = choice.form()
            settings.check()
        except ExperimentError as error:
            problem = str(error)
        _run_buttons(choice, kept_as, settings, bool(problem))
    if problem:
        st.caption(f":material/info: {plain(problem)}")
    _progress()
    if kept_as and (job := service.get().lab.last(kept_as)):
        batching_results.show(choice.figures, kept_as, job)


def _not_ours(choice: Choice) -> None:
    """What an attached server can be asked, and what not."""
    where = service.get().where
    st.caption(plain(f"{choice.question} This sends real load to {where}; what others ask there meanwhile counts too."))
    why = capabilities.missing("switches")
    rest = ", ".join(name for name in CHOICES if name not in ATTACHED)
    reason = capabilities.reason(why) if why else "They cannot be changed from outside."
    st.caption(f":material/info: {plain(rest)}: not here, they compare switches of an engine. {reason}")
    capabilities.explain("batching")


def _run_buttons(choice: Choice, kept_as: str, settings: Any, wrong: bool) -> None:
    found = service.get()
    running = found.lab.running
    if running:
        st.button("Stop", key="stop_experiment", icon=":material/stop:", on_click=running.stop)
        return
    st.button(
        "Run",
        key="run_experiment",
        icon=":material/play_arrow:",
        disabled=wrong or found.status.phase != "ready",
        on_click=_start,
        args=(choice, kept_as, settings),
    )


def _start(choice: Choice, kept_as: str, settings: Any) -> None:
    found = service.get()
    try:
        found.lab.start(kept_as, choice.run(found.client, settings))
    except ExperimentError as error:
        st.toast(plain(str(error)), icon=":material/error:", duration="long")


def _progress() -> None:
    job = service.get().lab.running
    if job is not None:
        progress.bar(job)
