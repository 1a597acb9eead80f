"""The live views on a page: one component, mounted once for each picture, all fed by one WebSocket on its origin.

Where that WebSocket cannot be (no routes mounted, or a proxy without upgrades), the header's fragment feeds the same
pictures with reruns.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import msgspec
import streamlit as st

from backend.server.live import MAX_WATCHED, PATH
from pages.widgets import service
from pages.widgets.bundle import bundle
from pages.widgets.theme import ASSETS, tokens

NEW_PAGE = "page_is_new"  # in the session: widgets of the page before have lost what they showed
MAX_CHOSEN = 600  # characters that a browser may say it chose
FALLBACK_S = 0.25  # between two frames where no WebSocket can be
_PAGE, _NO_SOCKET, _CURSOR, _SNAPSHOT, _TURNS, _TREE = (
    "live_page_path",
    "live_no_socket",
    "live_cursor",
    "live_snapshot",
    "live_turns",
    "live_tree",
)  # in the session


@cache
def _component():
    entry = ASSETS / "live" / "component.js"
    return st.components.v2.component(
        "kvscope_live",
        html='<div class="kv">\n</div>',
        css=(ASSETS / "live" / "live.css").read_text(encoding="utf-8"),
        js=bundle(entry, f"const TOKENS = {json.dumps(tokens())};"),
    )


def on_page(url_path: str) -> None:
    """Called by the shell: the address of the app is the page's address without this."""
    if st.session_state.get(_PAGE) != url_path:
        st.session_state[NEW_PAGE] = True
    st.session_state[_PAGE] = url_path


def address(page_url: str, url_path: str) -> str:
    """The WebSocket's address as the browser must see it, so that proxies and port-forwards need no configuration."""
    parts = urlsplit(page_url)
    path = parts.path.rstrip("/")
    if url_path and path.endswith(f"/{url_path}"):
        path = path[: -len(url_path) - 1]
    scheme = "wss" if parts.scheme == "https" else "ws"
    return f"{scheme}://{parts.netloc}{path}{PATH}?token={service.TOKEN}"


def by_rerun() -> bool:
    """Whether this page must be fed by reruns."""
    return not service.routes_mounted or not st.context.url or st.session_state.get(_NO_SOCKET, False)


def view(name: str, **options: Any) -> str:
    """Mounts a picture. With the same options its data stay the same, and a rerun does not touch it.

    Returns what a person chose in it, "" for most pictures and at first.
    """
    url = "" if by_rerun() else address(st.context.url, st.session_state.get(_PAGE, ""))
    key = f"live-{name}"
    mounted = _component()(
        key=key,
        data={"view": name, "url": url, "options": options},
        default={"transport": "", "chosen": ""},
        on_transport_change=lambda: _no_socket(key),
        on_pulse_change=lambda: None,
        on_chosen_change=lambda: None,
    )
    chosen = mounted.get("chosen")
    return chosen[:MAX_CHOSEN] if isinstance(chosen, str) else ""


def feed() -> None:
    """One frame for all pictures of the page; inside the page's one fragment."""
    asked = (st.session_state.get("live-feed") or {}).get("ask") or {}
    fresh = asked.get("snapshot") != st.session_state.get(_SNAPSHOT)  # the browser lost the thread
    st.session_state[_SNAPSHOT] = asked.get("snapshot")
    turns = service.get().turns
    fresh |= turns != st.session_state.get(_TURNS)  # the pages turned to another source
    st.session_state[_TURNS] = turns
    table = _number(asked.get("table"))
    cursor, frame = service.get().hub.frame(
        None if fresh else st.session_state.get(_CURSOR),
        watch=_numbers(asked.get("watch")),
        block=_number(asked.get("block")),
        table=table,
        inferred=None if table is None else service.get().inferred(table),
    )
    st.session_state[_CURSOR] = cursor
    if asked.get("tree") != st.session_state.get(_TREE):  # a number for each time that it was asked
        st.session_state[_TREE] = asked.get("tree")
        frame = frame[:-1] + b"," + msgspec.json.encode(service.get().hub.tree()) + b"]"
    if asked.get("phases"):
        frame = frame[:-1] + b"," + service.get().phases.message().encode() + b"]"
    if isinstance(asked.get("fleet"), str) and (told := service.get().fleet_message(asked["fleet"][:MAX_CHOSEN])):
        frame = frame[:-1] + b"," + told.encode() + b"]"
    if isinstance(asked.get("telemetry"), list):
        service.get().telemetry.renew([str(panel)[:20] for panel in asked["telemetry"][:8]])
    _component()(key="live-feed", data=frame, default={"ask": {}}, on_ask_change=lambda: None)


def _no_socket(key: str) -> None:
    if st.session_state[key].get("transport") == "rerun":
        st.session_state[_NO_SOCKET] = True


def _number(value: object) -> int | None:
    """What a browser sent, if it is a block or a request."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def _numbers(values: object) -> list[int]:
    return [n for n in values[:MAX_WATCHED] if _number(n) is not None] if isinstance(values, list) else []
