"""Every model on every accelerator: what fits, how many at once, how fast at best."""

from __future__ import annotations

import streamlit as st

from backend.planner import accelerators, catalogue, sweep
from backend.planner.accelerators import Accelerator
from backend.planner.catalogue import CatalogueModel
from backend.planner.plan import Setup
from pages.widgets import explorer_board, explorer_working
from pages.widgets.explorer import MODE


def show(setup: Setup, colours: dict) -> None:
    """The workload, the formats and the group size are those of `setup`."""
    choose, switch = st.columns([3, 1], gap="small", vertical_alignment="bottom")
    question = choose.segmented_control(
        f"Every model on every accelerator, otherwise as A: {setup.weights.name} weights, {setup.kv.name} KV, "
        f"{setup.context:,} tokens, batch {setup.batch:,}, TP {setup.tp}",
        [*explorer_board.MAPS],
        default="GPUs needed",
        required=True,
        key="map",
        **MODE,
    )
    everything = switch.toggle("Whole catalogue", key="map_all", **MODE)
    models, parts = _rows_and_columns(everything)
    asked = (setup.context, setup.output, setup.batch, setup.tp, setup.shared_prefix, setup.weights.name, setup.kv.name)
    grid = _cells(asked, everything, setup)
    labels = [model.name for model in models], [part.key for part in parts]
    st.plotly_chart(
        explorer_board.heat(grid, *labels, question, colours),
        key="chart_map",
        config={"displayModeBar": False},
        alt=f"{question} of each model on each accelerator",
    )
    explorer_working.table("map", lambda: explorer_board.heat_table(grid, *labels, question), question)


@st.cache_data(max_entries=64, show_spinner=False)
def _cells(asked: tuple, everything: bool, _setup: Setup) -> list[list[sweep.Cell]]:
    """`asked`: all of the setup that the map depends on; the setup itself is not looked at by the cache."""
    models, parts = _rows_and_columns(everything)
    return sweep.grid(_setup, [(model.name, model.architecture) for model in models], parts)


def _rows_and_columns(everything: bool) -> tuple[list[CatalogueModel], list[Accelerator]]:
    """Models by size, accelerators by memory."""
    models, parts = catalogue.models(), accelerators.load()
    rows = [models[key] for key in (models if everything else sweep.COMMON_MODELS) if key in models]
    columns = [parts[key] for key in (parts if everything else sweep.COMMON_PARTS) if key in parts]
    if everything:
        rows.sort(key=lambda row: row.architecture.parameters)
        columns.sort(key=lambda part: part.memory_bytes)
    return rows, columns
