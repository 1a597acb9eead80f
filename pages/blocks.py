"""Where does the memory go, and who shares it?"""

import streamlit as st

from pages.widgets import capabilities, controls, live, service, tables

units = st.session_state.units

live.view(
    "numbers",
    title="KV blocks: where does the memory go, and who shares it?",
    show=["used", "filled", "saved", "hits"],
    units=units,
)
controls.workload(switches=True)

pool, owners = st.columns([2, 1], gap="medium")
attached = service.get().attached
with pool.container(gap="xsmall"):
    if attached:
        capabilities.explain("block_map")
    live.view("blocks", title="Cached blocks and blocks in use" if attached else "The pool")
    tables.table("blocks", tables.blocks, alt="Blocks of the pool")
with owners:
    live.view("requests", title="Our requests" if attached else "Who owns what", height=176)
    if not attached:
        live.view("table", title="Block table", height=262)
    elif capabilities.missing("prefix_tree"):
        st.caption(
            "Which blocks a request holds is not exported: requests of our own are listed without their tables, those "
            "of others not at all."
        )
    else:
        live.view("table", title="Block table, inferred", height=262)

with st.container(gap="xsmall"):
    if attached:
        capabilities.explain("prefix_tree")
    who = "" if attached else ", and who shares it"
    live.view("tree", title=f"Prefix tree: which cached block continues which{who}")
    tables.table("tree", tables.prefix_tree, alt="Cached blocks as a tree, parents first", of=lambda hub: hub.tree())
    live.view("split", title="The pool, split", units=units)
    tables.table("split", tables.split, alt="Block pool by kind")
    if attached:
        tables.table("media", tables.media, alt="Cached tokens by medium", title="Table: cached, by medium")
    live.view("usage", title="Blocks used against tokens held")
    tables.table("usage", tables.usage, alt="Blocks used and tokens held, newest step first")
