"""The numbers under the pictures, as tables: pure functions of the folded state. `table` puts one on the page."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import streamlit as st

from backend.fold import Request, State, label, pool_split
from pages.widgets import service

STEPS_SHOWN = 500


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
    return pd.DataFrame(
        {
            "part": list(names.values()),
            "blocks": [round(parts[name], 2) for name in names],
            "share of the pool (%)": [round(100 * parts[name] / max(1, parts["total"]), 2) for name in names],
            "bytes": [int(parts[name] * parts["block_bytes"]) for name in names],
            "GiB": [round(parts[name] * parts["block_bytes"] / 2**30, 4) for name in names],
            "GB": [round(parts[name] * parts["block_bytes"] / 1e9, 4) for name in names],
        }
    )


def usage(state: State) -> pd.DataFrame:
    """Blocks used against tokens held, newest step first."""
    rows = state.series[: -STEPS_SHOWN - 1 : -1]
    return pd.DataFrame(
        {
            "time (s)": [round(row[0], 3) for row in rows],
            "used blocks": [row[4] for row in rows],
            "slots in used blocks": [row[4] * state.block_size for row in rows],
            "filled slots": [row[6] for row in rows],
            "tokens held by requests": [row[7] for row in rows],
            "cached blocks": [row[5] for row in rows],
        }
    )


def block_table(state: State, number: int) -> pd.DataFrame:
    """Logical to physical for one request; empty when it holds nothing."""
    request = state.requests.get(number)
    table = request.table if request else []
    return pd.DataFrame(
        {
            "logical block": range(len(table)),
            "physical block": table,
            "slots filled": [state.blocks.fill[block] for block in table],
            "holders": [len(state.blocks.owners[block]) for block in table],
        }
    )


@st.fragment
def table(name: str, read: Callable[[State], pd.DataFrame], *, alt: str) -> None:
    """An expander with `read(state)` as it is now. It moves when it is opened or asked to, never by itself."""
    box = st.expander("Table", key=f"table-{name}", icon=":material/table:", type="compact", on_change="rerun")
    if not box.open:
        return
    with box:
        frame = service.get().hub.read(read)
        st.dataframe(frame, hide_index=True, height=260, key=f"frame-{name}", alt=alt)
        st.button("Refresh", key=f"refresh-{name}", icon=":material/refresh:", type="tertiary")


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value * 1e3, 1)


def _frame(rows: list[Request], columns: dict[str, Callable[[Request], object]]) -> pd.DataFrame:
    return pd.DataFrame({name: [read(row) for row in rows] for name, read in columns.items()})
