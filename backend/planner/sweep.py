"""One knob turned, everything else held: the curves and the map that the explorer draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend.planner import cost, estimates, plan
from backend.planner.accelerators import Accelerator
from backend.planner.arch import Architecture
from backend.planner.errors import PlannerError
from backend.planner.plan import Setup
from backend.planner.results import Result
from backend.planner.roofline import prefill_time

KNOBS: dict[str, tuple[int, ...]] = {
    "context": tuple(1 << power for power in range(9, 21)),
    "batch": tuple(1 << power for power in range(11)),
    "output": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "tp": (1, 2, 4, 8, 16),
    "shared_prefix": (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
}


@dataclass(frozen=True)
class Point:
    """`x`: the knob. Rates in tok/s, times in seconds; None where nothing fits."""

    x: int
    room: int | None  # sequences that fit at once
    running: int
    weights_s: float
    kv_s: float
    arithmetic_s: float
    ceiling: float
    rate: Result  # the estimate, with its range
    per_user: float
    ttft_s: float
    usd_per_million: float


def sweep(setup: Setup, knob: str, values: Sequence[int] = ()) -> list[Point]:
    """At each value that makes a question; a batch is cut to what fits, as an engine would."""
    found = []
    for x in values or KNOBS[knob]:
        try:
            found.append(_point(_turned(setup, knob, x), x))
        except PlannerError:
            continue  # no such question: an answer longer than the context, more stages than layers
    return found


def _turned(setup: Setup, knob: str, x: int) -> Setup:
    changes: dict[str, int] = {knob: x}
    if knob == "context":
        changes |= {"output": min(setup.output, x // 2), "shared_prefix": min(setup.shared_prefix, x // 2)}
    return setup.but(**changes)


def _point(setup: Setup, x: int) -> Point:
    fit = plan.room(setup).value
    running = max(1, min(setup.batch, int(fit))) if fit else setup.batch
    step = plan.decode(setup, running)
    band = plan.decode_band(setup, running)
    ceiling = Result(running / step.value, "tok/s", "bound", step.terms)
    rate = estimates.rate_estimate(ceiling, band)
    ttft = prefill_time(
        setup.arch, setup.weights, setup.accelerator,
        tokens=setup.prompt, cached=plan.cached_prefix(setup), tp=setup.tp,
    )  # fmt: skip
    return Point(
        x=x,
        room=None if fit is None else int(fit),
        running=running,
        weights_s=step.terms[0].value,
        kv_s=step.terms[1].value,
        arithmetic_s=step.terms[2].value,
        ceiling=ceiling.value,
        rate=rate,
        per_user=1 / step.value,
        ttft_s=ttft.value,
        usd_per_million=cost.per_million(setup.usd_per_gpu_hour, setup.gpus, rate.value).value,
    )


@dataclass(frozen=True)
class Cell:
    """A model on an accelerator. `gpus`: the smallest group on which one sequence fits, None if none does; the others
    at the group size that was asked for. `why`: why nothing runs there, or "" where something does."""

    gpus: int | None
    room: int
    ceiling: float | None
    why: str = ""


GROUPS = (1, 2, 4, 8, 16)


def cell(setup: Setup) -> Cell:
    needed = next((tp for tp in GROUPS if plan.room(setup.but(tp=tp)).value), None)
    try:
        why = plan.unusable(setup)
        room = int(plan.room(setup).value or 0)
        running = min(setup.batch, room)
        ceiling = running / plan.decode(setup, running).value if running else None
    except PlannerError as error:
        return Cell(needed, 0, None, str(error))
    return Cell(needed, room, ceiling, why)


def grid(setup: Setup, models: Sequence[tuple[str, Architecture]], parts: Sequence[Accelerator]) -> list[list[Cell]]:
    """One row a model, one column an accelerator; the workload and the formats are those of `setup`."""
    return [[cell(setup.but(name=name, arch=arch, accelerator=part, pp=1)) for part in parts] for name, arch in models]


# What the map shows unless all is asked for: one of each size and kind, and the parts that people can rent or own.
COMMON_MODELS = (
    "smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-4b", "llama-2-7b", "llama-3.1-8b", "qwen3-8b",
    "gemma-3-12b-it", "phi-4", "gpt-oss-20b", "gemma-3-27b-it", "qwen3-30b-a3b", "qwen3-32b", "llama-3.1-70b",
    "qwen3-next-80b-a3b", "glm-4.5-air", "gpt-oss-120b", "qwen3-235b-a22b", "llama-3.1-405b", "deepseek-v3",
    "kimi-k2-instruct",
)  # fmt: skip
COMMON_PARTS = (
    "t4", "l4", "a10", "rtx-3090", "rtx-4090", "rtx-5090", "l40s", "rtx-pro-6000-blackwell", "a100-sxm-40gb",
    "a100-sxm-80gb", "h100-pcie-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "b300-sxm", "mi300x",
    "mi355x", "gaudi3", "m4-max-40core",
)  # fmt: skip
