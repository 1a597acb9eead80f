"""Paged attention, put under any transformers model through its AttentionInterface.

A step is one flattened sequence [1, T]. Each attention layer writes the new K and V to the pool first, then attends:
requests with one new token together, longer spans one by one. There is never a mask over the whole flattened step,
whose cost would grow with the square of the batch. Both are computed by compiled kernels, which read the pool in place,
where there are any (native/ for the CPU, gpu/ for a GPU) and they know the layer's kind of attention; else by torch,
single tokens in groups of like length.

No mask function is registered under our name, so transformers builds no mask; calling the model outside a step would
let tokens see their future, and therefore raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from backend.engine.kv_cache import KVCache

NAME = "kvscope_paged"


@dataclass
class Group:
    """Requests with one new token each and contexts of like length: rows [first, first + B) of the step."""

    first: int
    tables: np.ndarray  # [B, blocks], padded with the trash block
    lengths: np.ndarray  # [B], tokens to attend to, the new one included; the longest last
    block_size: int
    device: torch.device
    masks: dict = field(default_factory=dict)  # window -> bool [B, 1, 1, L], or None where every slot counts

    @cached_property
    def slots(self) -> torch.Tensor:
        """[B, L], L being the longest context: where each token's K and V stand. Padded from the trash block."""
        slots = (self.tables[:, :, None] * self.block_size + np.arange(self.block_size)).reshape(len(self.lengths), -1)
        return torch.from_numpy(slots[:, : self.lengths[-1]]).to(self.device)

    @cached_property
    def context(self) -> torch.Tensor:
        return torch.from_numpy(self.lengths).to(self.device)

    def mask(self, window: int | None) -> torch.Tensor | None:
        if window not in self.masks:
            length = self.slots.shape[1]
            position = torch.arange(length, device=self.slots.device)
            seen = position < self.context[:, None]
            if window:
                seen &= position >= self.context[:, None] - window
            self.masks[window] = None if bool(seen.all()) else seen[:, None, None, :]
        return self.masks[window]


