"""Older decoders, whose keys have names of their own: GPT-2, OPT, Falcon."""

from __future__ import annotations

from backend.planner.arch import Architecture, Layer
from backend.planner.blocks import attention, plain_mlp
from backend.planner.reader import Reader


def gpt2(reader: Reader) -> Architecture:
    hidden, heads, layers = reader.count("n_embd"), reader.count("n_head"), reader.layers("n_layer")
    width = reader.count("n_inner", 4 * hidden)
    positions, vocab = reader.count("n_positions", 1024), reader.count("vocab_size", 50257)
    if hidden % heads:
        reader.reasons.append(f"n_embd ({hidden}) is no multiple of n_head ({heads})")
    if reader.flag("add_cross_attention"):
        reader.reasons.append("it also attends to an encoder")
    tied = reader.flag("tie_word_embeddings", True)
    reader.finish()
    mixer = attention(hidden, heads, heads, hidden // heads, qkv_bias=True, output_bias=True)
    layer = Layer(mixer=mixer, ffn=plain_mlp(hidden, width, bias=True), norms=4 * hidden)
    return Architecture(
        model_type="gpt2",
        layers=(layer,) * layers,
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=2 * hidden,
        positions=positions * hidden,
        context=positions,
    )


def opt(reader: Reader) -> Architecture:
    hidden, heads, layers = reader.count("hidden_size"), reader.count("num_attention_heads"), reader.layers()
    width, vocab = reader.count("ffn_dim", 4 * hidden), reader.count("vocab_size")
    context = reader.count("max_position_embeddings", 2048)
    if hidden % heads:
        reader.reasons.append(f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads})")
    if reader.get("num_key_value_heads", heads) != heads:
        reader.reasons.append("OPT keeps as many KV heads as it has query heads")
    if reader.count("word_embed_proj_dim", hidden) != hidden:
        reader.reasons.append("embeddings are projected to another width")
    bias, norm = reader.flag("enable_bias", True), reader.flag("layer_norm_elementwise_affine", True)
    last = reader.flag("do_layer_norm_before", True) and not reader.flag("_remove_final_layer_norm")
    tied = reader.flag("tie_word_embeddings", True)
    reader.finish()
    mixer = attention(hidden, heads, heads, hidden // heads, qkv_bias=bias, output_bias=bias)
    layer = Layer(mixer=mixer, ffn=plain_mlp(hidden, width, bias=bias), norms=4 * hidden * norm)
    return Architecture(
        model_type="opt",
        layers=(layer,) * layers,
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=2 * hidden * (norm and last),
        positions=(context + 2) * hidden,  # the table begins with two rows for padding
        context=context,
    )


def falcon(reader: Reader) -> Architecture:
    """KV heads: `num_kv_heads` with the new decoder, one with `multi_query`, else as many as query heads."""
    hidden, heads, layers = reader.count("hidden_size"), reader.count("num_attention_heads"), reader.layers()
    vocab, width = reader.count("vocab_size"), reader.count("ffn_hidden_size", 4 * hidden)
    new, multi = reader.flag("new_decoder_architecture"), reader.flag("multi_query", True)
    stated = reader.count("num_kv_heads", heads)
    reader.get("num_key_value_heads")
    kv_heads = stated if new else 1 if multi else heads
    if hidden % heads or heads % kv_heads:
        reader.reasons.append(f"{hidden} hidden, {heads} query heads and {kv_heads} KV heads do not divide")
    bias, parallel = reader.flag("bias"), reader.flag("parallel_attn", True)
    norms = reader.count("num_ln_in_parallel_attn", 2 if new else 1) if new or parallel else 2
    tied = reader.flag("tie_word_embeddings", True)
    reader.finish()
    mixer = attention(hidden, heads, kv_heads, hidden // heads, qkv_bias=bias, output_bias=bias)
    layer = Layer(mixer=mixer, ffn=plain_mlp(hidden, width, bias=bias), norms=2 * norms * hidden)
    return Architecture(
        model_type="falcon",
        layers=(layer,) * layers,
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=2 * hidden,
        context=reader.context(),
    )


PARSERS = {"gpt2": gpt2, "opt": opt, "falcon": falcon}
