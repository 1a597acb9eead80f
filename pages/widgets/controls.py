"""What a person can do: ask, let users in, change switches. All act on the one engine, so every tab shows the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import streamlit as st

from backend.sources.remote import EngineError
from pages.widgets import capabilities, live, service
from pages.widgets.format import plain

USERS = (0, 1, 8, 32, 64)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_BLOCKS = 1_000_000
MOST_TOKENS = 1_000_000
IDLE_WAIT_S = 8.0  # for what was aborted to be gone, a step at the most
NOT_IDLE = 409
POLICIES = {
    "continuous": "Requests enter and leave the batch at every step.",
    "static": "A batch is filled, then runs until its last request is done.",
}
ALLOCATORS = {
    "paged": "Blocks are given out as they fill.",
    "reserve": "All that the context allows, at once and in one piece.",
    "first-fit": "All that the answer may take, in the first hole that is large enough.",
}
PREEMPTIONS = {
    "recompute": "What was computed is dropped and computed again.",
    "swap": "It goes to the host's memory and comes back.",
}


def attempt(action: Callable[[], Any], what: str) -> bool:
    """Runs `action`; a refusal becomes a message instead of a traceback."""
    try:
        action()
    except EngineError as error:
        st.toast(f"{what}: {plain(str(error))}", icon=":material/error:", duration="long")
        return False
    return True


# ---- workload ----------------------------------------------------------------------------------------------------


def workload(*, switches: bool = False) -> None:
    """Users, what they share, and the brake; with `switches` the engine's own controls too.

    Widgets show what runs, whoever started it and in whatever tab.
    """
    found = service.get()
    ready = found.status.phase == "ready"
    counts, habits = found.users.counts, found.habits
    # A count that is none of the choices (a script may set any) is shown by none of them.
    fresh = st.session_state.get(live.NEW_PAGE, False)
    _show("users", counts.users if counts.users in USERS else None, fresh)
    _show("shared_prompt", habits.shared_prompt, fresh)
    _show("break_prefix", habits.break_prefix, fresh)
    with st.container(horizontal=True, vertical_alignment="center", gap="medium", key="workload"):
        st.segmented_control(
            "Users",
            USERS,
            key="users",
            format_func=lambda count: f"{count} users" if count == USERS[-1] else str(count),
            label_visibility="collapsed",
            on_change=_set_users,
            disabled=not ready,
        )
        st.toggle(
            "Shared system prompt",
            key="shared_prompt",
            help="All users begin with the same 350 tokens: the prefix cache holds their blocks once.",
            on_change=lambda: found.set_habits(shared_prompt=st.session_state.shared_prompt),
        )
        st.toggle(
            "Break the prefix",
            key="break_prefix",
            help="Puts a line of the user's own on top of the shared prompt. A block's hash covers all that stands "
            "before it, so no block matches any more: watch the hit rate.",
            on_change=lambda: found.set_habits(break_prefix=st.session_state.break_prefix),
        )
        st.button(
            "Stop all",
            key="stop_all",
            icon=":material/stop_circle:",
            type="tertiary",
            disabled=not ready,
            on_click=lambda: attempt(found.stop_all, "Stop all"),
        )
        st.session_state[live.NEW_PAGE] = False
        if found.attached:
            why = capabilities.missing("switches") if switches else None
            no_switches = f" No switches: {capabilities.reason(why)}" if why else ""
            st.caption(f":material/warning: Users and prompts send real load to {plain(found.where)}.{no_switches}")
        elif switches:
            _switches()
        if counts.users and counts.failed:
            why = plain(counts.last_error)
            st.caption(f":material/warning: {counts.failed} requests of users failed, the last one because: {why}")
    with st.container():  # always there: what comes and goes in it must not move what stands below to another place
        waiting = st.session_state.get("waiting_switches")
        if switches and waiting is not None:
            _busy(waiting)


def _show(key: str, value: Any, fresh: bool) -> None:
    """Sets a widget only where it shows something else, or is new on its page: this overwrites what a person
    clicks meanwhile."""
    if fresh or key not in st.session_state or st.session_state[key] != value:
        st.session_state[key] = value


def _set_users() -> None:
    count, found = st.session_state.users, service.get()
    if count is not None:
        # Two quick clicks come in one rerun, and this callback may be called before a toggle's own.
        found.set_habits(shared_prompt=st.session_state.shared_prompt, break_prefix=st.session_state.break_prefix)
        found.set_users(count)


# ---- prompt ------------------------------------------------------------------------------------------------------


def prompt() -> None:
    """The prompt box. The answer is watched, not waited for: it comes with the events."""
    found = service.get()
    ready = found.status.phase == "ready"
    chat = found.hub.read(lambda state: state.model.chat_template or not state.epoch)
    st.chat_input(
        "Ask the model" if chat else "Begin a text, the model goes on",
        key="prompt",
        disabled=not ready,
        max_chars=50_000,
        on_submit=_ask,
    )
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        with st.popover("Sampling", icon=":material/tune:", type="tertiary"):
            st.number_input(
                "Max tokens",
                1,
                8192,
                256,
                key="max_tokens",
                persist_state="session",
                help="The answer ends there at the latest.",
            )
            st.slider(
                "Temperature",
                0.0,
                2.0,
                0.0,
                0.1,
                key="temperature",
                persist_state="session",
                help="0: always the likeliest token.",
            )
            if chat:
                st.text_area("System prompt", key="system", persist_state="session", height=100, placeholder="none")
        st.caption("Chat template of the model" if chat else "Base model: plain continuation", width="stretch")
    problem = st.session_state.pop("prompt_problem", None)
    if problem:
        st.error(plain(problem), title="The engine does not take this prompt", icon=":material/block:")


def own_ids() -> list[str]:
    """API ids of this tab's prompts, newest last."""
    return st.session_state.get("own_ids", [])


