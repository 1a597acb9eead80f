"""What an engine's steps take beside their bound, cause by cause: for an engine that plays every step.

A factor on a bound cannot tell a step that is long because much is read from one that is long because hundreds of
kernels are launched and GPUs wait for each other: the first grows with the model, the second does not. Fitted on one
half of public measurements of servers and checked on the other by `benchmarks/server_costs.py`; of the half that it was
not fitted to, the bands hold 9 of 10 rows, and 3 of 4 of mixtures' TTFT.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.planner.accelerators import Accelerator
from backend.planner.arch import Architecture

EXCHANGES = 2  # of a tensor-parallel layer: after attention and after the MLP
ELEMENT_BYTES = 2  # of what is exchanged


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of the middle of what was measured. Times in seconds."""

    memory: float  # time / (bytes / data sheet's bandwidth)
    arithmetic: float  # time / (FLOPs / data sheet's rate), where a step decodes only
    prompt_arithmetic: float  # the same with prompts in the step
    kernels_s: float  # a layer, in a step that decodes only: kernels of a captured graph that follow each other
    launches_s: float  # a layer, in a step with prompts: each kernel is launched by the host
    step_s: float  # a step: scheduling, sampling, bringing tokens to the host
    front_s: float  # a request, before the engine hears of it and beside its steps: HTTP, tokenising, handing over
    fast: float  # the ends of the band, times the middle, of a step that decodes only
    slow: float
    prompt_fast: float  # the same of a step with prompts, and of `front_s`: the way to the first token
    prompt_slow: float
    exchange_s: float = 8e-6  # an exchange between GPUs, however little is exchanged
    exchange: float = 1.3  # time / (bytes / link's rate)


DENSE = Costs(
    memory=1.64, arithmetic=1.75, prompt_arithmetic=2.3, kernels_s=13e-6, launches_s=90e-6, step_s=1.5e-3,
    front_s=40e-3, fast=0.72, slow=1.4, prompt_fast=0.7, prompt_slow=2.3,
)  # fmt: skip
MIXTURE = Costs(
    memory=1.43, arithmetic=1.75, prompt_arithmetic=4.3, kernels_s=27e-6, launches_s=1e-3, step_s=1.5e-3,
    front_s=30e-3, fast=0.66, slow=1.55, prompt_fast=0.68, prompt_slow=2.7,
)  # fmt: skip


def costs(arch: Architecture) -> Costs:
    return MIXTURE if arch.mixtures else DENSE


def step_s(
    arch: Architecture, where: Accelerator, tp: int, *, memory_s: float, arithmetic_s: float, tokens: int, prompts: bool
) -> float:
    """The middle of what is to be expected of a step whose bound is the larger of `memory_s` and `arithmetic_s`."""
    paid, layers = costs(arch), len(arch.layers)
    busy = max(paid.memory * memory_s, (paid.prompt_arithmetic if prompts else paid.arithmetic) * arithmetic_s)
    beside = layers * (paid.launches_s if prompts else paid.kernels_s) + paid.step_s
    return busy + beside + exchange_s(arch, where, tp, tokens)


def exchange_s(arch: Architecture, where: Accelerator, tp: int, tokens: int) -> float:
    """Adding up what `tp` GPUs have each computed of every layer: a ring moves each element 2 (n - 1) / n times."""
    if tp == 1:
        return 0.0
    paid = costs(arch)
    link = where.link_bytes_per_s or where.pcie_bytes_per_s
    ring_bytes = 2 * (tp - 1) / tp * tokens * arch.hidden * ELEMENT_BYTES
    each = paid.exchange_s + (paid.exchange * ring_bytes / link if link else 0.0)
    return EXCHANGES * len(arch.layers) * each
