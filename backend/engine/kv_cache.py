"""The paged K and V of every layer: one slot a token, `block_size` slots a block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch


class KVCache:
    """Per layer two tensors [slots, kv_heads, head_dim], made when a layer first shows its shapes.

    One block more than the pool hands out: rows of padding write there, so no caller needs a branch for them.
    """

    def __init__(self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype | None = None):
        """`dtype`: what K and V are stored in; None: what they come in."""
        self.num_blocks, self.block_size, self.device, self.dtype = num_blocks, block_size, device, dtype
        self.trash_block = num_blocks
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gathered: dict[tuple, torch.Tensor] = {}

    def layer(self, index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V pools of a layer; `k`, `v` are [1, kv_heads, T, head_dim] and set the shapes on first sight."""
        if index not in self.layers:
            slots = (self.num_blocks + 1) * self.block_size
            self.layers[index] = tuple(
                _zeros((slots, x.shape[1], x.shape[3]), self.dtype or x.dtype, self.device) for x in (k, v)
            )
        return self.layers[index]

    def gather(self, index: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer at `slots`, [*slots.shape, kv_heads, head_dim] each; good until the next call.

        Into memory that is kept, since fresh memory of this size costs more than the copying.
        """
        return tuple(self._gather(which, pool, slots) for which, pool in enumerate(self.layers[index]))

    def _gather(self, which: int, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        place, count = (which, pool.shape[1:], pool.dtype), slots.numel()
        kept = self._gathered.get(place)
        if kept is None or len(kept) < count:
            self._gathered.pop(place, None)
            # More than is asked for: contexts grow by a token a step.
            kept = self._gathered[place] = pool.new_empty(count + count // 4, *pool.shape[1:])
        return torch.index_select(pool, 0, slots.flatten(), out=kept[:count]).unflatten(0, slots.shape)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (from, to), in every layer."""
        if not pairs:
            return
        old, new = (self._slots(blocks) for blocks in zip(*pairs, strict=True))
        for pools in self.layers.values():
            for pool in pools:
                pool.index_copy_(0, new, pool.index_select(0, old))

    def save(self, blocks: list[int]) -> list[torch.Tensor]:
        """K and V of these blocks, layer by layer, in host memory."""
        slots = self._slots(blocks)
        return [pool.index_select(0, slots).cpu() for pools in self.layers.values() for pool in pools]

    def restore(self, blocks: list[int], saved: list[torch.Tensor]) -> None:
        """The last of what `save` returned, back into these blocks."""
        if not blocks:
            return
        slots = self._slots(blocks)
        pools = [pool for pools in self.layers.values() for pool in pools]
        for pool, rows in zip(pools, saved, strict=True):
            pool.index_copy_(0, slots, rows[-len(slots) :].to(self.device))

    def _slots(self, blocks: Sequence[int]) -> torch.Tensor:
        offsets = torch.arange(self.block_size, device=self.device)
        return (torch.tensor(blocks, device=self.device)[:, None] * self.block_size + offsets).flatten()

    def bytes_per_token(self) -> int:
        """Of all layers seen so far, K and V together."""
        return sum(x[0].numel() * x.element_size() for pools in self.layers.values() for x in pools)


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because what a request never wrote is read through masks, and 0 times NaN would not be 0.

    On the CPU they come from calloc: a page takes memory when it is first written, so a large pool that is hardly
    used costs neither start-up time nor memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
