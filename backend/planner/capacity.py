"""Where a GPU's memory goes, and how many sequences fit into what is left. Negative budgets are said, not hidden."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from backend.planner.accelerators import Accelerator
from backend.planner.arch import Architecture, Dense, Experts
from backend.planner.errors import PlannerError
from backend.planner.formats import KvFormat, WeightFormat
from backend.planner.kvcache import KvModel, blocks, kv_model
from backend.planner.results import Result, Term, count
from backend.planner.units import GIB
from backend.planner.weights import per_gpu


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """What an engine keeps of a GPU's memory. Assumptions, each to be replaced by what an engine's log says."""

    utilisation: float = 0.9  # share of the memory that the engine may use at all
    step_tokens: int = 8192  # tokens in the largest step: activations are as large as that
    other_bytes: int = GIB // 2  # CUDA context, communication buffers
    graph_bytes: int = GIB // 2  # captured CUDA graphs
    block_size: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1:
            raise PlannerError(f"utilisation must lie above 0 and not above 1, not {self.utilisation!r}")
        for name, least in (("step_tokens", 1), ("block_size", 1), ("other_bytes", 0), ("graph_bytes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 40:
                raise PlannerError(f"{name} must be a whole number of at least {least}, not {value!r}")


@lru_cache(maxsize=1024)
def activation_bytes(arch: Architecture, step_tokens: int, tp: int = 1) -> int:
    """Peak of the largest step, in 16 bit: residual stream and its copy, and the widest of attention and MLP inside."""
    widest = 0
    for layer in dict.fromkeys(arch.layers):
        inner = 0
        if isinstance(layer.ffn, Dense):
            inner = 3 * layer.ffn.width
        elif isinstance(layer.ffn, Experts):
            inner = 3 * layer.ffn.width * layer.ffn.per_token
        widest = max(widest, inner)
    heads = max((mixer.heads * getattr(mixer, "k_dim", 192) for mixer in arch.kv_layers), default=2 * arch.hidden)
    return 2 * step_tokens * (2 * arch.hidden + max(widest, 4 * heads) // tp)


def memory_budget(
    arch: Architecture,
    form: WeightFormat,
    accelerator: Accelerator,
    reserve: Reserve = Reserve(),
    *,
    tp: int = 1,
    pp: int = 1,
) -> Result:
    """Bytes for KV on the fullest GPU; below zero when the model does not fit. Terms add up to it."""
    usable = accelerator.memory_bytes * reserve.utilisation
    weights = per_gpu(arch, form, tp, pp).value
    activations = activation_bytes(arch, reserve.step_tokens, tp)
    terms = (
        Term("usable", usable, "B", f"{count(accelerator.memory_bytes)} B × {reserve.utilisation:g}"),
        Term("weights", -weights, "B", f"of one of {tp * pp} GPUs"),
        Term("activations", -activations, "B", f"largest step of {reserve.step_tokens:,} tokens"),
        Term("CUDA graphs", -reserve.graph_bytes, "B", "assumed"),
        Term("other", -reserve.other_bytes, "B", "CUDA context and communication, assumed"),
    )
    left = sum(term.value for term in terms)
    note = "" if left > 0 else f"does not fit: {count(-left)} B too much on each GPU"
    return Result(left, "B", "estimate", terms, "usable - weights - activations - graphs - other", note)


def sequence_bytes(model: KvModel, tokens: int, block_size: int) -> float:
    """What one sequence takes of the pool: whole blocks of every layer, and its states."""
    kept = sum(
        size * block_size * blocks(tokens if window is None else min(tokens, window), block_size)
        for window, size in model.grouped
    )
    return kept + model.state_bytes


def concurrency(kv_budget_bytes: float, model: KvModel, tokens: int, block_size: int = 16) -> Result:
    """Whole sequences of `tokens` that fit at once."""
    each = sequence_bytes(model, tokens, block_size)
    if kv_budget_bytes < 0:
        return Result(None, "sequences", "estimate", note="the weights alone do not fit")
    if not each:
        return Result(None, "sequences", "estimate", note="sequences take no memory")
    number = int(kv_budget_bytes // each)
    formula = f"floor({count(kv_budget_bytes)} B / {count(each)} B), blocks of {block_size} tokens"
    note = "" if number else f"not even one sequence of {tokens:,} tokens fits"
    return Result(number, "sequences", "estimate", formula=formula, note=note)


def max_concurrency(
    arch: Architecture,
    form: WeightFormat,
    kv: KvFormat,
    accelerator: Accelerator,
    *,
    context: int,
    tp: int = 1,
    pp: int = 1,
    reserve: Reserve = Reserve(),
) -> Result:
    budget = memory_budget(arch, form, accelerator, reserve, tp=tp, pp=pp).value
    return concurrency(budget, kv_model(arch, kv, tp, pp), context, reserve.block_size)


def fits(memory_bytes: float, weight_bytes: float, kv_bytes: float) -> Result:
    """1 when both fit together, else 0; the terms say by how much."""
    left = memory_bytes - weight_bytes - kv_bytes
    terms = (
        Term("memory", memory_bytes, "B"),
        Term("weights", -weight_bytes, "B"),
        Term("KV", -kv_bytes, "B"),
    )
    return Result(float(left >= 0), "bool", "exact", terms, f"{count(left)} B left")
