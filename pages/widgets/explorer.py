"""The explorer's questions: two configurations and the workload they share. All of it lives in the address."""

from __future__ import annotations

import json
from collections.abc import Sequence

import streamlit as st

from backend.fold import State
from backend.planner import accelerators, catalogue, machine, plan, sweep
from backend.planner.accelerators import Accelerator
from backend.planner.arch import Architecture
from backend.planner.byhand import by_hand
from backend.planner.config import parse
from backend.planner.errors import PlannerError
from backend.planner.formats import KV, WEIGHTS
from backend.planner.shape import UnsupportedArchitecture
from pages.widgets import service
from pages.widgets.explorer_curves import NAMES
from pages.widgets.format import plain

HAND = "by-hand"
DEFAULTS = {
    "A": {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "weights": "bf16", "kv": "bf16", "price": 2.5},
    "B": {"model": "llama-3.1-8b", "gpu": "l40s", "weights": "fp8", "kv": "fp8", "price": 1.0},
}
GROUPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 4, 8)
DIMENSIONS = (  # argument of by_hand, words, default, least
    ("layers", "Layers", 32, 1),
    ("hidden", "Hidden size", 4096, 1),
    ("q_heads", "Query heads", 32, 1),
    ("kv_heads", "KV heads", 8, 1),
    ("head_dim", "Head size", 128, 1),
    ("ff", "MLP width (of one expert)", 14336, 1),
    ("vocab", "Vocabulary", 128_256, 1),
    ("window", "Window (0: none)", 0, 0),
    ("experts", "Experts (0: dense)", 0, 0),
    ("experts_per_token", "Experts for a token", 0, 0),
    ("kv_lora_rank", "KV latent (MLA; 0: none)", 0, 0),
    ("qk_rope_head_dim", "Rotary part (MLA)", 0, 0),
)
MODE = {"bind": "query-params", "persist_state": "session"}


def this_machine() -> tuple[Accelerator | None, str | None, list[machine.Measured]]:
    """(the engine's machine by its measured ceilings, its model's key, measured decode steps); nothing waits for it."""
    found = service.get()

    def read(state: State):
        rows = [(row[1], row[2], row[3], row[13]) for row in state.series]
        return state.epoch, state.model, state.device.memory_bytes, rows

    epoch, model, memory_bytes, rows = found.hub.read(read)
    part = machine.from_ceilings(found.roofs.known(epoch).get("ceilings"), memory_bytes)
    key = machine.catalogue_key(model.parameters, model.layers) if model.parameters else None
    return part, key, machine.decode_points(rows, model.kv_bytes_per_token)


def parts(own: Accelerator | None) -> dict[str, Accelerator]:
    return ({own.key: own} if own else {}) | accelerators.load()


def configuration(which: str, known: dict[str, Accelerator]) -> None:
    """The widgets of one configuration; `setup` reads what they say."""
    said, models = DEFAULTS[which], catalogue.models()
    left, right = st.columns(2, gap="small")
    left.selectbox(
        f"Model {which}",
        [*models, HAND],
        index=[*models].index(said["model"]),
        key=f"{which.lower()}_model",
        format_func=lambda key: f"{models[key].name}" if key in models else "by hand, or from a config.json",
        help=_source(models.get(st.session_state.get(f"{which.lower()}_model", said["model"]))),
        **MODE,
    )
    right.selectbox(
        f"Accelerator {which}",
        [*known],
        index=[*known].index(said["gpu"]),
        key=f"{which.lower()}_gpu",
        format_func=lambda key: known[key].name,
        help=_source(known.get(st.session_state.get(f"{which.lower()}_gpu", said["gpu"]))),
        **MODE,
    )
    columns = st.columns(4, gap="small")
    _select(columns[0], f"TP {which}", GROUPS, 1, f"{which.lower()}_tp", "GPUs that share every layer.")
    formats = ((columns[1], "Weights", WEIGHTS, "weights"), (columns[2], "KV", KV, "kv"))
    for column, label, rows, name in formats:
        words = "; ".join(f"{row.name}: {row.words}" for row in rows.values())
        _select(column, f"{label} {which}", [*rows], said[name], f"{which.lower()}_{name}", words)
    with columns[3]:
        st.number_input(
            f"$/h {which}",
            min_value=0.0,
            max_value=1000.0,
            value=said["price"],
            step=0.1,
            key=f"{which.lower()}_price",
            help="What one GPU costs you for an hour: your own number, no data sheet has it.",
            **MODE,
        )
    if st.session_state.get(f"{which.lower()}_model") == HAND:
        _hand(which)


def _select(column, label: str, options: Sequence, default, key: str, words: str) -> None:
    column.selectbox(label, options, index=list(options).index(default), key=key, help=plain(words), **MODE)