def _ask() -> None:
    text = (st.session_state.prompt or "").strip()
    if not text:
        return
    found = service.get()
    chat = found.hub.read(lambda state: state.model.chat_template)
    sampling = {
        "max_tokens": st.session_state.get("max_tokens", 256),
        "temperature": st.session_state.get("temperature", 0.0),
        "user": "you",
    }
    system = (st.session_state.get("system") or "").strip()
    messages = [{"role": "system", "content": system}] if system else []
    try:
        if chat:
            id = found.client.chat([*messages, {"role": "user", "content": text}], **sampling)
        else:
            id = found.client.complete(text, **sampling)
    except EngineError as error:
        st.session_state.prompt_problem = str(error)
        return
    st.session_state.own_ids = [*own_ids(), id][-8:]


# ---- switches ----------------------------------------------------------------------------------------------------


def _switches() -> None:
    """The engine's switches in a form. They apply when it is idle; when it is not, the page says so and offers a way.

    A source that does not tell a switch (an attached engine, a recording) has none here.
    """
    config = service.get().hub.read(lambda state: dict(state.config))
    known = [name for name in FIELDS if name in config]
    if not known:
        return
    with st.popover("Engine switches", icon=":material/settings:", type="tertiary", key="switches"):
        with st.form("switches_form", border=False):
            columns = st.columns(2)
            wanted = {}
            for i, name in enumerate(known):
                with columns[i % 2]:
                    wanted[name] = FIELDS[name](config[name])
            if st.form_submit_button("Apply", icon=":material/check:"):
                _apply(_together({name: value for name, value in wanted.items() if value != config[name]}, wanted))
        st.button(
            "Reset prefix cache",
            key="reset_cache",
            icon=":material/delete_sweep:",
            help="Forgets what cached blocks hold; they become free. Needs an idle engine.",
            on_click=_reset,
        )


