"""The numbers under the pictures, as tables: pure functions of the folded state. `table` puts one on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from backend.fold import Request, State, label, pool_split
from backend.hub import Hub
from backend.sources.attach.canonical import BY_MEDIUM
from pages.widgets import service

STEPS_SHOWN = 500
ROW = 35  # pixels of a row in a table, and of its head
UNSEEN = {"cached tokens", "blocks", "preemptions", "recomputed tokens", "queued (ms)"}  # at an attached engine


def requests(state: State) -> pd.DataFrame:
    """One row a request, live ones first."""
    finished = [state.requests[number] for number in reversed(state.ended) if number in state.requests]
    live = [request for request in state.requests.values() if request.state != "finished"]
    columns = {
        "request": lambda r: label(r.request),
        "number": lambda r: r.request,
        "user": lambda r: r.user or r.id,
        "state": lambda r: f"finished ({r.reason})" if r.state == "finished" else r.state,
        "prompt tokens": lambda r: r.prompt_tokens,
        "cached tokens": lambda r: r.cached_tokens,
        "output tokens": lambda r: r.output_tokens,
        "blocks": lambda r: len(r.table),
        "preemptions": lambda r: r.preemptions,
        "recomputed tokens": lambda r: r.recomputed_tokens,
        "queued (ms)": lambda r: _ms(r.queue_s),
        "TTFT (ms)": lambda r: _ms(r.ttft_s),
        "TPOT (ms)": lambda r: _ms(r.tpot_s),
        "E2E (ms)": lambda r: _ms(r.e2e_s),
    }
    if state.scrape:  # what the client of our own requests cannot see of an attached engine is no 0
        columns = {name: read for name, read in columns.items() if name not in UNSEEN}
        columns["prompt tokens"] = lambda r: r.prompt_tokens or None
    return _frame([*live, *finished], columns)


def steps(state: State) -> pd.DataFrame:
    """The newest engine steps, newest first."""
    rows = state.series[: -STEPS_SHOWN - 1 : -1]
    return pd.DataFrame(
        {
            "time (s)": [round(row[0], 3) for row in rows],
            "step (ms)": [_ms(row[1]) for row in rows],
            "prefill tokens": [row[2] for row in rows],
            "decode tokens": [row[3] for row in rows],
            "output tokens": [row[10] for row in rows],
            "running": [row[8] for row in rows],
            "waiting": [row[9] for row in rows],
        }
    )


def blocks(state: State) -> pd.DataFrame:
    """One row a block of the pool."""
    pool = state.blocks
    if state.scrape:
        return _cells(state)
    kinds = [
        "shared" if len(owners) > 1 else "used" if owners else "cached" if sealed else "free"
        for owners, sealed in zip(pool.owners, pool.sealed, strict=True)
    ]
    return pd.DataFrame(
        {
            "block": range(state.num_blocks),
            "state": kinds,
            "holders": [len(owners) for owners in pool.owners],
            "owners": [", ".join(map(label, owners)) for owners in pool.owners],
            "slots filled": pool.fill,
            "answers look-ups": [bool(sealed) for sealed in pool.sealed],
            "changed in step": pool.changed,
            "last mark": pool.mark,
        }
    )


def _cells(state: State) -> pd.DataFrame:
    """Of an attached engine: the cells that hold a cached block. Their places are ours."""
    cells = [cell for cell, sealed in enumerate(state.blocks.sealed) if sealed]
    return pd.DataFrame(
        {
            "cell": cells,
            "state": ["cached, in use or not"] * len(cells),
            "changed in report": [state.blocks.changed[cell] for cell in cells],
        }
    )


def split(state: State) -> pd.DataFrame:
    """The pool by kind, in blocks and bytes."""
    parts = pool_split(state)
    names = {
        "filled": "filled",
        "wasted": "wasted",
        "cached": "cached, reusable",
        "free": "free",
        "saved": "saved by sharing",
    }
    if state.scrape:  # of an attached engine's used blocks, neither what fills them nor who holds them is known
        names = {"filled": "used", "cached": "cached, not used", "free": "the rest"}
    each = parts["block_bytes"]  # 0: an attached engine has not told what a token takes
    sizes = [int(parts[name] * each) if each else None for name in names]
    return pd.DataFrame(
        {
            "part": list(names.values()),
            "blocks": [round(parts[name], 2) for name in names],
            "share of the pool (%)": [round(100 * parts[name] / max(1, parts["total"]), 2) for name in names],
            "bytes": sizes,
            "GiB": [size and round(size / 2**30, 4) for size in sizes],
            "GB": [size and round(size / 1e9, 4) for size in sizes],
        }
    )


def media(state: State) -> pd.DataFrame:
    """Of an attached engine: what is cached where, by its KV events; no row where it publishes none."""
    told = state.scrape.values if state.scrape else {}
    tokens = {name.removeprefix(BY_MEDIUM): value for name, value in told.items() if name.startswith(BY_MEDIUM)}
    each = state.model.kv_bytes_per_token or None  # None: not told
    return pd.DataFrame(
        {
            "medium": [name.upper() for name in tokens],
            "tokens": [int(value.value or 0) for value in tokens.values()],
            "bytes": [each and int((value.value or 0) * each) for value in tokens.values()],
            "quality": [value.quality for value in tokens.values()],
            "read from": [value.name for value in tokens.values()],
            "note": [value.note for value in tokens.values()],
        }
    )


def usage(state: State) -> pd.DataFrame:
    """Blocks used against tokens held, newest step first."""
    rows = state.series[: -STEPS_SHOWN - 1 : -1]
    known = {
        "time (s)": [round(row[0], 3) for row in rows],
        "used blocks": [row[4] for row in rows],
        "slots in used blocks": [row[4] * state.block_size for row in rows],
    }
    told = {
        "filled slots": [row[6] for row in rows],
        "tokens held by requests": [row[7] for row in rows],
    }
    return pd.DataFrame(known | ({} if state.scrape else told) | {"cached blocks": [row[5] for row in rows]})


def scraped(state: State) -> pd.DataFrame:
    """Every value of an attached engine's last scrape, under our names; absent ones with the reason."""
    values = state.scrape.values.items() if state.scrape else ()
    return pd.DataFrame(
        {
            "value": [name for name, _ in values],
            "now": [value.value for _, value in values],
            "at least": [value.low for _, value in values],
            "at most": [value.high for _, value in values],
            "quality": [value.quality for _, value in values],
            "read from": [value.name for _, value in values],
            "note": [value.note for _, value in values],
        }
    )


