"""The architecture gate: which models the engine can compute exactly, decided from the configuration alone.

The engine replaces a model's attention by its own and keeps K and V in blocks. That is exact when a layer's only
memory is K and V and its mask is "causal" or "causal within a sliding window". Other layers would run and say
something wrong, so they are refused here, by name and with the reason. The self-check at load time stands behind
this gate; the gate exists to refuse early and to say why.
"""

from __future__ import annotations

from typing import Any

from backend.models.errors import ModelError

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}

_OWN_ATTENTION = "it computes attention in its own code, where the engine's paged attention cannot be put"
_ENCODER = "it is an encoder: it reads text in both directions and does not generate"
_STATE = "its layers keep a recurrent state besides K and V, which the paged pool does not hold"
_CONV = "it has convolution layers, whose state the paged pool does not hold"
_SPARSE = "it picks the keys it attends to with an indexer of its own"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("gpt_neo", "bloom", "falcon", "mpt", "openai-gpt", "xglm", "cpmant", "reformer", "gpt_neox_japanese"),
        _OWN_ATTENTION,
    ),
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "modernbert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
            "xlm-roberta-xl", "xlnet", "xmod",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            "mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba", "bamba", "zamba", "zamba2", "rwkv", "xlstm",
            "recurrent_gemma", "nemotron_h", "granitemoehybrid", "minimax", "qwen3_next", "kimi_linear", "olmo_hybrid",
            "bailing_hybrid",
        ),
        _STATE,
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3", "zaya"), _CONV),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax_m3_vl_text"), _SPARSE),
    "llama4": "its chunked attention lives in the mask, which paged attention does not see",
    "llama4_text": "its chunked attention lives in the mask, which paged attention does not see",
    "diffllama": "it calls attention twice a layer (differential attention), so K and V would overwrite each other",
    "doge": "its mask is computed from the values, which paged attention does not see",
    "trocr": "it is the text half of an encoder-decoder",
    "blt": "it groups bytes into patches of its own choosing",
    "hrm_text": "it reads its prompt in both directions",
}  # fmt: skip

# Settings that betray such layers in families that are not named above.
_TELLTALE = {
    "mamba_d_state": _STATE,
    "ssm_state_size": _STATE,
    "linear_conv_kernel_dim": _STATE,
    "conv_L_cache": _CONV,
    "index_topk": _SPARSE,
    "attention_chunk_size": "it has chunked attention, which lives in the mask that paged attention does not see",
    "use_bidirectional_attention": "it attends in both directions",
}

_PARTS = ("text_", "vision_", "audio_", "speech_", "vq_", "encoder_", "decoder_", "depth_decoder_", "audio_encoder_")

_LAYER_WORDS = {
    "linear_attention": "linear attention or state-space layers (a recurrent state, no K and V)",
    "conv": "convolution layers (a convolution state, no K and V)",
    "chunked_attention": "chunked attention (it lives in the mask, which paged attention does not see)",
    "indexed_attention": "indexed attention (it picks its keys itself)",
}


def gate(config: Any) -> None:
    """Raise ModelError unless the engine computes this model exactly. `config`: a transformers config or its dict."""
    if isinstance(config, dict):
        settings = config
    else:
        settings = {**config.to_dict(), "model_type": config.model_type}
    family = settings.get("model_type") or ""
    if not family:
        raise ModelError("config.json names no model_type, so nothing tells how to build this model")
    if reason := REFUSED.get(family):
        raise ModelError(f"{family} models are not supported: {reason}")
    if settings.get("is_encoder_decoder"):
        raise ModelError(
            f"{family} models are not supported: an encoder-decoder keeps a second set of K and V for "
            "cross-attention. Choose a decoder-only model."
        )
    if part := _wrapped(settings):
        raise ModelError(
            f"{family} models are not supported: a language model is wrapped together with other parts ({part}). "
            "Choose the text-only checkpoint of the family; --weights random can build its text part."
        )
    if settings.get("quantization_config"):
        method = settings["quantization_config"].get("quant_method", "unknown method")
        raise ModelError(
            f"the weights are quantized ({method}), and the engine computes with plain ones. "
            "Choose the unquantized checkpoint, or a GGUF file (it is unpacked when it is loaded)."
        )
    for name, reason in _TELLTALE.items():
        if settings.get(name):
            raise ModelError(f"{family} models like this one are not supported: {reason} ({name}={settings[name]})")
    kinds = set(settings.get("layer_types") or settings.get("layers_block_type") or settings.get("block_types") or ())
    if odd := sorted(kinds - SUPPORTED_LAYERS - {"attention"}):
        words = "; ".join(_LAYER_WORDS.get(kind, f"'{kind}' layers") for kind in odd)
        raise ModelError(
            f"{family} models like this one are not supported: they have {words}. "
            "The engine computes full attention and sliding-window attention."
        )
    if not generates(family):
        if settings.get("auto_map"):
            raise ModelError(
                f"{family} models need the code in their own repository, and such code is never run here. "
                "A newer transformers may know the family."
            )
        raise ModelError(f"{family} models do not generate text token by token, as far as transformers knows")


def text_part(config: Any) -> Any:
    """The language model's own config of a multimodal wrapper; any other config as it is."""
    if not _wrapped({**config.to_dict(), "model_type": config.model_type}):
        return config
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:  # several text parts
        raise ModelError(f"{config.model_type}: which part generates text is ambiguous") from error


def generates(family: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _wrapped(settings: dict) -> str:
    """What a multimodal config holds beside the language model, e.g. "vision_config"; "" for a plain one."""
    return ", ".join(
        sorted(
            name
            for name, value in settings.items()
            if isinstance(value, dict) and name.endswith("_config") and name.startswith(_PARTS)
        )
    )
