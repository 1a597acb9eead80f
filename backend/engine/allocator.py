"""How KV memory is given out: from which pool, and how many blocks a request gets how early.

paged      blocks as they are needed, anywhere
first-fit  in one piece, for the longest that the request may become, in the first hole that is large enough
reserve    in one piece, for the longest that any request may become
(no cache) none at all
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend.engine.block_pool import BlockPool
from backend.engine.config import EngineConfig
from backend.engine.contiguous_pool import ContiguousPool
from backend.engine.request import Request


@dataclass(frozen=True, slots=True)
class Allocator:
    pool: BlockPool
    blocks_for: Callable[[Request, int], int]  # blocks of its table when the given number of tokens is computed


def make(config: EngineConfig) -> Allocator:
    """The allocator that the switches ask for, with an empty pool."""
    size, total = config.block_size, config.num_blocks
    if not config.kv_cache:
        return Allocator(BlockPool(total, prefix_cache=False), lambda request, tokens: 0)
    if config.allocator == "paged":
        return Allocator(BlockPool(total, config.prefix_cache), lambda request, tokens: _blocks(tokens, size))
    if config.allocator == "first-fit":
        # The last token's K and V are never needed.
        return Allocator(
            ContiguousPool(total),
            lambda request, tokens: _blocks(request.prompt_tokens + request.params.max_tokens - 1, size),
        )
    most = min(_blocks(config.max_model_len, size), total)
    return Allocator(ContiguousPool(total), lambda request, tokens: most)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
