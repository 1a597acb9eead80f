"""Prompts and chunks of a step on a GPU: one launch of flash attention for all of them, or one each.

Flash attention reads K and V once for all query heads that share them and never writes a matrix of scores. torch has it
for ragged batches as an operation without a public name. Whether either way computes attention is tried once for each
shape of heads, on the device, before it is used.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from backend.engine.upload import upload

if TYPE_CHECKING:
    from backend.engine.kv_cache import KVCache

TOLERANCE = 2e-2  # of random input of size 1, in half precision
PROBE = ((7, 0), (5, 9), (70, 64))  # (new tokens, tokens before them)


class Spans:
    """Rows [first, T) of a step, one request after another: `lengths` new tokens each, after `contexts` older ones."""

    def __init__(self, first: int, lengths: list[int], contexts: list[int], slots: list[torch.Tensor]):
        """slots: for each request where the K and V of its context and its new tokens stand in the pool."""
        self.first, self.lengths = first, lengths
        self.totals = [context + length for context, length in zip(contexts, lengths, strict=True)]
        self._slots = torch.cat(slots) if any(contexts) else None
        starts = [np.cumsum([0, *counts], dtype=np.int32) for counts in (self.lengths, self.totals)]
        self._starts = [upload(s, slots[0].device) for s in starts] if len(lengths) > 1 else []

    def attend(
        self, query, key, value, kv_cache: KVCache, layer: int, scale: float, window: int | None, softcap, sinks
    ) -> torch.Tensor | None:
        """q [1, Hq, T, D], k and v [1, Hkv, T, D] -> [T - first, Hq, D], or None where flash attention does not know
        the layer. What stands in the pool is read from this layer of the cache."""
        if not knows(query, key, value) or softcap is not None or sinks is not None:
            return None
        if window and max(self.totals) > window:
            return None
        q, k, v = (x[0, :, self.first :].transpose(0, 1) for x in (query, key, value))
        if self._slots is not None:
            k, v = kv_cache.gather(layer, self._slots)
        kind = q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device
        if len(self.lengths) > 1 and works("ragged", *kind):
            return ragged(q, k, v, *self._starts, max(self.lengths), max(self.totals), scale)
        return one_by_one(q, k, v, self.lengths, self.totals, scale) if works("one by one", *kind) else None


def knows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and key.dtype == value.dtype == query.dtype
        and query.shape[-1] == value.shape[-1] <= 256
    )


def one_by_one(q, k, v, lengths: list[int], totals: list[int], scale: float) -> torch.Tensor:
    """[Tq, Hq, D], [Tk, Hkv, D] -> [Tq, Hq, D]; the new tokens are the last of each request's."""
    from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler along, which takes seconds

    out = torch.empty_like(q)
    row = at = 0
    for length, total in zip(lengths, totals, strict=True):
        one = [x.transpose(0, 1)[None] for x in (q[row : row + length], k[at : at + total], v[at : at + total])]
        mask = causal_lower_right(length, total)
        answer = sdpa(*one, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        out[row : row + length] = answer[0].transpose(0, 1)
        row, at = row + length, at + total
    return out


def ragged(q, k, v, starts_q, starts_k, longest_q: int, longest_k: int, scale: float) -> torch.Tensor:
    """The same at once. starts int32 [requests + 1]: where each one's rows begin, and the end."""
    flash = torch.ops.aten._flash_attention_forward
    return flash(q, k, v, starts_q, starts_k, longest_q, longest_k, 0.0, True, False, scale=scale)[0]


@cache
def works(way: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Does this way ("ragged" or "one by one") answer here, and as attention written out with masks does? Several
    numbers of rows and of older tokens are compared."""
    lengths, totals = [n for n, _ in PROBE], [n + context for n, context in PROBE]
    make = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(rows, count, dim, generator=make, device=device, dtype=torch.float32).to(dtype)
        for rows, count in ((sum(lengths), heads), (sum(totals), kv_heads), (sum(totals), kv_heads))
    )
    scale = dim**-0.5
    try:
        if way == "ragged":
            starts = [upload(np.cumsum([0, *counts], dtype=np.int32), device) for counts in (lengths, totals)]
            got = ragged(q, k, v, *starts, max(lengths), max(totals), scale)
        else:
            got = one_by_one(q, k, v, lengths, totals, scale)
    except (RuntimeError, TypeError):  # not for this GPU, not in this torch, another signature
        return False
    want = _written_out(q.float(), k.float(), v.float(), lengths, totals, scale)
    return got.shape == want.shape and bool((got - want).abs().max() <= TOLERANCE)


def _written_out(q, k, v, lengths: list[int], totals: list[int], scale: float) -> torch.Tensor:
    out, row, at = torch.empty_like(q), 0, 0
    for length, total in zip(lengths, totals, strict=True):
        keys, values = (x[at : at + total].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[row : row + length], keys) * scale
        hidden = torch.ones(length, total, dtype=torch.bool, device=q.device).triu(total - length + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[row : row + length] = torch.einsum("hqk,khd->qhd", weights, values)
        row, at = row + length, at + total
    return out
