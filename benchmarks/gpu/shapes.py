"""Shapes of real models, whose weights are random here, and tiny ones for the rehearsal on a CPU."""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 16384, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    },
    "Llama-3.2-1B": _LLAMA | {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "Llama-3-8B": _LLAMA | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 256, "max_position_embeddings": 512, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Kinds of attention: grouped heads; norms on Q and K; soft caps and windows; sinks and windows beside experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TINY | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": TINY | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "gemma2": TINY
    | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "sliding_window": 8,
       "attn_logit_softcapping": 5.0},
    "gpt_oss": TINY
    | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 4,
       "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


def on_gpu(device: str) -> bool:
    return device.startswith("cuda")


def shape(name: str, device: str) -> dict[str, Any]:
    """The shape by its name, or on a CPU a tiny one of its kind."""
    config = SHAPES[name]
    return config if on_gpu(device) else config | TINY
