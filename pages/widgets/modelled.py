"""Playing a configuration of the explorer on the engine itself: real scheduler and blocks, modelled step times."""

from __future__ import annotations

import streamlit as st

from backend.experiments import Result
from backend.fold import State
from backend.planner import accelerators, catalogue
from backend.planner.plan import Setup
from backend.sources import SourceError
from pages.widgets import service
from pages.widgets.format import plain

SPEEDS = (1, 10, 100)
FASTER = "times as fast"  # how the engine's note says that modelled time does not pass as ours


def words(*, by_client: bool = False) -> str:
    """What is modelled of the engine that is shown, "" where it computes. `by_client`: for times that are taken with
    a clock of ours, which does not know how fast modelled time passes."""

    def read(state: State) -> str:
        return state.model.notes[0] if state.evidence == "modelled" and state.model.notes else ""

    said = service.get().hub.read(read)
    if by_client and FASTER in said:
        said += " The client's clock is not: multiply its times by that, divide its rates."
    return said


def stamp(result: Result) -> None:
    """Above results: that they are modelled, and how. Nothing where they were measured."""
    if not result.modelled:
        return
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key=f"modelled_{result.name}"):
        st.badge("MODELLED", icon=":material/architecture:", color="violet")
        st.markdown(plain(result.modelled), width="stretch")


def play(which: str, setup: Setup, model: str, gpu: str) -> None:
    """A button, and how fast time passes. `model` and `gpu`: keys of the catalogues; others cannot be played."""
    source = service.get().source
    known = model in catalogue.models() and gpu in accelerators.load()
    why = (
        "The engine runs elsewhere: start one there with --on."
        if not source.can_restart
        else "Only what is in the catalogues can be played."
        if not known
        else "Pipeline stages cannot be played: set PP to 1."
        if setup.pp > 1
        else None
    )
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.button(
            f"Play {which} here",
            key=f"play_{which}",
            icon=":material/play_arrow:",
            disabled=why is not None,
            help=why
            or "The engine restarts on this configuration: its own scheduler and blocks, step times from the planner. "
            "Then open the cockpit, and press 32 users.",
            on_click=_play,
            args=(which, model, gpu, setup),
        )
        st.segmented_control(
            "Time passes",
            SPEEDS,
            default=1,
            required=True,
            key=f"speed_{which}",
            format_func=lambda speed: f"× {speed}",
            label_visibility="collapsed",
            help="How many modelled seconds pass in one of ours.",
        )


def _play(which: str, model: str, gpu: str, setup: Setup) -> None:
    try:
        service.get().play(
            model,
            gpu,
            tp=setup.tp,
            dtype=setup.weights.name,
            kv=setup.kv.name,
            speed=st.session_state.get(f"speed_{which}", 1),
        )
    except (SourceError, OSError) as error:
        st.toast(f"It could not be started: {plain(str(error))}", icon=":material/error:")
    else:
        st.toast("The engine restarts as a modelled one. The cockpit shows it.", icon=":material/architecture:")