def _source(row) -> str | None:
    """Where a catalogue row comes from."""
    if row is None:
        return None
    checked = {"yes": "read there", "partly": "partly read there", "no": "from memory, not checked"}[row.verified]
    kind = getattr(row, "kind", "configuration")
    return plain(f"{kind}: {row.source}; {checked}. {row.notes}")


def _hand(which: str) -> None:
    with st.popover(f"Dimensions of {which}", icon=":material/edit:", width="stretch"):
        st.caption("Count them from the model's card. Or paste its config.json below, which then is what counts.")
        columns = st.columns(3, gap="small")
        for index, (name, words, default, least) in enumerate(DIMENSIONS):
            columns[index % 3].number_input(
                f"{words}",
                min_value=least,
                max_value=2**31,
                value=default,
                step=1,
                key=f"{which.lower()}_{name}",
                **MODE,
            )
        st.text_area(
            "config.json",
            key=f"{which.lower()}_config",
            height=120,
            max_chars=200_000,
            placeholder='{"model_type": "llama", …}',
            help="Stays in this tab: a link carries the dimensions above, not this text.",
        )


def workload() -> None:
    """What both are asked to do. The button beside each slider turns that knob in the curves."""
    columns = st.columns(4, gap="medium")
    sliders = (
        ("context", sweep.KNOBS["context"], 8192, "Tokens of a sequence: prompt and answer."),
        ("output", sweep.KNOBS["output"], 256, "Tokens of it that are generated."),
        ("batch", sweep.KNOBS["batch"], 32, "Sequences that decode together, if they fit."),
        ("shared_prefix", sweep.KNOBS["shared_prefix"], 0, "Tokens that all prompts begin with."),
    )
    for column, (name, options, default, words) in zip(columns, sliders, strict=True):
        with column.container(gap=None):
            st.select_slider(
                NAMES[name], options, default, key=name, format_func=lambda n: f"{n:,}", help=words, **MODE
            )
            st.button(
                f"Sweep {name.replace('_', ' ')}",
                key=f"sweep_{name}",
                icon=":material/ssid_chart:",
                type="tertiary",
                on_click=_sweep,
                args=(name,),
            )


def _sweep(name: str) -> None:
    st.session_state.sweep = name


def setup(which: str, known: dict[str, Accelerator]) -> plan.Setup:
    """Raises PlannerError with what to change."""
    get = st.session_state.get
    prefix = which.lower()
    key = get(f"{prefix}_model")
    arch, name = _architecture(prefix, key)
    return plan.Setup(
        name=name,
        arch=arch,
        accelerator=known[get(f"{prefix}_gpu")],
        weights=WEIGHTS[get(f"{prefix}_weights")],
        kv=KV[get(f"{prefix}_kv")],
        tp=get(f"{prefix}_tp"),
        context=get("context"),
        output=get("output"),
        batch=get("batch"),
        shared_prefix=max(0, min(get("shared_prefix"), get("context") - get("output"))),
        usd_per_gpu_hour=float(get(f"{prefix}_price")),
    )


def chosen(which: str) -> tuple[str, str]:
    """Catalogue keys of model and accelerator; what is entered by hand or is this machine has keys of its own."""
    prefix = which.lower()
    return st.session_state[f"{prefix}_model"], st.session_state[f"{prefix}_gpu"]


def _architecture(prefix: str, key: str) -> tuple[Architecture, str]:
    if key != HAND:
        row = catalogue.models()[key]
        return row.architecture, row.name
    text = (st.session_state.get(f"{prefix}_config") or "").strip()
    if text:
        try:
            return parse(json.loads(text)), "config.json"
        except (ValueError, RecursionError) as error:
            if isinstance(error, PlannerError):
                raise
            raise PlannerError(f"this is no JSON: {error}") from error
    given = {name: st.session_state.get(f"{prefix}_{name}", default) for name, _, default, _ in DIMENSIONS}
    return by_hand(**(given | {"window": given["window"] or None, "tied": False})), "by hand"


def refusal(which: str, error: PlannerError) -> None:
    """Why there is no plan, and what to do."""
    if isinstance(error, UnsupportedArchitecture):
        reasons = "\n".join(f"- {plain(reason)}" for reason in error.reasons)
        nearest = f"\n\nNearest that is known: {plain(', '.join(error.closest))}." if error.closest else ""
        hint = "\n\nEmpty the config.json box to enter the dimensions by hand."
        st.error(f"{reasons}{nearest}{hint}", title=f"{which}: this model cannot be counted", icon=":material/block:")
    else:
        st.error(plain(str(error)), title=f"{which} has no plan", icon=":material/block:")
