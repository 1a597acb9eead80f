"""Attention on the CPU by the compiled kernels, which read the paged pool in place: of requests with one new token
each, and of spans of several. Needs torch.ops.kvscope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from backend.engine.attention import Span
    from backend.engine.kv_cache import KVCache


@dataclass(slots=True)
class Singles:
    """All requests with one new token, rows [0, B) of the step."""

    tables: torch.Tensor  # int32 [B, blocks]
    lengths: torch.Tensor  # int32 [B], tokens to attend to, the new one included
    longest: int
    block_size: int

    def attend(self, query, keys, values, scale, window, softcap, sinks) -> torch.Tensor | None:
        """[1, Hq, T, D] -> [B, Hq, D] of the first B tokens, or None where the kernel does not know the layer."""
        if not (knows(query, keys, values, softcap, sinks) and self.see(window)):
            return None
        return torch.ops.kvscope.paged_decode(
            query[0, :, : len(self.lengths)].transpose(0, 1), keys, values, self.tables, self.lengths,
            self.block_size, scale,
        )  # fmt: skip

    def see(self, window: int | None) -> bool:
        """Does a window of so many tokens hide nothing from them?"""
        return not window or self.longest <= window


class Spans:
    """Rows [first, T) of the step: requests with several new tokens each, one after another."""

    def __init__(self, spans: Sequence[Span]):
        self.spans, self.first = spans, spans[0].first
        self.longest = max(span.context + span.length for span in spans)

    def attend(
        self, query, key, value, kv_cache: KVCache, layer: int, scale: float, window: int | None, softcap, sinks
    ) -> torch.Tensor | None:
        """[1, Hq, T, D] -> [T - first, Hq, D], or None where the kernel does not know the layer. K and V stand in the
        pool of this layer already."""
        keys, values = kv_cache.layers[layer]
        if not knows(query, keys, values, softcap, sinks) or (window and self.longest > window):
            return None
        rows = query[0].transpose(0, 1)
        answers = [
            torch.ops.kvscope.span_attention(
                rows[span.first : span.first + span.length], keys, values, span.slots, scale
            )
            for span in self.spans
        ]
        return answers[0] if len(answers) == 1 else torch.cat(answers)


def knows(query, keys, values, softcap, sinks) -> bool:
    """The kernels know float32 on the CPU (K and V may be kept in bfloat16), K and V heads of one usual size."""
    size = query.shape[-1]
    return (
        query.dtype == torch.float32
        and keys.dtype == values.dtype
        and keys.dtype in (torch.float32, torch.bfloat16)
        and query.device.type == "cpu"
        and size % 16 == 0
        and size <= 256
        and keys.shape == values.shape
        and softcap is None
        and sinks is None
    )
