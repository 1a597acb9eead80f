"""Element counts of the pieces that many model families are built of."""

from __future__ import annotations

from backend.planner.arch import Attention, Dense, Experts


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    gated: bool = False,
    vectors: int = 0,
    window: int | None = None,
) -> Attention:
    """q, k, v and output matrices. `gated`: the query projection also makes a gate of the same width."""
    query, keys = heads * head_dim, kv_heads * head_dim
    wide = query * (2 if gated else 1)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        k_dim=head_dim,
        v_dim=head_dim,
        matrices=hidden * (wide + 2 * keys) + query * hidden,
        vectors=vectors + (wide + 2 * keys) * qkv_bias + hidden * output_bias,
        window=window,
    )


def gated_mlp(hidden: int, width: int, *, bias: bool = False) -> Dense:
    """gate, up, down"""
    return Dense(width=width, matrices=3 * hidden * width, vectors=(2 * width + hidden) * bias)


def plain_mlp(hidden: int, width: int, *, bias: bool = False) -> Dense:
    """up, down"""
    return Dense(width=width, matrices=2 * hidden * width, vectors=(width + hidden) * bias)


def gated_experts(
    hidden: int, experts: int, per_token: int, width: int, *, shared_width: int = 0, shared_gate: bool = False
) -> Experts:
    """Routed experts with a linear router, and beside them a gated MLP of `shared_width` that every token passes."""
    return Experts(
        experts=experts,
        per_token=per_token,
        width=width,
        expert_matrices=3 * hidden * width,
        router=hidden * experts,
        shared_matrices=3 * hidden * shared_width,
        vectors=hidden * shared_gate,
    )
