"""The script behind every page: navigation, header, then the page."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `streamlit run pages/shell.py` puts only this folder there
    sys.path.insert(0, str(ROOT))

import streamlit as st  # noqa: E402

from backend.sources import SourceError  # noqa: E402
from pages.widgets import capabilities, connect, header, live, service  # noqa: E402
from pages.widgets.format import plain  # noqa: E402

st.set_page_config(page_title="KVScope", page_icon="🔬", layout="wide")
st.logo(str(ROOT / "assets" / "logo.svg"), size="medium")
page = st.navigation(
    [
        st.Page("cockpit.py", title="Cockpit", icon=":material/speed:", default=True),
        st.Page("blocks.py", title="KV blocks", icon=":material/grid_view:", url_path="blocks"),
        st.Page("phases.py", title="Phases", icon=":material/stacked_line_chart:", url_path="phases"),
        st.Page("batching.py", title="Batching", icon=":material/view_week:", url_path="batching"),
        st.Page("load.py", title="Load", icon=":material/monitoring:", url_path="load"),
        st.Page("hardware.py", title="Hardware", icon=":material/developer_board:", url_path="hardware"),
        st.Page("fleet.py", title="Fleet", icon=":material/dns:", url_path="fleet"),
        st.Page("explorer.py", title="Explorer", icon=":material/travel_explore:", url_path="explorer"),
    ],
    position="top",
)
live.on_page(page.url_path)

try:
    service.get()
except (SourceError, OSError) as error:
    st.error(plain(str(error)), title="There is no engine to show", icon=":material/error:")
    st.stop()

with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
    strip = st.container(width="stretch")
    capabilities.panel()
    connect.selector()
    st.segmented_control(
        "Units",
        ["GiB", "GB"],
        default="GiB",
        required=True,
        key="units",
        label_visibility="collapsed",
        bind="query-params",
    )
with strip:
    header.show(st.session_state.units)

page.run()
