"""Paged attention, put under any transformers model through its AttentionInterface.

A step is one flattened sequence [1, T]. Each attention layer writes the new K and V to the pool first, then attends:
requests with one new token together, in groups of like length; longer spans one by one. There is never a mask over the
whole flattened step, whose cost would grow with the square of the batch.

No mask function is registered under our name, so transformers builds no mask; calling the model outside a step would
let tokens see their future, and therefore raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

from backend.engine.kv_cache import KVCache

NAME = "kvscope_paged"


@dataclass(slots=True)
class Group:
    """Requests with one new token each and contexts of like length: rows [first, first + B) of the step."""

    first: int
    slots: torch.Tensor  # [B, longest context], padded with slots of the trash block
    context: torch.Tensor  # [B], tokens to attend to, the new one included
    masks: dict = field(default_factory=dict)  # window -> bool [B, 1, 1, L], or None where every slot counts

    def mask(self, window: int | None) -> torch.Tensor | None:
        if window not in self.masks:
            length = self.slots.shape[1]
            position = torch.arange(length, device=self.slots.device)
            seen = position < self.context[:, None]
            if window:
                seen &= position >= self.context[:, None] - window
            self.masks[window] = None if bool(seen.all()) else seen[:, None, None, :]
        return self.masks[window]


@dataclass(slots=True)
class Span:
    """One request with several new tokens: rows [first, first + length) of the step, after `context` older ones."""

    first: int
    length: int
    context: int
    slots: torch.Tensor  # [context + length], where its K and V stand in the pool
    masks: dict = field(default_factory=dict)  # window -> bool [length, context + length]

    def mask(self, window: int | None) -> torch.Tensor:
        if window not in self.masks:
            total = self.context + self.length
            # Lower-right: SDPA's own is_causal is aligned to the upper left when the lengths differ.
            seen = torch.ones(self.length, total, dtype=torch.bool, device=self.slots.device).tril(self.context)
            if window:
                seen = seen.triu(self.context - window + 1)
            self.masks[window] = seen
        return self.masks[window]


@dataclass(slots=True)
class Step:
    """What the layers need to know of a step; built once, read by every layer."""

    cache: KVCache
    slots: torch.Tensor  # [T], where each new token's K and V go
    groups: list[Group]
    spans: list[Span]


_current: Step | None = None


class active:
    """`with active(step):` the model's attention works on this step. One at a time: the engine has one thread."""

    def __init__(self, step: Step):
        self._step = step

    def __enter__(self) -> None:
        global _current
        if _current is not None:
            raise RuntimeError("a step is already being computed")
        _current = self._step

    def __exit__(self, *_: object) -> None:
        global _current
        _current = None


def group_rows(contexts: np.ndarray, block_size: int) -> list[tuple[int, int]]:
    """[first, end) ranges of ascending context lengths, so that padding never doubles what a group reads."""
    groups, first = [], 0
    for row in range(1, len(contexts) + 1):
        if row == len(contexts) or contexts[row] > 2 * max(contexts[first], 2 * block_size):
            groups.append((first, row))
            first = row
    return groups


def attend(
    module, query, key, value, attention_mask=None, *, scaling=None, sliding_window=None, softcap=None, s_aux=None, **_
):
    """q [1, Hq, T, D], k and v [1, Hkv, T, D or Dv] of the new tokens, after RoPE -> ([1, T, Hq, Dv], None)."""
    step = _current
    if step is None:
        raise RuntimeError("a model with paged attention was called outside an engine step")
    keys, values = step.cache.layer(module.layer_idx, key, value)
    keys.index_copy_(0, step.slots, key[0].transpose(0, 1))
    values.index_copy_(0, step.slots, value[0].transpose(0, 1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    extras = {"softcap": softcap, "sinks": s_aux} if softcap is not None or s_aux is not None else None
    heads, kv_heads = query.shape[1], key.shape[1]
    out = query.new_empty(query.shape[2], heads, value.shape[-1])
    for group in step.groups:
        rows = slice(group.first, group.first + len(group.context))
        # The query heads of one KV head become rows of one small matrix: K and V are read once, not once a query head.
        q = query[0, :, rows].transpose(0, 1).unflatten(1, (kv_heads, heads // kv_heads))
        k, v = (pool[group.slots].transpose(1, 2) for pool in (keys, values))
        out[rows] = _attention(q, k, v, group.mask(sliding_window), scale, extras, kv_heads).flatten(1, 2)
    for span in step.spans:
        rows = slice(span.first, span.first + span.length)
        q = query[:, :, rows]
        if span.context:
            k, v = (pool[span.slots].transpose(0, 1)[None] for pool in (keys, values))
        else:
            k, v = key[:, :, rows], value[:, :, rows]
        causal = not span.context and extras is None and (not sliding_window or span.length <= sliding_window)
        mask = None if causal else span.mask(sliding_window)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) if heads != kv_heads else x for x in (k, v))
        out[rows] = _attention(q, k, v, mask, scale, extras, heads, causal)[0].transpose(0, 1)
    return out[None], None


def _attention(q, k, v, mask, scale, extras, groups_of_heads, causal=False):
    if extras is None:
        return sdpa(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return _plain_attention(q, k, v, mask, scale, extras["softcap"], extras["sinks"], groups_of_heads)


def _plain_attention(q, k, v, mask, scale, softcap, sinks, groups_of_heads):
    """Scores written out, for what SDPA does not know: a soft cap on scores (Gemma 2) and attention sinks (gpt-oss)."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return (scores.softmax(-1) @ v.float()).to(q.dtype)
    # A sink is one more score a head that takes mass and gives no value. [Hq] -> per head, or per row of a head group.
    shape = (1, groups_of_heads, -1, 1) if scores.shape[1] == groups_of_heads else (1, -1, 1, 1)
    sink = sinks.float().reshape(shape).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)


AttentionInterface.register(NAME, attend)
