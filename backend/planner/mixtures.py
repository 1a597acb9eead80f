"""Mixtures of experts whose layers differ, or whose experts carry more than matrices: GLM-4.5, gpt-oss, Qwen2-MoE."""

from __future__ import annotations

from backend.planner.arch import Architecture, Experts, Layer
from backend.planner.blocks import attention, gated_experts, gated_mlp
from backend.planner.reader import Reader


def routed(reader: Reader, experts_key: str, experts: int | None, per_token: int | None) -> tuple[int, int]:
    """(experts, experts for each token), checked."""
    total = reader.count(experts_key, experts)
    used = reader.count("num_experts_per_tok", per_token)
    if used > total:
        reader.reasons.append(f"num_experts_per_tok ({used}) exceeds {experts_key} ({total})")
    return total, min(used, total)


def dense_first(reader: Reader, layers: int, default: int) -> int:
    """How many layers, from the bottom, are dense."""
    first = reader.count("first_k_dense_replace", default, least=0)
    if "first_k_dense_replace" in reader.config and reader.config["first_k_dense_replace"] == 0:
        first = 0
    if reader.get("moe_layer_freq", 1) not in (1, [1] * layers):
        reader.reasons.append("moe_layer_freq other than 1: which layers are dense is not certain")
    return min(first, layers)


def glm4_moe(reader: Reader) -> Architecture:
    hidden, heads, kv_heads, head_dim = reader.heads(kv_default=8)
    layers, vocab = reader.layers(), reader.count("vocab_size")
    experts, per_token = routed(reader, "n_routed_experts", 128, 8)
    width, shared = reader.count("moe_intermediate_size", 1408), reader.count("n_shared_experts", 1, least=0)
    dense, dense_width = dense_first(reader, layers, 1), reader.count("intermediate_size", 10944)
    bias, norm = reader.flag("attention_bias"), reader.flag("use_qk_norm")
    tied = reader.flag("tie_word_embeddings")
    reader.finish()
    mixer = attention(hidden, heads, kv_heads, head_dim, qkv_bias=bias, vectors=2 * head_dim * norm)
    mixture = gated_experts(hidden, experts, per_token, width, shared_width=shared * width)
    plain = Layer(mixer=mixer, ffn=gated_mlp(hidden, dense_width), norms=2 * hidden)
    mixed = Layer(mixer=mixer, ffn=mixture, norms=2 * hidden)
    return Architecture(
        model_type="glm4_moe",
        layers=(plain,) * dense + (mixed,) * (layers - dense),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden,
        context=reader.context(),
    )


def gpt_oss(reader: Reader) -> Architecture:
    """Biases everywhere, one attention sink a head, every second layer windowed."""
    hidden, heads, kv_heads, head_dim = reader.heads(kv_default=8, head_dim_default=64)
    layers, vocab = reader.layers(), reader.count("vocab_size", 201088)
    experts, per_token = routed(reader, "num_local_experts", 128, 4)
    width, window = reader.count("intermediate_size", 2880), reader.count("sliding_window", 128)
    types = reader.types(layers, {"full_attention", "sliding_attention"}) or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
    ]
    bias, tied = reader.flag("attention_bias", True), reader.flag("tie_word_embeddings")
    reader.get("experts_per_token"), reader.get("initial_context_length")
    reader.finish()
    mixture = Experts(
        experts=experts,
        per_token=per_token,
        width=width,
        expert_matrices=3 * hidden * width,
        expert_vectors=2 * width + hidden,
        router=hidden * experts,
        vectors=experts,
    )

    def layer(kind: str) -> Layer:
        mixer = attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            qkv_bias=bias,
            output_bias=bias,
            vectors=heads,
            window=window if kind == "sliding_attention" else None,
        )
        return Layer(mixer=mixer, ffn=mixture, norms=2 * hidden)

    return Architecture(
        model_type="gpt_oss",
        layers=tuple(layer(kind) for kind in types),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden,
        context=reader.context(),
    )


def granitemoe(reader: Reader) -> Architecture:
    hidden, heads, kv_heads, head_dim = reader.heads()
    layers, vocab = reader.layers(), reader.count("vocab_size")
    experts, per_token = routed(reader, "num_local_experts", 8, 2)
    width, bias = reader.count("intermediate_size"), reader.flag("attention_bias")
    tied = reader.flag("tie_word_embeddings")
    reader.finish()
    mixer = attention(hidden, heads, kv_heads, head_dim, qkv_bias=bias, output_bias=bias)
    layer = Layer(mixer=mixer, ffn=gated_experts(hidden, experts, per_token, width), norms=2 * hidden)
    return Architecture(
        model_type="granitemoe",
        layers=(layer,) * layers,
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden,
        context=reader.context(),
    )


def qwen2_moe(reader: Reader) -> Architecture:
    """Always a shared expert behind a gate; `mlp_only_layers` and `decoder_sparse_step` say which layers are dense."""
    hidden, heads, kv_heads, head_dim = reader.heads(kv_default=16)
    layers, vocab = reader.layers(), reader.count("vocab_size", 151936)
    experts, per_token = routed(reader, "num_experts", 60, 4)
    width, shared = reader.count("moe_intermediate_size", 1408), reader.count("shared_expert_intermediate_size", 5632)
    dense_width, sparse = reader.count("intermediate_size", 5632), sparse_layers(reader, layers)
    reader.types(layers, {"full_attention"})
    if reader.flag("use_sliding_window"):
        reader.reasons.append("use_sliding_window on a mixture is not known here")
    reader.get("sliding_window"), reader.get("max_window_layers")
    bias, tied = reader.flag("qkv_bias", True), reader.flag("tie_word_embeddings")
    reader.finish()
    mixer = attention(hidden, heads, kv_heads, head_dim, qkv_bias=bias)
    mixture = gated_experts(hidden, experts, per_token, width, shared_width=shared, shared_gate=True)
    plain = Layer(mixer=mixer, ffn=gated_mlp(hidden, dense_width), norms=2 * hidden)
    mixed = Layer(mixer=mixer, ffn=mixture, norms=2 * hidden)
    return Architecture(
        model_type="qwen2_moe",
        layers=tuple(mixed if is_sparse else plain for is_sparse in sparse),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden,
        context=reader.context(),
    )


def sparse_layers(reader: Reader, layers: int) -> list[bool]:
    """Qwen's rule for which layers are mixtures."""
    step, dense = reader.count("decoder_sparse_step", 1), reader.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        reader.reasons.append("mlp_only_layers must be a list of layer numbers")
        dense = []
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


PARSERS = {"glm4_moe": glm4_moe, "gpt_oss": gpt_oss, "granitemoe": granitemoe, "qwen2_moe": qwen2_moe}