class Groups:
    """All requests with one new token each, by ascending context: groups of them, made when somebody asks for them,
    which compiled kernels do not."""

    def __init__(self, tables: np.ndarray, rows: np.ndarray, lengths: np.ndarray, block_size: int, device):
        """tables [requests, blocks] of all that run; rows [B], where these stand in it; lengths [B]."""
        self._tables, self._rows, self._lengths = tables, rows, lengths
        self._block_size, self._device = block_size, device

    def __iter__(self) -> Iterator[Group]:
        return iter(self._made)

    @cached_property
    def _made(self) -> list[Group]:
        made = []
        for first, end in group_rows(self._lengths, self._block_size):
            blocks = self._tables[self._rows[first:end], : -(-int(self._lengths[end - 1]) // self._block_size)]
            made.append(Group(first, blocks, self._lengths[first:end], self._block_size, self._device))
        return made


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


class CompiledSingles(Protocol):
    """`Singles` in native/paged.py, for the CPU, and in gpu/paged.py."""

    def attend(self, query, keys, values, scale, window, softcap, sinks) -> torch.Tensor | None: ...


class CompiledSpans(Protocol):
    """`Spans` in native/paged.py, for the CPU, and in gpu/spans.py."""

    first: int  # the rows of the step from there on

    def attend(self, query, key, value, kv_cache, layer, scale, window, softcap, sinks) -> torch.Tensor | None: ...


def copy_in(key_pool, value_pool, slots, key, value) -> None:
    """k [1, Hkv, T, D], v [1, Hkv, T, Dv] -> their slots [T] of the pools."""
    key_pool.index_copy_(0, slots, key[0].transpose(0, 1))
    value_pool.index_copy_(0, slots, value[0].transpose(0, 1))


@dataclass(slots=True)
class Step:
    """What the layers need to know of a step; built once, read by every layer."""

    cache: KVCache
    slots: torch.Tensor  # [T], where each new token's K and V go
    groups: Iterable[Group]
    spans: list[Span]
    singles: CompiledSingles | None = None  # the groups' requests once more, where a compiled kernel is to be used
    ragged: CompiledSpans | None = None  # the spans once more, where a compiled kernel is to be used
    write: Callable = copy_in  # how K and V get into the pool
    captured: bool = False  # by a CUDA graph: what would go by groups and spans is not there
    seconds: float = 0.0  # that attention took in all layers, K and V written and read; on a GPU only the launches


_current: Step | None = None


def current() -> Step:
    """The step that is being computed. Raises RuntimeError outside of one."""
    if _current is None:
        raise RuntimeError("a model with paged attention was called outside an engine step")
    return _current


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
    while first < len(contexts):
        end = int(np.searchsorted(contexts, 2 * max(int(contexts[first]), 2 * block_size), side="right"))
        groups.append((first, end))
        first = end
    return groups


def attend(
    module, query, key, value, attention_mask=None, *, scaling=None, sliding_window=None, softcap=None, s_aux=None,
    written=False, **_
):  # fmt: skip
    """q [1, Hq, T, D], k and v [1, Hkv, T, D or Dv] of the new tokens, after RoPE -> ([1, T, Hq, Dv], None).

    `written`: k and v are in the pool already.
    """
    step = current()
    start = time.perf_counter()
    keys, values = step.cache.layer(module.layer_idx, key, value)
    if not written:
        # What the pool rounds is rounded here too: the same numbers, whether they are read back or not.
        key, value = key.to(keys.dtype), value.to(values.dtype)
        step.write(keys, values, step.slots, key, value)
        key, value = key.to(query.dtype), value.to(query.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    extras = {"softcap": softcap, "sinks": s_aux} if softcap is not None or s_aux is not None else None
    heads, kv_heads = query.shape[1], key.shape[1]
    answer = None
    if step.singles is not None:
        answer = step.singles.attend(query, keys, values, scale, sliding_window, softcap, s_aux)
    if answer is None and step.captured:
        raise RuntimeError(f"the kernel does not know the attention of layer {module.layer_idx}")
    spans, ragged = step.spans, None
    if step.ragged is not None:
        ragged = step.ragged.attend(
            query, key, value, step.cache, module.layer_idx, scale, sliding_window, softcap, s_aux
        )
    for whole in (answer, ragged):
        if whole is not None and len(whole) == query.shape[2]:
            step.seconds += time.perf_counter() - start
            return whole[None], None
    out = query.new_empty(query.shape[2], heads, value.shape[-1])
    if answer is not None:
        out[: len(answer)] = answer
    if ragged is not None:
        out[step.ragged.first :], spans = ragged, []
    for group in step.groups if answer is None else ():
        rows = slice(group.first, group.first + len(group.lengths))
        # The query heads of one KV head become rows of one small matrix: K and V are read once, not once a query head.
        q = query[0, :, rows].transpose(0, 1).unflatten(1, (kv_heads, heads // kv_heads))
        k, v = (x.transpose(1, 2).to(q.dtype) for x in step.cache.gather(module.layer_idx, group.slots))
        out[rows] = _attention(q, k, v, group.mask(sliding_window), scale, extras, kv_heads).flatten(1, 2)
    for span in spans:
        rows = slice(span.first, span.first + span.length)
        q = query[:, :, rows]
        if span.context:
            k, v = (x.transpose(0, 1)[None].to(q.dtype) for x in step.cache.gather(module.layer_idx, span.slots))
        else:
            k, v = key[:, :, rows], value[:, :, rows]
        causal = not span.context and extras is None and (not sliding_window or span.length <= sliding_window)
        mask = None if causal else span.mask(sliding_window)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) if heads != kv_heads else x for x in (k, v))
        out[rows] = _attention(q, k, v, mask, scale, extras, heads, causal)[0].transpose(0, 1)
    step.seconds += time.perf_counter() - start
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


def put_under(model: Any) -> bool:
    """Makes `attend` the attention of a transformers model; False where its architecture does not let that be."""
    from transformers import AttentionInterface  # seconds, which a modelled engine has no model for

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    return model.config._attn_implementation == NAME
