"""Reading `config.json`: what each model family's configuration means for counting. Fails closed.

Defaults are those of the transformers configuration classes (a key left out of the file takes them).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from backend.planner.shape import AttentionLayer, ModelShape, UnsupportedArchitecture

# A key that smells of attention or of the cache and that no rule below reads may change what is stored: refuse.
_SUSPICIOUS = re.compile(r"kv|key_value|window|mla|ssm|linear|index|compress|lora|latent|conv|chunk|sparse|expert")
_UNDERSTOOD = {"num_key_value_heads", "clip_qkv"}  # the latter clamps values and moves nothing
_UNDERSTOOD_WITH_WINDOWS = {
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "_sliding_window_pattern",
}
_UNDERSTOOD_WITH_EXPERTS = {"num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step"}
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}

Windows = Callable[[dict, int], list[int | None]]


def _no_windows(config: dict, layers: int) -> list[int | None]:
    return [None] * layers


def _all_layers(config: dict, layers: int) -> list[int | None]:
    return [config.get("sliding_window")] * layers


def _all_layers_or(default: int) -> Windows:
    return lambda config, layers: [config.get("sliding_window", default)] * layers


def _all_layers_if_used(config: dict, layers: int) -> list[int | None]:
    return [config.get("sliding_window", 4096) if config.get("use_sliding_window") else None] * layers


def _top_layers_if_used(config: dict, layers: int) -> list[int | None]:
    """Qwen: with `use_sliding_window`, layers from `max_window_layers` on."""
    if not config.get("use_sliding_window"):
        return [None] * layers
    window = config.get("sliding_window", 4096)
    types = config.get("layer_types") or [
        "sliding_attention" if i >= config.get("max_window_layers", 28) else "full_attention" for i in range(layers)
    ]
    return [window if kind == "sliding_attention" else None for kind in types]


def _listed_if_used(config: dict, layers: int) -> list[int | None]:
    """SmolLM3: with `use_sliding_window`, the layers named in `layer_types`, or else those with rotation."""
    window = config.get("sliding_window")
    if not config.get("use_sliding_window") or window is None:
        return [None] * layers
    types = config.get("layer_types")
    if types is None:
        every = config.get("no_rope_layer_interval", 4)
        rotated = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
        types = ["full_attention" if has_rope else "sliding_attention" for has_rope in rotated]
    return [window if kind == "sliding_attention" else None for kind in types]


def _alternating(period: int, full_at: int) -> Windows:
    """One full layer in every `period` (or `sliding_window_pattern`), unless `layer_types` lists them."""

    def windows(config: dict, layers: int) -> list[int | None]:
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or period
        types = config.get("layer_types") or [
            "full_attention" if (i + 1) % every == full_at else "sliding_attention" for i in range(layers)
        ]
        window = config.get("sliding_window", 4096)
        return [window if kind == "sliding_attention" else None for kind in types]

    return windows


Bias = Literal["never", "always", "config"]


@dataclass(frozen=True, kw_only=True)
class Family:
    kv_heads: int | None = None  # default of num_key_value_heads; None: as many as query heads
    head_dim: int | None = None  # default of head_dim; None: hidden_size / num_attention_heads
    tied: bool = False
    qkv_bias: Bias = "never"
    output_bias: Bias = "never"
    mlp_bias: bool = False  # `mlp_bias` is read
    qk_norm: Literal["none", "head", "all"] = "none"  # one weight a head element, or one an element of all heads
    norms: int = 2  # of hidden width in a layer; 0: norms without weights, the last one too
    windows: Windows = _no_windows
    experts: int = 0  # default of num_experts (num_local_experts is its other name); > 0: a mixture in every layer
    experts_per_token: int = 0
    expert_width_key: str = "intermediate_size"


FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias="config", output_bias="config", mlp_bias=True),
    "mistral": Family(kv_heads=8, windows=_all_layers_or(4096)),
    "qwen2": Family(kv_heads=32, qkv_bias="always", windows=_top_layers_if_used),
    "qwen3": Family(
        kv_heads=32,
        head_dim=128,
        qkv_bias="config",
        output_bias="config",
        qk_norm="head",
        windows=_top_layers_if_used,
    ),
    "smollm3": Family(
        kv_heads=4, tied=True, qkv_bias="config", output_bias="config", mlp_bias=True, windows=_listed_if_used
    ),
    "gemma": Family(kv_heads=16, head_dim=256, tied=True, qkv_bias="config", output_bias="config"),
    "gemma2": Family(
        kv_heads=4,
        head_dim=256,
        tied=True,
        qkv_bias="config",
        output_bias="config",
        norms=4,
        windows=_alternating(2, 0),
    ),
    "gemma3_text": Family(
        kv_heads=4,
        head_dim=256,
        tied=True,
        qkv_bias="config",
        output_bias="config",
        qk_norm="head",
        norms=4,
        windows=_alternating(6, 0),
    ),
    "phi3": Family(windows=_all_layers),
    "olmo": Family(qkv_bias="config", output_bias="config", norms=0),
    "olmo2": Family(qkv_bias="config", output_bias="config", qk_norm="all"),
    "olmo3": Family(qkv_bias="config", output_bias="config", qk_norm="all", windows=_alternating(4, 0)),
    "granite": Family(qkv_bias="config", output_bias="config", mlp_bias=True),
    "mixtral": Family(kv_heads=8, windows=_all_layers, experts=8, experts_per_token=2),
    "qwen3_moe": Family(
        kv_heads=4,
        qkv_bias="config",
        output_bias="config",
        qk_norm="head",
        windows=_all_layers_if_used,
        experts=128,
        experts_per_token=8,
        expert_width_key="moe_intermediate_size",
    ),
    "olmoe": Family(
        qkv_bias="config",
        output_bias="config",
        qk_norm="all",
        experts=64,
        experts_per_token=8,
    ),
}


def parse(config: dict, dtype_bytes: int, kv_dtype_bytes: int) -> ModelShape:
    """Raises UnsupportedArchitecture with every reason found."""
    model_type = str(config.get("model_type") or "unknown")
    family = FAMILIES.get(model_type)
    if family is None:
        reason = (
            "it wraps a text model; give the content of its text_config"
            if "text_config" in config
            else f"unknown model_type; known: {', '.join(sorted(FAMILIES))}"
        )
        raise UnsupportedArchitecture(model_type, [reason])

    reasons: list[str] = []

    def count(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            reasons.append(f"{key} must be a positive integer, found {value!r}")
            return 1
        return value

    hidden, layers, heads = count("hidden_size"), count("num_hidden_layers"), count("num_attention_heads")
    vocab = count("vocab_size")
    width_key = family.expert_width_key if family.experts else "intermediate_size"
    width = count(width_key)
    kv_heads = (
        heads
        if config.get("num_key_value_heads", family.kv_heads) is None
        else count("num_key_value_heads", family.kv_heads)
    )
    if config.get("head_dim", family.head_dim) is None:
        head_dim = hidden // heads
        if hidden % heads:
            reasons.append(f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}), and no head_dim")
    else:
        head_dim = count("head_dim", family.head_dim)
    if heads % kv_heads:
        reasons.append(f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})")

    understood = _UNDERSTOOD | (_UNDERSTOOD_WITH_WINDOWS if family.windows is not _no_windows else set())
    understood |= _UNDERSTOOD_WITH_EXPERTS if family.experts else set()
    for key in sorted(config):
        if _SUSPICIOUS.search(key) and key not in understood and config[key] not in (None, False, 0):
            reasons.append(f"'{key}' may change what attention reads or stores, and is not known here")
    unknown = sorted({str(kind) for kind in config.get("layer_types") or ()} - _KNOWN_LAYER_TYPES)
    if unknown:
        reasons.append(f"layer types {', '.join(unknown)} are not known here")
    if config.get("layer_types") and len(config["layer_types"]) != layers:
        reasons.append(f"layer_types lists {len(config['layer_types'])} layers, num_hidden_layers says {layers}")
    if config.get("quantization_config"):
        reasons.append("the checkpoint is quantised, so one size an element does not hold")
    if config.get("use_bidirectional_attention"):
        reasons.append("attention is bidirectional")
    if family.experts and (config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")):
        reasons.append("dense and mixture-of-experts layers are mixed")

    experts_key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    experts = count(experts_key, family.experts) if family.experts else 0
    experts_per_token = count("num_experts_per_tok", family.experts_per_token) if family.experts else 0
    if experts_per_token > experts:
        reasons.append(f"num_experts_per_tok ({experts_per_token}) exceeds {experts_key} ({experts})")
    windows = family.windows(config, layers) if not reasons else []
    if any(window is not None and (not isinstance(window, int) or window < 1) for window in windows):
        reasons.append(f"sliding_window must be a positive integer, found {config.get('sliding_window')!r}")
    if reasons:
        raise UnsupportedArchitecture(model_type, reasons)

    def has(bias: Bias) -> bool:
        return bias == "always" or (bias == "config" and bool(config.get("attention_bias", False)))

    query, keys = heads * head_dim, kv_heads * head_dim
    expert = 3 * hidden * width  # gate, up, down
    if experts:
        mlp = experts * expert + experts * hidden  # and the router
    else:
        mlp = expert
    layer_matrices = hidden * (query + 2 * keys) + query * hidden + mlp
    biases = (query + 2 * keys) * has(family.qkv_bias) + hidden * has(family.output_bias)
    if family.mlp_bias and config.get("mlp_bias", False):
        biases += 2 * width + hidden
    norms = family.norms * hidden
    norms += {"none": 0, "head": 2 * head_dim, "all": query + keys}[family.qk_norm]
    head = vocab * hidden
    tied = bool(config.get("tie_word_embeddings", family.tied))
    last_norm = hidden if family.norms else 0
    return ModelShape(
        attention=tuple(AttentionLayer(heads, kv_heads, head_dim, head_dim, window) for window in windows),
        hidden=hidden,
        mlp=width * (experts_per_token or 1),
        vocab=vocab,
        parameters=layers * (layer_matrices + biases + norms) + last_norm + head * (1 if tied else 2),
        matmul_parameters=layers * layer_matrices + head,
        head_parameters=head,
        gathered_parameters=0 if tied else head,
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=kv_dtype_bytes,
        moe_layers=layers if experts else 0,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_parameters=expert if experts else 0,
    )
