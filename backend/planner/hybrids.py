"""Decoders with recurrent layers: gated delta nets (Qwen3-Next, Qwen3.5), Mamba, Jamba, Nemotron-H.

Their memory is not one rate a token: some layers keep keys and values, the others a state of fixed size.
"""

from __future__ import annotations

import math

from backend.planner.arch import Architecture, Layer, Recurrent
from backend.planner.blocks import attention, gated_experts, gated_mlp, plain_mlp
from backend.planner.mixtures import routed, sparse_layers
from backend.planner.reader import Reader

_KINDS = {"full_attention", "linear_attention"}
_OF_OTHER_PATTERNS = (  # Nemotron-H: of layers that a pattern of M, * and - has not
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_latent_size", "sliding_window",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "mamba_ssm_cache_dtype",
)  # fmt: skip


def delta_net(hidden: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int, kernel: int) -> Recurrent:
    """A gated delta net: a k_dim × v_dim state for each value head, and a short convolution before it."""
    keys, values = k_heads * k_dim, v_heads * v_dim
    channels = 2 * keys + values
    return Recurrent(
        state_elements=v_heads * k_dim * v_dim,
        conv_elements=channels * (kernel - 1),
        matrices=hidden * (channels + values) + 2 * hidden * v_heads + values * hidden,
        vectors=channels * kernel + 2 * v_heads + v_dim,
    )


def qwen_hybrid(reader: Reader) -> Architecture:
    """One full-attention layer (gated) in every four; the others are delta nets."""
    hidden, heads, kv_heads, head_dim = reader.heads(
        kv_default=4 if reader.model_type == "qwen3_5_text" else 2, head_dim_default=256
    )
    layers, vocab = reader.layers(), reader.count("vocab_size")
    every = reader.count("full_attention_interval", 4)
    types = reader.types(layers, _KINDS) or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    recurrent = delta_net(
        hidden,
        reader.count("linear_num_key_heads", 16),
        reader.count("linear_num_value_heads", 32),
        reader.count("linear_key_head_dim", 128),
        reader.count("linear_value_head_dim", 128),
        reader.count("linear_conv_kernel_dim", 4),
    )
    sparse = [False] * layers
    ffn = plain = None
    if reader.model_type != "qwen3_5_text":
        next_one = reader.model_type == "qwen3_next"
        experts, per_token = routed(reader, "num_experts", 512 if next_one else 256, 10 if next_one else 8)
        width = reader.count("moe_intermediate_size", 512)
        shared = reader.count("shared_expert_intermediate_size", 512)
        ffn = gated_experts(hidden, experts, per_token, width, shared_width=shared, shared_gate=True)
        sparse = sparse_layers(reader, layers)
    if not all(sparse):
        plain = gated_mlp(hidden, reader.count("intermediate_size"))
    bias, tied = reader.flag("attention_bias"), reader.flag("tie_word_embeddings")
    reader.get("intermediate_size")
    reader.finish()
    full = attention(
        hidden,
        heads,
        kv_heads,
        head_dim,
        qkv_bias=bias,
        output_bias=bias,
        gated=True,
        vectors=2 * head_dim,
    )
    return Architecture(
        model_type=reader.model_type,
        layers=tuple(
            Layer(
                mixer=full if kind == "full_attention" else recurrent,
                ffn=ffn if is_sparse else plain,
                norms=2 * hidden,
            )
            for kind, is_sparse in zip(types, sparse, strict=True)
        ),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden,
        context=reader.context(),
    )


def _selective(hidden: int, inner: int, state: int, kernel: int, rank: int, *, bias: bool, vectors: int) -> Recurrent:
    """Mamba 1: a state of `state` elements for each of `inner` channels."""
    return Recurrent(
        state_elements=inner * state,
        conv_elements=inner * (kernel - 1),
        matrices=hidden * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * hidden,
        vectors=inner * kernel + inner * bias + inner + inner * state + inner + vectors,
    )


def mamba(reader: Reader) -> Architecture:
    hidden, layers, vocab = reader.count("hidden_size"), reader.layers(), reader.count("vocab_size", 50280)
    state, kernel = reader.count("state_size", 16), reader.count("conv_kernel", 4)
    inner = reader.count("intermediate_size", reader.count("expand", 2) * hidden)
    rank = reader.get("time_step_rank", "auto")
    rank = math.ceil(hidden / 16) if rank == "auto" else reader.count("time_step_rank")
    if reader.flag("use_bias"):
        reader.reasons.append("projections with a bias are not known here")
    bias, tied = reader.flag("use_conv_bias", True), reader.flag("tie_word_embeddings", True)
    reader.finish()
    mixer = _selective(hidden, inner, state, kernel, rank, bias=bias, vectors=0)
    return Architecture(
        model_type="mamba",
        layers=(Layer(mixer=mixer, ffn=None, norms=hidden),) * layers,
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden,
        context=reader.context(),
    )


