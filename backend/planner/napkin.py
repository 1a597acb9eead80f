"""The formulas themselves, on plain numbers: what fits on a napkin. Everything larger is built of these."""

from __future__ import annotations

import math

from backend.planner.errors import PlannerError
from backend.planner.results import Result, Term, count


def positive(**values: float) -> None:
    """Raises PlannerError that names the first value that is no positive number."""
    for name, value in values.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise PlannerError(f"{name} must be a positive number, not {value}")


def ridge(flops_per_s: float, bytes_per_s: float) -> Result:
    """FLOP/B above which arithmetic is the limit."""
    positive(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    formula = f"{count(flops_per_s)} FLOP/s / {count(bytes_per_s)} B/s"
    return Result(flops_per_s / bytes_per_s, "FLOP/B", "exact", formula=formula)


def linear_intensity(tokens: float, weight_bytes: float) -> Result:
    """FLOP/B of a weight matrix that `tokens` share, activations neglected: 2·tokens / bytes a weight."""
    positive(tokens=tokens, weight_bytes=weight_bytes)
    return Result(2 * tokens / weight_bytes, "FLOP/B", "exact", formula=f"2 × {count(tokens)} / {weight_bytes:g} B")


def attention_intensity(q_heads: float, kv_heads: float, kv_element_bytes: float) -> Result:
    """FLOP/B of decode attention: constant in batch and context, so no batch ever makes it compute-bound."""
    positive(q_heads=q_heads, kv_heads=kv_heads, kv_element_bytes=kv_element_bytes)
    value = 2 * q_heads / (kv_heads * kv_element_bytes)
    return Result(value, "FLOP/B", "exact", formula=f"2 × {q_heads} / ({kv_heads} × {kv_element_bytes:g} B)")


def critical_batch(flops_per_s: float, bytes_per_s: float, weight_bytes: float) -> Result:
    """Tokens in a step from which the weights alone are limited by arithmetic: ridge · bytes a weight / 2."""
    value = ridge(flops_per_s, bytes_per_s).value * weight_bytes / 2
    formula = f"{count(flops_per_s)} / {count(bytes_per_s)} × {weight_bytes:g} / 2"
    return Result(value, "tokens", "exact", formula=formula)


def step_time(
    *,
    weight_bytes: float,
    kv_bytes: float = 0.0,
    bytes_per_s: float,
    flops: float = 0.0,
    flops_per_s: float | None = None,
) -> Result:
    """The least time of a step whose traffic and arithmetic overlap perfectly: max(bytes / BW, FLOPs / rate)."""
    positive(bytes_per_s=bytes_per_s)
    weights_s, kv_s = weight_bytes / bytes_per_s, kv_bytes / bytes_per_s
    compute_s = flops / flops_per_s if flops and flops_per_s else 0.0
    terms = (
        Term("weights", weights_s, "s", f"{count(weight_bytes)} B / {count(bytes_per_s)} B/s"),
        Term("KV", kv_s, "s", f"{count(kv_bytes)} B / {count(bytes_per_s)} B/s"),
        Term(
            "arithmetic",
            compute_s,
            "s",
            f"{count(flops)} FLOP / {count(flops_per_s)} FLOP/s" if flops_per_s else "no rate is known: left out",
        ),
    )
    limiter = "arithmetic" if compute_s > weights_s + kv_s else "memory"
    return Result(
        max(weights_s + kv_s, compute_s),
        "s",
        "bound",
        terms,
        "max(weights + KV, arithmetic)",
        f"{limiter} is the limit",
    )


def step_time_unoverlapped(
    *, weight_bytes: float, kv_bytes: float, bytes_per_s: float, flops: float, flops_per_s: float
) -> Result:
    """Attention first, then the matrices: KV / BW + max(weights / BW, FLOPs / rate). More than the bound, and none."""
    positive(bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)
    matrices_s = max(weight_bytes / bytes_per_s, flops / flops_per_s)
    terms = (
        Term("attention", kv_bytes / bytes_per_s, "s", f"{count(kv_bytes)} B / {count(bytes_per_s)} B/s"),
        Term("matrices", matrices_s, "s", f"max({count(weight_bytes)} B / BW, {count(flops)} FLOP / rate)"),
    )
    return Result(terms[0].value + matrices_s, "s", "estimate", terms, "attention + matrices")


def arithmetic_time(flops: float, flops_per_s: float, share_of_peak: float = 1.0) -> Result:
    """`share_of_peak` below 1 makes an estimate of the bound."""
    positive(flops_per_s=flops_per_s, share_of_peak=share_of_peak)
    share = "" if share_of_peak == 1 else f" / {share_of_peak:g}"
    formula = f"{count(flops)} FLOP / {count(flops_per_s)} FLOP/s{share}"
    kind = "bound" if share_of_peak == 1 else "estimate"
    return Result(flops / flops_per_s / share_of_peak, "s", kind, formula=formula)


def all_reduce_time(
    *, layers: int, hidden: int, tokens: int, bytes_per_s: float, element_bytes: float = 2, per_layer: float = 2,
    gpus: int | None = None, latency_s: float = 0.0,
) -> Result:  # fmt: skip
    """Time of tensor-parallel exchange, if nothing hides it. `gpus`: counts the ring's 2(n-1)/n passes; without it each
    exchange moves its data once."""
    positive(bytes_per_s=bytes_per_s)
    ring = 2 * (gpus - 1) / gpus if gpus else 1.0
    moved = layers * per_layer * ring * tokens * hidden * element_bytes
    waits = layers * per_layer * latency_s if not gpus or gpus > 1 else 0.0
    formula = (
        f"{layers} layers × {per_layer:g} × {ring:g} × {count(tokens)} × {count(hidden)} × {element_bytes:g} B / "
        f"{count(bytes_per_s)} B/s" + (f" + {waits:.3g} s latency" if waits else "")
    )
    return Result(moved / bytes_per_s + waits, "s", "estimate", formula=formula)


def cache_equals_weights(weight_bytes: float, kv_bytes_per_token: float) -> Result:
    """Tokens in all sequences together from which the cache is larger, and takes longer to read, than the weights."""
    positive(weight_bytes=weight_bytes, kv_bytes_per_token=kv_bytes_per_token)
    formula = f"{count(weight_bytes)} B / {count(kv_bytes_per_token)} B"
    return Result(weight_bytes / kv_bytes_per_token, "tokens", "exact", formula=formula)


def transfer_time(size_bytes: float, bytes_per_s: float) -> Result:
    """Moving a cache over a link, one direction: what bringing it back from host memory costs at least."""
    positive(bytes_per_s=bytes_per_s)
    formula = f"{count(size_bytes)} B / {count(bytes_per_s)} B/s"
    return Result(size_bytes / bytes_per_s, "s", "bound", formula=formula)


def tokens_without_cache(prompt: int, new: int) -> Result:
    """Tokens processed when every step reads everything again: sum of prompt + t for t = 0 … new - 1."""
    value = new * prompt + new * (new - 1) // 2
    return Result(value, "tokens", "exact", formula=f"{new:,} × {prompt:,} + {new:,} × {new - 1:,} / 2")


def tokens_with_cache(prompt: int, new: int) -> Result:
    """The prompt once, and every new token but the last once."""
    return Result(prompt + new - 1, "tokens", "exact", formula=f"{prompt:,} + {new:,} - 1")


def parameters_flops(parameters: float, tokens: float) -> Result:
    """2·N·tokens: a multiply and an add for every weight and token, attention left out."""
    return Result(2 * parameters * tokens, "FLOP", "exact", formula=f"2 × {count(parameters)} × {count(tokens)}")
