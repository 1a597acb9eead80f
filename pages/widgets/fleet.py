"""The fleet page: which servers, how they do together and each for itself. What moves is one live picture."""

from __future__ import annotations

import msgspec
import streamlit as st

from backend.sources import SourceError
from backend.sources.attach import endpoints, fleet_view
from backend.sources.attach.endpoints import Endpoint, FleetError
from backend.sources.attach.fleet_rows import ReplicaRow
from backend.sources.attach.target import Secret
from pages.widgets import connect, live, service, tables
from pages.widgets.format import plain

EXAMPLE = "http://10.0.0.7:8000  name=left\nhttp://10.0.0.8:8000  name=right  dcgm=http://10.0.0.8:9400/metrics"
FORM = """
One server a line. After the address may follow `name=`, `metrics_path=`, `ca_file=`, `insecure_tls=yes`, `interval_s=`,
and `dcgm=` with the address of a DCGM exporter on its host. `dns+http://name:port` stands for every address behind a
DNS name: a Kubernetes headless service, or Ray Serve's nodes; the name is asked again and again. `#` begins a comment.
"""


def show() -> None:
    found = service.get()
    watched = found.fleet is not None
    with st.expander("Servers", icon=":material/dns:", expanded=not watched, key=f"fleet_servers_{watched}"):
        _form(watched)
    if found.fleet is None:
        st.info(
            "List the servers above: their requests, KV usage, latencies and tokens stand side by side here.",
            title="No fleet is watched",
            icon=":material/dns:",
        )
        return
    chosen = live.view("fleet", title="Fleet: how are all my replicas doing?")
    _chosen(found, chosen)
    tables.table(
        "fleet", lambda _: fleet_view.table(found.fleet.rows() if found.fleet else ()), alt="One row a replica"
    )


def _form(watched: bool) -> None:
    with st.form("fleet_form", border=False):
        st.text_area("Servers, one a line", key="fleet_lines", placeholder=EXAMPLE, height=130, max_chars=40_000,
                     persist_state="session", help=FORM)  # fmt: skip
        with st.container(horizontal=True, vertical_alignment="bottom"):
            st.text_input("API key for all of them", "", key="fleet_key", type="password", placeholder="none",
                          autocomplete="off", width=320,
                          help="Kept in this process's memory while they are watched, and nowhere else.")  # fmt: skip
            with st.popover("… or a file of them", icon=":material/upload_file:", type="tertiary"):
                st.file_uploader("List of servers", type=["txt", "list", "conf"], key="fleet_file", max_upload_size=1)
            watch = st.form_submit_button("Watch", icon=":material/visibility:", type="primary")
            stop = st.form_submit_button("Stop watching", icon=":material/visibility_off:", disabled=not watched)
    if stop:
        service.get().unwatch()
        st.rerun()
    if watch:
        try:
            service.get().watch(wanted())
        except (FleetError, SourceError) as error:
            st.error(plain(str(error)), title="This list cannot be watched", icon=":material/error:")
        else:
            st.rerun()


def wanted() -> list[Endpoint]:
    """What the form says. Raises FleetError, SourceError."""
    said = st.session_state
    file = said.get("fleet_file")
    try:
        text = file.getvalue().decode() if file is not None else said.get("fleet_lines", "")
    except UnicodeDecodeError:
        raise FleetError("the file is no text") from None
    found = endpoints.parse(text.splitlines())
    if any(endpoint.config.key_file for endpoint in found):  # a page reads no files of this machine into a header
        raise FleetError("key_file= is not taken from a page: type the key below")
    key = connect.checked(said.get("fleet_key", "").strip())
    return [_with_key(endpoint, key) for endpoint in found] if key else found


def _with_key(endpoint: Endpoint, key: str) -> Endpoint:
    return msgspec.structs.replace(endpoint, config=msgspec.structs.replace(endpoint.config, key=Secret(key)))


def _chosen(found: service.Service, key: str) -> None:
    """What can be done with the replica that was clicked; its numbers are in the picture."""
    row = next((row for row in found.fleet.rows() if row.key == key), None) if key else None
    with st.container(horizontal=True, vertical_alignment="center", key="fleet_chosen"):
        if row is None:
            st.caption("Click a replica for all its values, and to show it on every page.")
            return
        st.button(f"Attach to {plain(row.name)}", key="fleet_attach", icon=":material/cable:", on_click=_attach,
                  args=(row,), disabled=row.state == "down")  # fmt: skip
        st.caption(f"All pages then show {plain(row.url)}.")


def _attach(row: ReplicaRow) -> None:
    found = service.get()
    config = found.fleet.config(row.key) if found.fleet else None
    if config is None:
        st.toast("It is not in the list any more.", icon=":material/error:")
        return
    try:
        found.attach(config, stop_own=connect.loopback(config.url))
    except (SourceError, OSError) as error:
        st.toast(plain(str(error)), icon=":material/error:", duration="long")
    else:
        st.toast(f"All pages show {plain(row.name)} now.", icon=":material/cable:")
