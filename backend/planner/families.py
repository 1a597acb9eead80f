"""Decoders of one kind of layer, grouped or windowed attention and a gated MLP: what each family's configuration means.

Defaults are those of the transformers configuration classes (a key left out of the file takes them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from backend.planner.arch import Architecture, Layer
from backend.planner.blocks import attention, gated_experts, gated_mlp
from backend.planner.reader import Reader

LAYER_TYPES = {"full_attention", "sliding_attention"}
Windows = Callable[[Reader, int], list[int | None]]


def _window(reader: Reader, default: int | None = None) -> int | None:
    if default is None and not reader.has("sliding_window"):
        return None
    return reader.count("sliding_window", default)


def _no_windows(reader: Reader, layers: int) -> list[int | None]:
    return [None] * layers


def _all_layers(reader: Reader, layers: int) -> list[int | None]:
    return [_window(reader)] * layers


def _all_layers_or(default: int) -> Windows:
    """A missing key takes the default; an explicit null means no window."""

    def windows(reader: Reader, layers: int) -> list[int | None]:
        return [_window(reader, None if "sliding_window" in reader.config else default)] * layers

    return windows


def _all_layers_if_used(reader: Reader, layers: int) -> list[int | None]:
    used = reader.flag("use_sliding_window")
    reader.get("sliding_window"), reader.get("max_window_layers")
    return [_window(reader, 4096) if used else None] * layers


def _top_layers_if_used(reader: Reader, layers: int) -> list[int | None]:
    """Qwen: with `use_sliding_window`, layers from `max_window_layers` on."""
    used = reader.flag("use_sliding_window")
    types = reader.types(layers, LAYER_TYPES)
    reader.get("sliding_window"), reader.get("max_window_layers")
    if not used:
        return [None] * layers
    window, first = _window(reader, 4096), reader.count("max_window_layers", 28, least=0)
    types = types or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return [window if kind == "sliding_attention" else None for kind in types]


def _listed_if_used(reader: Reader, layers: int) -> list[int | None]:
    """SmolLM3: with `use_sliding_window`, the layers named in `layer_types`, or else those with rotation."""
    used, window = reader.flag("use_sliding_window"), _window(reader)
    types, every = reader.types(layers, LAYER_TYPES), reader.count("no_rope_layer_interval", 4)
    if not used or window is None:
        return [None] * layers
    if types is None:
        rotated = reader.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
        if not isinstance(rotated, list) or len(rotated) != layers:
            reader.reasons.append("no_rope_layers must list every layer")
            rotated = [1] * layers
        types = ["full_attention" if has_rope else "sliding_attention" for has_rope in rotated]
    return [window if kind == "sliding_attention" else None for kind in types]


def _alternating(period: int, full_at: int) -> Windows:
    """One full layer in every `period` (or `sliding_window_pattern`), unless `layer_types` lists them."""

    def windows(reader: Reader, layers: int) -> list[int | None]:
        reader.get("_sliding_window_pattern")
        key = "sliding_window_pattern" if reader.has("sliding_window_pattern") else "_sliding_window_pattern"
        every, window = reader.count(key, period), _window(reader, 4096)
        types = reader.types(layers, LAYER_TYPES) or [
            "full_attention" if (i + 1) % every == full_at else "sliding_attention" for i in range(layers)
        ]
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


def read(reader: Reader) -> Architecture:
    """Raises UnsupportedArchitecture with every reason found."""
    family = FAMILIES[reader.model_type]
    hidden, heads, kv_heads, head_dim = reader.heads(kv_default=family.kv_heads, head_dim_default=family.head_dim)
    layers, vocab = reader.layers(), reader.count("vocab_size")
    width = reader.count(family.expert_width_key if family.experts else "intermediate_size")
    bias = {"always": True, "never": False, "config": False}
    if "config" in (family.qkv_bias, family.output_bias):
        bias["config"] = reader.flag("attention_bias")
    windows = family.windows(reader, layers)
    if family.windows is _no_windows:
        reader.types(layers, LAYER_TYPES - {"sliding_attention"})

    qk_norm = {"none": 0, "head": 2 * head_dim, "all": (heads + kv_heads) * head_dim}[family.qk_norm]
    if family.experts:
        experts_key = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
        experts = reader.count(experts_key, family.experts)
        per_token = reader.count("num_experts_per_tok", family.experts_per_token)
        if per_token > experts:
            reader.reasons.append(f"num_experts_per_tok ({per_token}) exceeds {experts_key} ({experts})")
        if reader.get("decoder_sparse_step", 1) != 1 or reader.get("mlp_only_layers"):
            reader.reasons.append("dense and mixture-of-experts layers are mixed")
        ffn = gated_experts(hidden, experts, min(per_token, experts), width)
    else:
        ffn = gated_mlp(hidden, width, bias=family.mlp_bias and reader.flag("mlp_bias"))
    tied = reader.flag("tie_word_embeddings", family.tied)
    reader.finish()

    def layer(window: int | None) -> Layer:
        mixer = attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            qkv_bias=bias[family.qkv_bias],
            output_bias=bias[family.output_bias],
            vectors=qk_norm,
            window=window,
        )
        return Layer(mixer=mixer, ffn=ffn, norms=family.norms * hidden)

    kinds = {window: layer(window) for window in set(windows)}
    return Architecture(
        model_type=reader.model_type,
        layers=tuple(kinds[window] for window in windows),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden if family.norms else 0,
        context=reader.context(),
    )
