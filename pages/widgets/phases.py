"""The phases page's controls: a shape to model and to run, another accelerator's roof, and measuring the own one."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pandas as pd
import streamlit as st

from backend import what_if
from backend.fold import State
from backend.planner import accelerators
from backend.planner.errors import CatalogueError, UnsupportedDtype
from backend.sources.remote import EngineError
from backend.workload import shape_run
from pages.widgets import live, service
from pages.widgets.format import figures, plain

NO_OVERLAY = "none"
OWN_SHAPE = "No shape of this model is known here: its engine does not tell one."


def roofline(units: str) -> None:
    """Roofline, its controls and the bytes below: what a slider moves stands in one fragment."""
    _what_if(units)


@st.fragment
def _what_if(units: str) -> None:
    found = service.get()
    model, config, blocks = found.hub.read(
        lambda state: (state.model, dict(state.config), (state.num_blocks, state.block_size))
    )
    shape = what_if.shape_of(model.shape)
    picture, controls = st.columns([3, 1], gap="medium")
    with controls:
        batch, context = _sliders(model.max_model_len)
        overlay = _overlay(model.dtype)
        _run_it(shape_run.Shape(batch, context), config, *blocks)
        _measure()
    cost = what_if.decode_step(shape, batch, context) if shape else None
    with picture:
        live.view(
            "roofline",
            title="Roofline: what memory feeds and what arithmetic allows",
            model=cost and {
                "x": cost.flop_per_byte,
                "flops": cost.flops,
                "bytes": cost.bytes,
                "words": [f"a decode step of batch {batch:,}, context {context:,}"],
            },
            overlay=overlay,
        )  # fmt: skip
    left, right = st.columns(2, gap="medium")
    curves = (
        (left, "bytes_by_batch", "Bytes of a decode step, by batch", what_if.by_batch),
        (right, "bytes_by_context", "Bytes of a decode step, by context", what_if.by_context),
    )
    for column, name, title, curve_of in curves:
        more = (model.max_model_len or what_if.CONTEXTS[-1],) if curve_of is what_if.by_context else ()
        curve = curve_of(shape, batch, context, *more) if shape else None
        with column.container(gap="xsmall"):
            live.view(name, title=title, curve=curve and msgspec.to_builtins(curve), why=OWN_SHAPE, units=units)
            if curve:
                _curve_table(name, curve)


def _sliders(longest: int) -> tuple[int, int]:
    batch = st.select_slider(
        "Batch (sequences that decode together)", what_if.BATCHES, 8, key="what_batch", persist_state="session"
    )
    choices = what_if.contexts(longest or what_if.CONTEXTS[-1])
    usual = 512 if 512 in choices else choices[-1]
    context = st.select_slider(
        "Context (tokens each of them attends)",
        choices,
        usual,
        key="what_context",
        persist_state="session",
        format_func=lambda tokens: f"{tokens:,}",
    )
    return batch, context


@cache
def _catalogue() -> dict[str, accelerators.Accelerator]:
    try:
        return accelerators.load()
    except CatalogueError:
        return {}


def _overlay(dtype: str) -> dict[str, Any] | None:
    """The roof of the accelerator that a person chose, from its data sheet."""
    rows = _catalogue()
    key = st.selectbox(
        "Overlay the roof of",
        [NO_OVERLAY, *rows],
        key="overlay",
        persist_state="session",
        format_func=lambda key: rows[key].name if key in rows else "no other accelerator",
    )
    if key not in rows:
        return None
    row, used = rows[key], dtype
    try:
        rate = row.rate(dtype)
    except UnsupportedDtype:
        used, rate = next(iter(row.flops_per_s.items()), ("", 0.0))
    if not rate:
        st.caption("The catalogue has no arithmetic rate of it.")
        return None
    st.caption(f"{row.name}: {used} dense, data sheet · {plain(row.source)} · checked: {row.verified}")
    return {"name": f"{row.name} ({used})", "bandwidth": row.bandwidth_bytes_per_s, "flops": rate}


def _run_it(shape: shape_run.Shape, config: dict[str, Any], num_blocks: int, block_size: int) -> None:
    found = service.get()
    ready = found.status.phase == "ready"
    if found.attached:
        why = "A shape needs token ids of the model's own, and an engine that takes them: only one of our own is asked."
    else:
        why = shape_run.obstacle(shape, config, num_blocks, block_size) if block_size else "no engine was heard yet"
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        st.button(
            "Run it",
            key="run_shape",
            icon=":material/play_arrow:",
            disabled=not ready or bool(why),
            help=f"Sends {shape.batch:,} prompts of {shape.prompt_tokens:,} random tokens and lets each say "
            f"{shape.output_tokens}: the measured points then are of this shape.",
            on_click=_start,
            args=(shape,),
        )
        own = st.session_state.get("shape_run")
        if own and found.hub.read(lambda state: _runs(state, own)):
            st.button("Stop", key="stop_shape", icon=":material/stop:", on_click=_stop, args=(own,))
    if why:
        st.caption(f":material/info: {plain(why)}")
    problem = st.session_state.get("shape_problem")
    if problem:
        st.error(plain(problem), title="The engine does not take this load", icon=":material/block:")


def _runs(state: State, id: str) -> bool:
    return any(request.id == id and request.state != "finished" for request in state.requests.values())


def _start(shape: shape_run.Shape) -> None:
    found = service.get()
    st.session_state.pop("shape_problem", None)
    vocab = found.hub.read(lambda state: state.model.vocab)
    try:
        st.session_state.shape_run = found.client.complete(**shape_run.body(shape, vocab))
    except EngineError as error:
        st.session_state.shape_problem = str(error)


def _stop(id: str) -> None:
    st.session_state.pop("shape_run", None)
    try:
        service.get().client.abort(id)
    except EngineError as error:
        st.session_state.shape_problem = str(error)


def _measure() -> None:
    """Ceilings are measured with nothing else running; how far that is stands in the roofline."""
    found = service.get()
    st.button(
        "Measure the roofs",
        key="measure_roofs",
        icon=":material/straighten:",
        disabled=found.status.phase != "ready" or found.attached,
        help="Roofs are measured in the process that computes, and this one is not ours: overlay its data sheet."
        if found.attached
        else "Copies, reads weights and multiplies for some seconds on this device, in the engine's process and with "
        "its number of threads. Needs an idle engine; no step runs meanwhile.",
        on_click=_begin_measuring,
    )
    problem = st.session_state.get("roofs_problem")
    if problem and found.in_flight:  # it stays while it is true: the page is drawn again for many reasons
        st.warning(plain(problem), title="Not now", icon=":material/hourglass_top:")


def _begin_measuring() -> None:
    found = service.get()
    st.session_state.pop("roofs_problem", None)
    if count := found.in_flight:
        st.session_state.roofs_problem = (
            f"{count} requests run: measuring now would slow them and measure too little. Stop them first."
        )
        return
    found.roofs.measure()


@st.fragment
def _curve_table(name: str, curve: what_if.Curve) -> None:
    box = st.expander("Table", key=f"table-{name}", icon=":material/table:", type="compact", on_change="rerun")
    if box.open:
        rows = {name.rpartition("_")[2]: curve.xs}
        rows |= {f"{kind.replace('_', ' ')} (bytes)": getattr(curve, kind) for kind in what_if.KINDS}
        box.dataframe(pd.DataFrame(rows), hide_index=True, height=220, key=f"frame-{name}", alt="Bytes by kind")


# ---- words that hold still -------------------------------------------------------------------------------------------


def grouping(state: State) -> tuple[str, pd.DataFrame] | None:
    """(formula with this model's values, table of other groupings); None while no model is known."""
    model = state.model
    if not model.heads or not model.kv_heads or not model.head_dim or not model.layers:
        return None
    element_bytes = model.kv_bytes_per_token / (2 * model.layers * model.kv_heads * model.head_dim)
    width = max(1, round(element_bytes))
    own = what_if.attention_intensity(model.heads, model.kv_heads, width)
    formula = f"2 · {model.heads} ÷ ({model.kv_heads} · {width} B) = **{figures(own)} FLOP/byte**"
    rows = what_if.groupings(model.heads, width, model.kv_heads)
    absorbed = what_if.mla_intensity(heads=128, rank=512, rope_dim=64, kv_dtype_bytes=2)
    rows.append(("MLA absorbed: DeepSeek-V3, bf16", 1, absorbed))
    return formula, pd.DataFrame(
        {
            "keys and values": [name for name, _, _ in rows],
            "KV heads": [kv for _, kv, _ in rows],
            "FLOP/byte": [round(value, 2) for _, _, value in rows],
        }
    )


def phases_table(message: dict[str, Any]) -> pd.DataFrame:
    """What the pictures draw, one row a phase. `message` as `backend.phases` makes it."""
    rows = []
    for phase, s in message.get("phases", {}).items():
        judged = s.get("verdict") or {}
        moved = sum(s[name] for name in ("weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes"))
        rows.append(
            {
                "phase": phase,
                "steps": s["steps"],
                "tokens": s["tokens"],
                "ms a step": round(1e3 * s["seconds"] / s["steps"], 3),
                "FLOP/byte": round(s["flops"] / moved, 3) if moved else None,
                "GFLOP/s": round(s["flops"] / s["seconds"] / 1e9, 2) if s["seconds"] else None,
                "GB/s": round(moved / s["seconds"] / 1e9, 2) if s["seconds"] else None,
                **{f"{name} (ms)": round(1e3 * seconds / s["steps"], 3) for name, seconds in s["parts"].items()},
                "of bandwidth (%)": round(100 * judged["mbu"], 1) if judged else None,
                "of compute (%)": round(100 * judged["mfu"], 1) if judged else None,
                "verdict": judged.get("regime"),
            }
        )
    return pd.DataFrame(rows)
