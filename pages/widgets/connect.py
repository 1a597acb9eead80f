"""Turning all pages to a server that runs elsewhere, and back. What a person types here stays in this process: a key is
kept in memory as long as it is used, and is in no address, link, log or recording."""

from __future__ import annotations

import concurrent.futures
from urllib.parse import urlsplit

import streamlit as st

from backend import key_file
from backend.server.listen import is_loopback
from backend.sources import SourceError
from backend.sources.attach.detect import Found
from backend.sources.attach.target import Secret, TargetConfig, Unreachable
from pages.widgets import capabilities, launch, service
from pages.widgets.format import badge, plain

OPEN, OUTCOME = "connect_open", "connect_outcome"  # in the session
SECRETS = ("connect_key", "connect_key_file")
MAX_KEY = 4096  # bytes


def selector() -> None:
    """The source, beside the strip: what to turn to."""
    found = service.get()
    if found.attached:
        st.button("Back to the own engine", key="detach", icon=":material/undo:", type="tertiary", on_click=_detach)
    if st.button("Connect…", key="connect", icon=":material/cable:", type="tertiary",
                 help="Show a vLLM, SGLang or other server that runs already."):  # fmt: skip
        st.session_state[OPEN] = True
        st.session_state.pop(OUTCOME, None)
    if st.session_state.get(OPEN):  # it stays open when the page is drawn again for other reasons
        _dialog()


def _close() -> None:
    st.session_state[OPEN] = False
    for name in (OUTCOME, *SECRETS):
        st.session_state.pop(name, None)


@st.dialog("Connect to an engine", width="medium", icon=":material/cable:", on_dismiss=_close)
def _dialog() -> None:
    runs, start = st.tabs(["A server that runs", "Start vLLM here"])
    with runs:
        test, go = _form()
        if test or go:
            with st.spinner("Asking the server", show_time=True):
                st.session_state[OUTCOME] = _tried()
            if go and isinstance(st.session_state[OUTCOME], Found) and _attach():
                st.rerun()
        _shown(st.session_state.get(OUTCOME))
    with start:
        launch.panel()


def _form() -> tuple[bool, bool]:
    """(test, connect): which button was pressed."""
    found = service.get()
    with st.form("connect_form", border=False):
        left, right = st.columns([3, 2])
        left.text_input("Address", "http://127.0.0.1:8000", key="connect_url", persist_state="session",
                        help="Of the server, with its path if a proxy puts one in front.")  # fmt: skip
        right.text_input("Name", "", key="connect_name", placeholder="as its host", persist_state="session")
        with st.expander("Key, certificates, paths", icon=":material/tune:", type="compact", key="connect_more"):
            left, right = st.columns([3, 2])
            left.text_input("API key", "", key="connect_key", type="password", placeholder="none", autocomplete="off",
                            help="Kept in this process's memory while it is used, and nowhere else.")  # fmt: skip
            left.text_input("CA file", "", key="connect_ca", placeholder="those of the system", persist_state="session",
                            help="Path on the machine that runs this page.")  # fmt: skip
            left.toggle("Trust any certificate", key="connect_insecure", persist_state="session",
                        help="Whoever sits between may then read the key and all answers.")  # fmt: skip
            with right.popover("Key from a file", icon=":material/upload_file:", type="tertiary"):
                st.file_uploader("File with the key", key="connect_key_file", max_upload_size=1)
            left, right = st.columns([3, 2])
            left.text_input("Path of the metrics", "", key="connect_metrics", placeholder="found by itself",
                            persist_state="session",
                            help="/metrics, or /prometheus/metrics at TensorRT-LLM.")  # fmt: skip
            right.selectbox("KV events", ["auto", "off"], key="connect_events", accept_new_options=True,
                            persist_state="session",
                            help="Where the server publishes its cached blocks. auto: it is asked. Or an address such "
                            "as tcp://host:5557.")  # fmt: skip
        if found.own is not None and found.own.engine is not None:
            st.toggle("Stop our own engine meanwhile, if the server is on this machine: frees the cores", True,
                      key="connect_stop", persist_state="session",
                      help="It starts again on the way back.")  # fmt: skip
        with st.container(horizontal=True):
            test = st.form_submit_button("Test connection", icon=":material/network_check:")
            go = st.form_submit_button("Connect", icon=":material/cable:", type="primary")
    return test, go


def config() -> TargetConfig:
    """What the dialog says. Raises SourceError for a key that can be none."""
    said = st.session_state
    return TargetConfig(
        url=said.get("connect_url", "").strip(),
        name=said.get("connect_name", "").strip(),
        key=Secret(key) if (key := _key()) else None,
        ca_file=said.get("connect_ca", "").strip(),
        insecure_tls=bool(said.get("connect_insecure")),
        metrics_path=said.get("connect_metrics", "").strip(),
        kv_events=(said.get("connect_events") or "auto").strip(),
    )


def _key() -> str:
    """The typed key, or the uploaded file's: a page never reads files of the machine that it runs on into a header."""
    file = st.session_state.get("connect_key_file")
    if file is None:
        return checked(st.session_state.get("connect_key", "").strip())
    try:
        return checked(file.getvalue()[:MAX_KEY].decode().strip())
    except UnicodeDecodeError:
        raise SourceError("the file with the key is no text") from None


def checked(key: str) -> str:
    """Raises SourceError for a key that no header could carry."""
    try:
        return key_file.checked(key, "the key")
    except key_file.BadKey as error:
        raise SourceError(str(error)) from None


def _tried() -> Found | str:
    """What answers there, or why nothing does."""
    try:
        return service.get().probe(config())
    except (Unreachable, SourceError) as error:
        return str(error)
    except concurrent.futures.TimeoutError:
        return f"nothing was known of it within {service.PROBE_S:.0f} s"


def _attach() -> bool:
    wanted = config()
    stop = bool(st.session_state.get("connect_stop", True)) and loopback(wanted.url)
    try:
        service.get().attach(wanted, stop_own=stop)
    except (SourceError, OSError) as error:
        st.session_state[OUTCOME] = str(error)
        return False
    _close()
    return True


def loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return is_loopback(host) or host.endswith(".localhost")


def _detach() -> None:
    try:
        service.get().detach()
    except (SourceError, OSError) as error:
        st.toast(f"Still attached: {plain(str(error))}", icon=":material/error:", duration="long")


def _shown(outcome: Found | str | None) -> None:
    if outcome is None:
        return
    if isinstance(outcome, str):
        st.error(plain(outcome), title="It cannot be attached to", icon=":material/error:")
        return
    name = f"{outcome.title} {outcome.version}".strip()
    with st.container(horizontal=True, gap="xsmall", key="connect_found"):
        st.badge(badge(name), icon=":material/check_circle:", color="green")
        if outcome.model:
            st.badge(badge(outcome.model), icon=":material/neurology:", color="gray")
        if outcome.metrics_url:
            st.badge(badge(f"metrics at {outcome.metrics_url}"), icon=":material/monitoring:", color="gray")
        for endpoint in outcome.kv_endpoints:
            st.badge(badge(f"KV events at {endpoint.url}"), icon=":material/grid_view:", color="gray")
    for problem in outcome.problems:
        st.warning(plain(problem), icon=":material/warning:")
    capabilities.table(outcome.capabilities)
