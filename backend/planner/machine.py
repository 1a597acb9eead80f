"""The machine that serves, as an accelerator by its measured ceilings, and its measured steps as points of a plan."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from backend.planner import catalogue
from backend.planner.accelerators import Accelerator, measured

LEAST_STEPS = 5  # of one batch size; fewer say nothing
MOST_POINTS = 12


class Measured(NamedTuple):
    """Steps that only decoded, of one batch size: medians."""

    batch: int
    step_s: float
    context: float  # tokens attended by each sequence
    steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s


def from_ceilings(ceilings: dict | None, memory_bytes: int) -> Accelerator | None:
    """None where nothing was measured. `ceilings`: as the engine tells them, with `read` and `matmul` in SI units."""
    try:
        read, matmul, conditions = ceilings["read"], ceilings["matmul"], ceilings["conditions"]
        if read.get("evidence", "measured") != "measured":
            return None  # of a modelled device
        return measured(
            f"This machine: {conditions['device_name']}",
            memory_bytes=memory_bytes,
            read_bytes_per_s=float(read["value"]),
            flops_per_s={conditions["dtype"]: float(matmul["value"])},
            source=f"measured on this machine {conditions.get('date', '')[:10]}, {conditions['dtype']}",
        )
    except (AttributeError, TypeError, KeyError, ValueError):
        return None


def catalogue_key(parameters: int, layers: int) -> str | None:
    """The catalogue's name of a loaded model, by its counts; None when it is not there."""
    for key, row in catalogue.models().items():
        if row.architecture.parameters == parameters and len(row.architecture.layers) == layers:
            return key
    return None


def decode_points(rows: Iterable[tuple[float, int, int, float]], kv_bytes_per_token: int) -> list[Measured]:
    """`rows`: (step seconds, prefill tokens, decode tokens, KV bytes read) of single steps."""
    by_batch: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step_s, prefill, decode, kv_read in rows:
        if decode and not prefill and step_s > 0:
            by_batch[decode].append((step_s, kv_read / decode / max(1, kv_bytes_per_token)))
    enough: Sequence = [(batch, steps) for batch, steps in by_batch.items() if len(steps) >= LEAST_STEPS]
    kept = sorted(sorted(enough, key=lambda entry: -len(entry[1]))[:MOST_POINTS])
    return [
        Measured(
            batch,
            statistics.median(step_s for step_s, _ in steps),
            statistics.median(context for _, context in steps),
            len(steps),
        )
        for batch, steps in kept
    ]
