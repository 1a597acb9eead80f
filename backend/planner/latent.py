"""Multi-head latent attention: DeepSeek V2 and V3 (R1), Kimi K2. `num_key_value_heads` does not size their cache."""

from __future__ import annotations

from backend.planner.arch import Architecture, Latent, Layer
from backend.planner.blocks import gated_experts, gated_mlp
from backend.planner.mixtures import dense_first, routed
from backend.planner.reader import Reader


def deepseek(reader: Reader) -> Architecture:
    v2 = reader.model_type == "deepseek_v2"
    hidden, heads, layers = reader.count("hidden_size"), reader.count("num_attention_heads"), reader.layers()
    vocab = reader.count("vocab_size")
    rank, rope = reader.count("kv_lora_rank", 512), reader.count("qk_rope_head_dim", 64)
    nope, v_dim = reader.count("qk_nope_head_dim", 128), reader.count("v_head_dim", 128)
    reader.get("num_key_value_heads"), reader.get("head_dim"), reader.get("qk_head_dim")
    compressed = reader.has("q_lora_rank") or "q_lora_rank" not in reader.config  # an explicit null: queries are not
    query_rank = reader.count("q_lora_rank", 1536) if compressed else 0
    experts, per_token = routed(reader, "n_routed_experts", 64 if v2 else 256, None if v2 else 8)
    width = reader.count("moe_intermediate_size", 1407 if v2 else 2048)
    shared = reader.count("n_shared_experts", 2 if v2 else 1, least=0)
    dense, dense_width = dense_first(reader, layers, 0 if v2 else 3), reader.count("intermediate_size")
    tied = reader.flag("tie_word_embeddings")
    if reader.flag("attention_bias"):
        reader.reasons.append("attention_bias with latent attention is not known here")
    reader.finish()

    query = heads * (nope + rope)
    to_query = hidden * query_rank + query_rank * query if query_rank else hidden * query
    mixer = Latent(
        heads=heads,
        latent=rank,
        rope=rope,
        nope=nope,
        v_dim=v_dim,
        matrices=to_query + hidden * (rank + rope) + rank * heads * (nope + v_dim) + heads * v_dim * hidden,
        vectors=rank + query_rank,
    )
    mixture = gated_experts(hidden, experts, per_token, width, shared_width=shared * width)
    plain = Layer(mixer=mixer, ffn=gated_mlp(hidden, dense_width), norms=2 * hidden)
    mixed = Layer(mixer=mixer, ffn=mixture, norms=2 * hidden)
    return Architecture(
        model_type=reader.model_type,
        layers=(plain,) * dense + (mixed,) * (layers - dense),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden,
        context=reader.context(),
    )


PARSERS = {"deepseek_v2": deepseek, "deepseek_v3": deepseek, "kimi_k2": deepseek}