def _together(changes: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Memory in one piece cannot be shared: whoever chooses it means the prefix cache to be off."""
    one_piece = changes.get("allocator", "paged") != "paged" and wanted.get("prefix_cache")
    return changes | ({"prefix_cache": False} if one_piece else {})


def _choice(label: str, options: Iterable[Any], now: Any, help: str) -> Any:
    """A select box that also knows a value that is none of `options`."""
    options = list(dict.fromkeys([*options, now]))
    return st.selectbox(label, options, options.index(now), help=help)


FIELDS: dict[str, Callable[[Any], Any]] = {
    "block_size": lambda now: _choice(
        "Block size (tokens)",
        BLOCK_SIZES,
        now,
        "Slots of a block. Larger ones waste more, smaller ones need longer tables.",
    ),
    "num_blocks": lambda now: st.number_input(
        "Pool size (blocks)", 1, MOST_BLOCKS, now, help="A pool that is too small preempts."
    ),
    "chunk_size": lambda now: st.number_input(
        "Chunk size (tokens)",
        1,
        MOST_TOKENS,
        now,
        help="Prompt tokens of one request in a step while others are there: a long prompt then holds nobody up.",
    ),
    "policy": lambda now: _choice(
        "Batching", POLICIES, now, " ".join(f"{name}: {what}" for name, what in POLICIES.items())
    ),
    "allocator": lambda now: _choice(
        "KV memory", ALLOCATORS, now, " ".join(f"{name}: {what}" for name, what in ALLOCATORS.items())
    ),
    "preemption": lambda now: _choice(
        "Preemption", PREEMPTIONS, now, " ".join(f"{name}: {what}" for name, what in PREEMPTIONS.items())
    ),
    "prefix_cache": lambda now: st.toggle("Prefix cache", now, help="Blocks are found by the hash of what they hold."),
}


def _apply(changes: dict[str, Any]) -> None:
    st.session_state.pop("waiting_switches", None)
    if not changes:
        st.toast("Nothing to change.", icon=":material/info:")
        return
    try:
        service.get().client.configure(changes)
    except EngineError as error:
        if error.status == NOT_IDLE:
            st.session_state.waiting_switches = changes
        else:
            st.toast(plain(str(error)), icon=":material/error:", duration="long")
        return
    st.toast("Applied: " + plain(_words(changes)), icon=":material/check:")
    st.rerun()


def _reset() -> None:
    try:
        service.get().client.reset()
    except EngineError as error:
        if error.status == NOT_IDLE:
            st.session_state.waiting_switches = {}
        else:
            st.toast(plain(str(error)), icon=":material/error:", duration="long")
        return
    st.toast("The prefix cache is empty.", icon=":material/check:")


def _busy(changes: dict[str, Any]) -> None:
    what = plain(_words(changes)) if changes else "Resetting the prefix cache"
    with st.container(border=True, key="busy"):
        st.warning(f"{what} applies when the engine is idle.", title="Engine busy", icon=":material/hourglass_top:")
        with st.container(horizontal=True):
            st.button("Stop users and apply", key="stop_and_apply", on_click=_stop_and_apply, args=(changes,))
            st.button(
                "Leave it",
                key="leave_it",
                type="tertiary",
                on_click=lambda: st.session_state.pop("waiting_switches", None),
            )


def _stop_and_apply(changes: dict[str, Any]) -> None:
    found = service.get()
    st.session_state.pop("waiting_switches", None)
    if not attempt(found.stop_all, "Stop all"):
        return
    until = time.monotonic() + IDLE_WAIT_S
    while True:
        try:
            found.client.configure(changes) if changes else found.client.reset()
        except EngineError as error:
            if error.status == NOT_IDLE and time.monotonic() < until:
                time.sleep(0.1)
                continue
            st.toast(plain(str(error)), icon=":material/error:", duration="long")
            return
        st.toast(
            f"Applied: {plain(_words(changes))}" if changes else "The prefix cache is empty.", icon=":material/check:"
        )
        return


def _words(changes: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {'on' if value is True else 'off' if value is False else value}"
        for name, value in changes.items()
    )
