"""Steps of a model on an accelerator: what they compute and read, and the least time that can take."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from backend.planner.accelerators import Accelerator
from backend.planner.arch import Architecture
from backend.planner.errors import UnsupportedDtype
from backend.planner.formats import KvFormat, WeightFormat
from backend.planner.kvcache import kv_model
from backend.planner.napkin import step_time
from backend.planner.results import Result, Term, count, total
from backend.planner.weights import read_bytes

MOST_TOKENS = 1 << 20  # where the search for a crossover ends


def arithmetic(accelerator: Accelerator, form: WeightFormat) -> tuple[str, float | None]:
    """(format, FLOP/s): the fastest arithmetic of the accelerator that these weights can use. Weights stored smaller
    than any arithmetic it has are widened first, so only their bytes shrink. Where the catalogue has no rate at all,
    (unknown, None): what is bounded is then the memory traffic alone. Raises UnsupportedDtype."""
    if not accelerator.flops_per_s:
        return "unknown", None
    for dtype in form.math:
        if dtype in accelerator.flops_per_s:
            return dtype, accelerator.flops_per_s[dtype]
    known = ", ".join(accelerator.flops_per_s) or "no rate at all"
    wanted = " or ".join(form.math)
    raise UnsupportedDtype(
        f"{form.name} weights need {wanted} arithmetic; the catalogue has {known} for {accelerator.name}"
    )


def pairs(new: int, before: int, window: int | None) -> int:
    """Query-key pairs of `new` tokens after `before` others, each seeing itself and at most `window` tokens."""
    if window is None or before + new <= window:
        return new * before + new * (new + 1) // 2
    if before >= window:
        return new * window
    growing = window - before
    return growing * before + growing * (growing + 1) // 2 + (new - growing) * window


@lru_cache(maxsize=4096)
def span_flops(arch: Architecture, new: int, before: int, *, decode: bool) -> tuple[int, int]:
    """(attention, states): FLOPs beside the matrices for `new` tokens of one sequence after `before`."""
    attention = sum(
        number * mixer.flops_per_pair(decode) * pairs(new, before, mixer.window) for mixer, number in arch.kv_counts
    )
    return attention, new * sum(state.flops_per_token for state in arch.states)


def prefill_flops(arch: Architecture, tokens: int, cached: int = 0) -> Result:
    """Of a prompt of `tokens`, `cached` of them already in the cache. Only the last position needs the head."""
    new = tokens - cached
    body = arch.active_matmul_parameters - arch.head
    attention, states = span_flops(arch, new, cached, decode=False)
    terms = [
        Term("matrices", 2 * body * new, "FLOP", f"2 × {count(body)} × {count(new)}"),
        Term("head", 2 * arch.head, "FLOP", f"2 × {count(arch.head)}, last position only"),
        Term("attention", attention, "FLOP", "causal: each token sees those before it"),
    ]
    if states:
        terms.append(Term("states", states, "FLOP", f"{count(new)} × {count(states / new)}"))
    return total("FLOP", "exact", terms)


def attention_flops(arch: Architecture, new: int, before: int = 0, *, causal: bool = True) -> int:
    """Of the scores and values alone. Without `causal` every token is paired with every other."""
    if causal:
        return span_flops(arch, new, before, decode=False)[0]
    return sum(n * mixer.flops_per_pair(False) * new * (before + new) for mixer, n in arch.kv_counts)


def decode_flops(arch: Architecture, batch: int, context: int) -> Result:
    """Of one step in which `batch` sequences that then hold `context` tokens get one more each."""
    attention, states = span_flops(arch, 1, max(context - 1, 0), decode=True)
    active = arch.active_matmul_parameters
    terms = [
        Term("matrices", 2 * active * batch, "FLOP", f"2 × {count(active)} × {batch}"),
        Term("attention", attention * batch, "FLOP", f"{batch} × {count(attention)} at {count(context)} tokens"),
    ]
    if states:
        terms.append(Term("states", states * batch, "FLOP", f"{batch} × {count(states)}"))
    return total("FLOP", "exact", terms)


class Load(NamedTuple):
    """Of one GPU in one step."""

    weight_bytes: float
    kv_bytes: float
    flops: float


def decode_load(
    arch: Architecture,
    form: WeightFormat,
    kv: KvFormat,
    *,
    batch: int,
    context: int,
    tp: int = 1,
    pp: int = 1,
    tokens_each: int = 1,
) -> Load:
    part = -(-batch // pp)
    attention, states = span_flops(arch, tokens_each, max(context - tokens_each, 0), decode=True)
    return Load(
        read_bytes(arch, form, part * tokens_each, tp),
        part * kv_model(arch, kv, tp).bytes(context),
        part * (2 * arch.active_matmul_parameters * tokens_each + attention + states) / tp,
    )


def decode_step(
    arch: Architecture, form: WeightFormat, kv: KvFormat, accelerator: Accelerator, **question: int
) -> Result:
    """Least time of one decode step: TPOT of everybody in the batch. `question`: as of `decode_load`.

    Each of `tp` GPUs reads its share of the weights and its own cache. With `pp` stages the batch is cut into as many
    parts that follow each other through the pipeline: a token still passes every layer. `tokens_each` > 1: a step that
    verifies so many drafted tokens for each sequence, reading the cache once.
    """
    _, rate = arithmetic(accelerator, form)
    load = decode_load(arch, form, kv, **question)
    return step_time(
        weight_bytes=load.weight_bytes,
        kv_bytes=load.kv_bytes,
        bytes_per_s=accelerator.bandwidth_bytes_per_s,
        flops=load.flops,
        flops_per_s=rate,
    )


def prefill_time(
    arch: Architecture,
    form: WeightFormat,
    accelerator: Accelerator,
    *,
    tokens: int,
    cached: int = 0,
    tp: int = 1,
) -> Result:
    """Least TTFT of a prompt that has the accelerator for itself: max(FLOPs / rate, weights / BW)."""
    _, rate = arithmetic(accelerator, form)
    return step_time(
        weight_bytes=read_bytes(arch, form, tokens - cached, tp),
        bytes_per_s=accelerator.bandwidth_bytes_per_s,
        flops=prefill_flops(arch, tokens, cached).value / tp,
        flops_per_s=rate,
    )


def crossover_batch(
    arch: Architecture, form: WeightFormat, kv: KvFormat, accelerator: Accelerator, *, context: int, tp: int = 1
) -> Result:
    """Smallest batch at which a decode step takes longer to compute than to read; None: never, because each sequence's
    own cache takes longer to read than its arithmetic takes."""

    _, rate = arithmetic(accelerator, form)
    bandwidth = accelerator.bandwidth_bytes_per_s
    if rate is None:
        return Result(None, "sequences", "bound", note="no rate of arithmetic is known for this accelerator")

    def surplus(batch: int) -> float:
        load = decode_load(arch, form, kv, batch=batch, context=context, tp=tp)
        return load.flops / rate - (load.weight_bytes + load.kv_bytes) / bandwidth

    high = 1
    while surplus(high) < 0:
        high *= 2
        if high > MOST_TOKENS:
            one = decode_load(arch, form, kv, batch=1, context=context, tp=tp)
            note = (
                f"never: a sequence's cache takes {one.kv_bytes / bandwidth * 1e6:,.1f} µs to read, its arithmetic "
                f"{one.flops / rate * 1e6:,.1f} µs"
            )
            return Result(None, "sequences", "bound", note=note)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if surplus(middle) < 0 else (low, middle)
    formula = "smallest B with FLOPs(B) / rate ≥ (weights(B) + B × KV) / BW"
    return Result(high, "sequences", "bound", formula=formula)


def throughput(
    arch: Architecture,
    form: WeightFormat,
    kv: KvFormat,
    accelerator: Accelerator,
    *,
    prompt: int,
    output: int,
    batch: float,
    tp: int = 1,
) -> Result:
    """Output tokens a second that no server with `batch` sequences at once can exceed: each request needs its prompt's
    and its answer's arithmetic, its cache read at every step, and its share of the weights."""
    _, rate = arithmetic(accelerator, form)
    flops = prefill_flops(arch, prompt).value
    middle = prompt + output // 2
    attention, states = span_flops(arch, 1, middle, decode=True)
    flops += output * (2 * arch.active_matmul_parameters + attention + states)
    compute_s = flops / tp / rate if rate else 0.0
    weights = read_bytes(arch, form, batch, tp) / batch
    memory_s = output * (weights + kv_model(arch, kv, tp).bytes(prompt)) / accelerator.bandwidth_bytes_per_s
    terms = (
        Term("arithmetic of a request", compute_s, "s", f"{count(flops)} FLOP / {tp} / {count(rate or 0)} FLOP/s"),
        Term(
            "memory of a request",
            memory_s,
            "s",
            f"{count(output)} × (weights / {count(batch)} + KV of the prompt) / BW",
        ),
    )
    return Result(output / max(compute_s, memory_s), "tok/s", "bound", terms, f"{count(output)} / max(terms)")
