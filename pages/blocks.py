"""Where does the memory go, and who shares it?"""

import streamlit as st

from pages.widgets import controls, live, tables

units = st.session_state.units

live.view(
    "numbers",
    title="KV blocks: where does the memory go, and who shares it?",
    show=["used", "filled", "saved", "hits"],
    units=units,
)
controls.workload(switches=True)

pool, owners = st.columns([2, 1], gap="medium")
with pool.container(gap="xsmall"):
    live.view("blocks", title="The pool")
    tables.table("blocks", tables.blocks, alt="Blocks of the pool")
with owners:
    live.view("requests", title="Who owns what", height=176)
    live.view("table", title="Block table", height=262)

with st.container(gap="xsmall"):
    live.view("split", title="The pool, split", units=units)
    tables.table("split", tables.split, alt="Block pool by kind")
    live.view("usage", title="Blocks used against tokens held")
    tables.table("usage", tables.usage, alt="Blocks used and tokens held, newest step first")