def prefix_tree(tree: dict[str, Any]) -> pd.DataFrame:
    """One row a cached block, as `backend.prefix_tree.picture` tells them: parents first."""
    nodes = tree.get("nodes", [])
    depths: list[int] = []
    for parent, *_ in nodes:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    columns = {
        "block": 1,
        "hash": 2,
        "holders now": 4,
        "copies": 5,
        "blocks from here on": 6,
        "ways on": 7,
        "first token": 8,
        "text": 10,
    }
    frame = pd.DataFrame({name: [node[place] for node in nodes] for name, place in columns.items()})
    frame.insert(1, "depth", depths)
    frame.insert(3, "parent's hash", [nodes[node[0]][2] if node[0] >= 0 else "" for node in nodes])
    return frame


@st.fragment
def table(
    name: str,
    read: Callable[[Any], pd.DataFrame],
    *,
    alt: str,
    of: Callable[[Hub], Any] | None = None,
    title: str = "Table",
) -> None:
    """An expander with `read(state)` as it is now. It moves when it is opened or asked to, never by itself.

    `of`: what else to read than the state.
    """
    box = st.expander(title, key=f"table-{name}", icon=":material/table:", type="compact", on_change="rerun")
    if not box.open:
        return
    with box:
        hub = service.get().hub
        frame = read(of(hub)) if of else hub.read(read)
        height = min(260, ROW * (len(frame) + 1) + 3)  # no taller than its rows and its head
        st.dataframe(frame, hide_index=True, height=height, key=f"frame-{name}", alt=alt)
        st.button("Refresh", key=f"refresh-{name}", icon=":material/refresh:", type="tertiary")


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value * 1e3, 1)


def _frame(rows: list[Request], columns: dict[str, Callable[[Request], object]]) -> pd.DataFrame:
    return pd.DataFrame({name: [read(row) for row in rows] for name, read in columns.items()})
