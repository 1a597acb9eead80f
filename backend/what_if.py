"""A decode step that never ran: its bytes and FLOPs by the planner, for a model and a shape that a person chooses."""

from __future__ import annotations

from typing import Any

import msgspec

from backend.planner.shape import ModelShape
from backend.planner.step import StepCost, step_cost

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
KINDS = ("weights", "kv_read", "kv_write", "activations")


class Curve(msgspec.Struct, kw_only=True):
    """Bytes of a decode step by one of its two sizes, the other held."""

    xs: list[int]
    weights: list[int]
    kv_read: list[int]
    kv_write: list[int]
    activations: list[int]
    at: int  # the size chosen
    total_at: int  # bytes there
    overtakes: int | None  # smallest size from which on more KV than weights is read, within `xs`
    held: str  # what is held, in words


def shape_of(told: dict[str, Any]) -> ModelShape | None:
    """`ModelInfo.shape` as the engine told it; None when it told none that is understood here."""
    try:
        return msgspec.convert(told, ModelShape) if told else None
    except (msgspec.ValidationError, ValueError):
        return None


def decode_step(shape: ModelShape, batch: int, context: int) -> StepCost:
    """`batch` sequences that compute one token each, which attends `context` tokens, itself included."""
    return step_cost(shape, [(1, context - 1)] * batch, batch)


def by_batch(shape: ModelShape, batch: int, context: int) -> Curve:
    return _curve(shape, [b for b in BATCHES], batch, lambda b: (b, context), f"context {context:,}")


def by_context(shape: ModelShape, batch: int, context: int, longest: int) -> Curve:
    """`longest`: what the model can attend."""
    xs = [c for c in CONTEXTS if c <= max(longest, CONTEXTS[0])]
    return _curve(shape, xs, context, lambda c: (batch, c), f"batch {batch:,}")


def contexts(longest: int) -> list[int]:
    """Choices for the slider. One token is left to be said."""
    return [c for c in CONTEXTS if c < longest] or [CONTEXTS[0]]


def _curve(shape: ModelShape, xs: list[int], at: int, sizes, held: str) -> Curve:
    costs = [decode_step(shape, *sizes(x)) for x in xs]
    return Curve(
        xs=xs,
        weights=[cost.weight_bytes for cost in costs],
        kv_read=[cost.kv_read_bytes for cost in costs],
        kv_write=[cost.kv_write_bytes for cost in costs],
        activations=[cost.activation_bytes for cost in costs],
        at=at,
        total_at=decode_step(shape, *sizes(at)).bytes,
        overtakes=_overtaking(shape, xs, sizes),
        held=held,
    )


def _overtaking(shape: ModelShape, xs: list[int], sizes) -> int | None:
    def over(x: int) -> bool:
        cost = decode_step(shape, *sizes(x))
        return cost.kv_read_bytes > cost.weight_bytes

    low, high = xs[0], xs[-1]
    if not over(high):
        return None
    while low < high:  # KV grows with both sizes and faster than the weights that more tokens touch
        middle = (low + high) // 2
        low, high = (low, middle) if over(middle) else (middle + 1, high)
    return low


def attention_intensity(heads: int, kv_heads: int, kv_dtype_bytes: int) -> float:
    """FLOP for each byte of K and V in decode: 4·d FLOPs a query head and token, 2·d·P bytes a KV head and token."""
    return 2 * heads / (kv_heads * kv_dtype_bytes)


def groupings(heads: int, kv_dtype_bytes: int, own: int) -> list[tuple[str, int, float]]:
    """(name, KV heads, FLOP/byte) of this model's query heads with all ways of grouping that divide them."""
    ways = [kv for kv in range(heads, 0, -1) if heads % kv == 0]
    names = {heads: "MHA, one a query head", 1: "MQA, one for all"}
    return [
        (
            names.get(kv, f"GQA, {heads // kv} share one") + (", this model" if kv == own else ""),
            kv,
            attention_intensity(heads, kv, kv_dtype_bytes),
        )
        for kv in ways
    ]


def mla_intensity(heads: int, rank: int, rope_dim: int, kv_dtype_bytes: int) -> float:
    """FLOP/byte of absorbed multi-head latent attention in decode: all heads read one latent of `rank` + `rope_dim`."""
    return 2 * heads * (2 * rank + rope_dim) / ((rank + rope_dim) * kv_dtype_bytes)
