"""What a model's attention is really asked to do: one token through the model, its attention and masks watched.

Read off the live calls because configurations differ by family. A wrong guess at the width of K and V would size the
pool wrongly; a mask that hides other tokens than the attention function is told of would go unnoticed until a text is
longer than the window, far beyond what a self-check on a few tokens can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backend.models.errors import ModelError

_NAME = "kvscope_probe"

# transformers' form of a mask: (batch, head, query position, key position) -> is the key visible
MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerShape:
    """Attention of one layer. A token costs kv_heads * (key_dim + value_dim) numbers in it."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class _Call:
    layer: int
    shape: LayerShape
    window: int | None  # what the attention function is told
    rule: int  # which mask it got: an index into the rules, -1 for none


def probe(model: Any, name: str, length: int = 2) -> list[LayerShape]:
    """The attention layers in order; `length` is the longest sequence to be served.

    Raises ModelError when the model's attention cannot be replaced, runs other than once a layer, depends on a mask
    that the attention function is not told of, or when the model says NaN or infinity. The model's attention is back
    on "eager" afterwards.
    """
    calls, rules, logits = _watch(model, name)
    family = model.config.model_type
    calls.sort(key=lambda call: call.layer)
    if not calls or [call.layer for call in calls] != list(range(len(calls))):
        raise ModelError(f"{name}: {family} models do not call attention once a layer, which paged K and V rely on")
    for call in {(call.rule, call.window): call for call in calls}.values():
        if call.rule >= 0 and not _same_mask(rules[call.rule], call.window, length):
            raise ModelError(
                f"{name}: layer {call.layer} of this {family} model hides or shows other tokens by its mask than its "
                f"attention function is told (window {call.window}), so paged attention would be wrong on long texts"
            )
    if not torch.isfinite(logits).all():
        dtype = str(model.dtype).removeprefix("torch.")
        raise ModelError(f"{name} says NaN or infinity in {dtype}; try --dtype float32")
    return [call.shape for call in calls]


def _watch(model: Any, name: str) -> tuple[list[_Call], list[MaskRule], torch.Tensor]:
    from transformers import AttentionInterface, AttentionMaskInterface

    calls: list[_Call] = []
    rules: list[MaskRule] = []

    def attend(module, query, key, value, attention_mask=None, *, sliding_window=None, **_):
        shape = LayerShape(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1])
        marked = isinstance(attention_mask, torch.Tensor) and attention_mask.numel() == 1
        calls.append(_Call(module.layer_idx, shape, sliding_window, int(attention_mask.item()) if marked else -1))
        # One token attends to itself alone, so its attention is V whatever the scores are.
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None

    def mask(*_, mask_function: MaskRule, device: Any = None, **__) -> torch.Tensor:
        rules.append(mask_function)
        return torch.full((1, 1, 1, 1), float(len(rules) - 1), device=device or model.device)  # marks whose mask it is

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, mask)
    model.set_attn_implementation(_NAME)
    try:
        if model.config._attn_implementation != _NAME:
            raise ModelError(
                f"{name}: {model.config.model_type} models compute attention in their own code, "
                "where the engine's paged attention cannot be put"
            )
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        with torch.inference_mode():
            said = model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids, use_cache=False)
    finally:
        model.set_attn_implementation("eager")
    return calls, rules, said.logits


def _same_mask(rule: MaskRule, window: int | None, length: int) -> bool:
    """Does `rule`, for the last of `length` tokens, show what causal attention within `window` would?"""
    zero = torch.zeros((), dtype=torch.long)
    last = zero + length - 1
    keys = torch.arange(length + 1)  # and one from the future
    expected = keys <= last
    if window:
        expected &= keys > last - window
    return torch.equal(rule(zero, zero, last, keys).expand_as(expected).cpu(), expected)