def jamba(reader: Reader) -> Architecture:
    hidden, heads, kv_heads, head_dim = reader.heads(kv_default=8)
    layers, vocab, width = reader.layers(), reader.count("vocab_size"), reader.count("intermediate_size")
    experts, per_token = routed(reader, "num_experts", 16, 2)
    every, offset = reader.count("attn_layer_period", 8), reader.count("attn_layer_offset", 4, least=0)
    moe_every, moe_offset = reader.count("expert_layer_period", 2), reader.count("expert_layer_offset", 1, least=0)
    state, kernel = reader.count("mamba_d_state", 16), reader.count("mamba_d_conv", 4)
    inner = reader.count("mamba_expand", 2) * hidden
    rank = reader.get("mamba_dt_rank", "auto")
    rank = math.ceil(hidden / 16) if rank == "auto" else reader.count("mamba_dt_rank")
    if reader.flag("mamba_proj_bias"):
        reader.reasons.append("projections with a bias are not known here")
    bias, tied = reader.flag("mamba_conv_bias", True), reader.flag("tie_word_embeddings")
    reader.get("use_mambapy"), reader.get("layers_block_type")
    reader.finish()
    full = attention(hidden, heads, kv_heads, head_dim)
    recurrent = _selective(hidden, inner, state, kernel, rank, bias=bias, vectors=rank + 2 * state)
    mixture, plain = gated_experts(hidden, experts, per_token, width), gated_mlp(hidden, width)
    return Architecture(
        model_type="jamba",
        layers=tuple(
            Layer(
                mixer=full if i % every == offset else recurrent,
                ffn=mixture if experts > 1 and i % moe_every == moe_offset else plain,
                norms=2 * hidden,
            )
            for i in range(layers)
        ),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden,
        context=reader.context(),
    )


def nemotron_h(reader: Reader) -> Architecture:
    """`hybrid_override_pattern`: one letter a layer, M for Mamba 2, * for attention, - for an MLP."""
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    kv_heads, vocab = reader.count("num_key_value_heads", 8), reader.count("vocab_size", 131072)
    head_dim = reader.count("attention_head_dim" if reader.has("attention_head_dim") else "head_dim", 128)
    pattern, layers = reader.get("hybrid_override_pattern", ""), reader.layers()
    if not isinstance(pattern, str) or set(pattern) - set("M*-") or len(pattern) != layers:
        reader.reasons.append("hybrid_override_pattern must have one of M, * and - for each layer")
        pattern = ""
    if heads % kv_heads:
        reader.reasons.append(f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})")
    m_heads, m_dim = reader.count("mamba_num_heads", 128), reader.count("mamba_head_dim", 64)
    state, groups = reader.count("ssm_state_size", 128), reader.count("n_groups", 8)
    kernel, width = reader.count("conv_kernel", 4), reader.count("intermediate_size", 21504)
    bias, tied = reader.flag("use_conv_bias", True), reader.flag("tie_word_embeddings")
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias"):
        if reader.flag(key):
            reader.reasons.append(f"{key} is not known here")
    for key in _OF_OTHER_PATTERNS:
        reader.get(key)
    reader.finish()
    inner, channels = m_heads * m_dim, m_heads * m_dim + 2 * groups * state
    recurrent = Recurrent(
        state_elements=inner * state,
        conv_elements=channels * (kernel - 1),
        matrices=hidden * (inner + channels + m_heads) + inner * hidden,
        vectors=channels * (kernel + bias) + 3 * m_heads + inner,
    )
    kinds = {
        "M": Layer(mixer=recurrent, ffn=None, norms=hidden),
        "*": Layer(mixer=attention(hidden, heads, kv_heads, head_dim), ffn=None, norms=hidden),
        "-": Layer(mixer=None, ffn=plain_mlp(hidden, width), norms=hidden),
    }
    return Architecture(
        model_type="nemotron_h",
        layers=tuple(kinds[letter] for letter in pattern),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden,
        context=reader.context(),
    )


PARSERS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), qwen_hybrid),
    "mamba": mamba,
    "jamba": jamba,
    "nemotron_h": nemotron_h,
}
