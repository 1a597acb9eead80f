"""What is the engine doing right now?"""

import streamlit as st

from pages.widgets import controls, live, service, tables

units = st.session_state.units

live.view(
    "numbers",
    title="Cockpit: what is the engine doing right now?",
    show=["rate", "flight", "blocks", "ttft"],
    units=units,
)
controls.workload()

pictures, words = st.columns([2, 1], gap="medium")
with pictures.container(gap="xsmall"):
    live.view("gantt", title="Requests")
    tables.table("requests", tables.requests, alt="Requests, live ones first")
    attached = service.get().attached
    live.view("tokens", title="Tokens from scrape to scrape" if attached else "Tokens per step")
    if attached:
        tables.table("scrape", tables.scraped, alt="Every value of the last scrape with its source")
    else:
        tables.table("steps", tables.steps, alt="Engine steps, newest first")
    live.view("strip", title="Block pool")
    tables.table("split", tables.split, alt="Block pool by kind")
with words:
    controls.prompt()
    live.view("text", title="What they say", own=controls.own_ids(), height=470)
