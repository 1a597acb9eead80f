"""The strip on every page: what runs, where, how it is doing. It is drawn again when the live connection says that
something of it has changed; where there is none, by a timer, and its reruns feed the page's pictures too."""

from __future__ import annotations

from typing import NamedTuple

import streamlit as st

from backend.fold import State
from backend.sources import SourceError
from backend.sources.status import Status
from pages.widgets import capabilities, live, service
from pages.widgets.format import badge, plain, size

SOURCES = {
    "embedded": "engine of this page: started, watched and ended by it",
    "remote": "KVScope engine at an address of its own",
    "modelled": "same scheduler, step times computed by the planner",
    "replay": "recording",
}


class Facts(NamedTuple):
    """What the strip reads of the state, copied under the hub's lock."""

    model: str
    model_help: str
    dtype: str
    dtype_help: str
    device: str
    device_help: str
    source: str
    evidence: str
    in_flight: int
    attached: str  # what it is, of an engine that is not ours; "": it is


def facts(state: State, units: str) -> Facts | None:
    """None while nothing was heard of an engine."""
    if not state.epoch:
        return None
    model, device, capable = state.model, state.device, state.capabilities
    weights = "random weights" if model.weights == "random" else "weights as published"
    about = [  # of an attached server's model little is told
        model.parameters and f"{model.parameters / 1e6:,.1f} M parameters",
        model.weight_bytes and size(model.weight_bytes, units),
        model.weight_bytes and weights,
        model.layers and f"{model.layers} layers",
        model.heads and f"{model.heads} query heads, {model.kv_heads} KV heads of {model.head_dim}",
        model.kv_bytes_per_token and f"{size(model.kv_bytes_per_token, units)} of KV cache a token",
        model.max_model_len and f"context of {model.max_model_len:,} tokens",
    ]
    machine = [
        f"{device.threads} threads" if device.threads else "",
        size(device.memory_bytes, units) if device.memory_bytes else "",
    ]
    return Facts(
        model=model.name.rstrip("/").rpartition("/")[2] or model.name,
        model_help=". ".join(filter(None, [model.name, *about])),
        dtype=model.dtype,
        dtype_help=". ".join(model.notes) or "as the model was published",
        device=""
        if device.kind == "unknown"
        else " ".join(filter(None, [device.kind.upper(), device.name if device.kind != "cpu" else ""])),
        device_help=", ".join(filter(None, [device.name, *machine])) or device.kind,
        source=state.source or "engine",
        evidence=state.evidence or "measured",
        in_flight=service.at_work(state),
        attached=" ".join(filter(None, [capabilities.title(capable.kind), capable.version])),
    )


def condition(status: Status, in_flight: int) -> tuple[str, str, str]:
    """(words, colour, icon) of the engine's state."""
    if status.phase == "ready":
        if status.message:  # of an attached server: its numbers are old
            return "no fresh numbers", "orange", ":material/hourglass_bottom:"
        if in_flight:
            return "busy", "blue", ":material/bolt:"
        return "ready", "green", ":material/check_circle:"
    return {
        "starting": ("starting", "orange", ":material/hourglass_top:"),
        "refused": ("refused", "red", ":material/block:"),
        "dead": ("not running", "red", ":material/error:"),
        "stopped": ("stopped", "gray", ":material/stop_circle:"),
    }[status.phase]


def show(units: str) -> Status:
    """The strip, and below it what is wrong and what to do. Returns the status that the page was drawn with."""
    drawn, fixed = service.get().status, service.get().fixed()
    feed = live.by_rerun()

    @st.fragment(run_every=live.FALLBACK_S if feed else None)
    def strip() -> None:
        found = service.get()
        pulse, status = found.pulse(), found.status  # in this order: what changes in between is seen by the next pulse
        if found.fixed() != fixed:
            st.rerun()  # what stands outside of this strip depends on it, and another tab may have changed it
        _badges(found, status, units)
        if feed:
            live.feed()
        else:
            live.view("pulse", pulse=pulse)

    strip()
    _trouble(drawn)
    return drawn


def _badges(found: service.Service, status: Status, units: str) -> None:
    known = found.hub.read(lambda state: facts(state, units))
    words, colour, icon = condition(status, known.in_flight if known else 0)
    with st.container(horizontal=True, gap="xsmall", vertical_alignment="center", key="strip"):
        if known:
            st.badge(badge(known.model), icon=":material/neurology:", color="gray", help=plain(known.model_help))
            if known.dtype:
                st.badge(badge(known.dtype), color="gray", help=plain(known.dtype_help))
            if known.device:
                st.badge(badge(known.device), icon=":material/memory:", color="gray", help=plain(known.device_help))
            if found.attached:
                _attached(known.attached, found.where)
            else:
                st.badge(
                    badge(known.source),
                    icon=":material/sensors:",
                    color="gray",
                    help=SOURCES.get(known.source, "engine"),
                )
                _evidence(known.evidence)
        # Last, as its width changes: nothing beside it may jump.
        st.badge(words, icon=icon, color=colour, help=_why(status))
        if not known and status.phase == "starting":
            st.markdown(plain(status.lines[-1] if status.lines else status.message), width="content")


def _attached(what: str, where: str) -> None:
    st.badge(
        badge(f"ATTACHED: {what} at {where}"),
        icon=":material/cable:",
        color="blue",
        help="A server that is not ours. Numbers are those that it exports, read again and again, and what our own "
        "requests see at their client. “What it tells” says what can be known of it, and how well.",
    )


def _evidence(evidence: str) -> None:
    if evidence == "modelled":
        st.badge(
            "MODELLED",
            icon=":material/architecture:",
            color="violet",
            help="No model computes here. Scheduler, queue and blocks are the real engine's; how long a step takes is "
            "what the planner expects of this accelerator, and the text means nothing.",
        )
        if service.get().source.can_restart:
            st.button("Back to the real engine", key="real", type="tertiary", on_click=_back)
    else:
        st.badge(badge(evidence), color="green", help="All numbers here are counted or timed by the engine as it runs.")


def _back() -> None:
    try:
        service.get().play_no_more()
    except (SourceError, OSError) as error:
        st.toast(f"It could not be started: {plain(str(error))}", icon=":material/error:")


def _why(status: Status) -> str | None:
    return plain(status.message) or None


def _trouble(status: Status) -> None:
    """Only for what needs a person; a starting engine is shown by the strip."""
    if status.phase in ("ready", "starting"):
        return
    source = service.get().source
    titles = {
        "refused": "The engine refuses to serve",
        "dead": "The server does not answer" if source.kind == service.ATTACHED else "The engine is not running",
        "stopped": "The engine is stopped",
    }
    where = (
        "Restart it below."
        if source.can_restart
        else "It runs elsewhere: start it there, this page finds it again by itself."
    )
    st.error(f"{plain(status.message)}\n\n{where}", title=titles[status.phase], icon=":material/error:")
    if source.can_restart:
        st.button("Restart the engine", key="restart", icon=":material/restart_alt:", on_click=_restart)
    if status.lines:
        with st.expander("Last lines of its log", expanded=status.phase == "dead", key="log"):
            st.code("\n".join(status.lines), language=None)


def _restart() -> None:
    try:
        service.get().source.restart()
    except OSError as error:
        st.toast(f"It could not be started: {plain(str(error))}", icon=":material/error:")
