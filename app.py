"""The dashboard: `streamlit run app.py`. Mounts the live WebSocket and owns the engine's life; pages/ shows it all."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import streamlit as st

from backend.server import live
from backend.sources import SourceError
from pages.widgets import service

log = logging.getLogger("kvscope")

# Python's own numbers look for garbage at every other step of an engine, among thousands of objects that are none: a
# quarter of what folding costs.
GC_THRESHOLD = 50_000, 20, 20


@asynccontextmanager
async def lifespan(_: st.App) -> AsyncIterator[dict]:
    import pandas  # noqa: F401  what pages import later, before the freeze

    try:
        await asyncio.to_thread(service.get)
    except (SourceError, OSError) as error:  # the pages say the same, with what to do
        log.error("no engine: %s", error)
    gc.collect()
    gc.freeze()  # Streamlit collects after every rerun; what is frozen costs it nothing
    gc.set_threshold(*GC_THRESHOLD)
    try:
        yield {}
    finally:
        await asyncio.to_thread(service.close)


def prefix() -> str:
    """Streamlit does not put its own base path in front of other people's routes."""
    base = (st.get_option("server.baseUrlPath") or "").strip("/")
    return f"/{base}" if base else ""


service.routes_mounted = True
app = st.App(
    "pages/shell.py",
    lifespan=lifespan,
    routes=live.routes(
        lambda: service.get().hub,
        prefix(),
        token=service.TOKEN,
        allowed_origins=st.get_option("server.corsAllowedOrigins") or (),
        get_extras=lambda: service.get().extras(),
    ),
)
