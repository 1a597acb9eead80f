"""The Triton kernels as functions of tensors, their launches sized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend.engine.gpu import kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256  # more does not fit the registers of one program
MAX_SPLITS = 64
PROGRAMS_A_PROCESSOR = 2  # what it takes for loads of one program to hide behind another's arithmetic
CPU_PROCESSORS = 4  # of the interpreter: so that rehearsals split contexts as GPUs do


@dataclass(slots=True)
class Singles:
    """Requests with one new token each, rows [0, B) of a step, for `attention.attend`. Fields as in `decode`."""

    rows: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    longest: int
    block_size: int

    def attend(self, query, keys, values, scale, window, softcap, sinks) -> torch.Tensor | None:
        """[1, Hq, T, D] -> [B, Hq, Dv] of the first B tokens, or None where the kernel does not know the layer."""
        if not knows(query, keys, values):
            return None
        return decode(
            query[0, :, : len(self.rows)].transpose(0, 1), keys, values, self.rows, self.tables, self.lengths,
            self.block_size, scale, longest=self.longest, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip


def write(key_pool, value_pool, slots, key, value) -> None:
    """k [1, Hkv, T, D], v [1, Hkv, T, Dv] -> their slots [T] of the pools [slots, Hkv, D or Dv]."""
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    heads, tokens, key_dim = key.shape[1:]
    value_dim = value.shape[-1]
    if not tokens:
        return
    kernels.write[(tokens,)](
        key, value, key_pool, value_pool, slots,
        key.stride(1), key.stride(2), value.stride(1), value.stride(2), key_pool.stride(0), value_pool.stride(0),
        HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_PAD=_power(heads * key_dim), VALUE_PAD=_power(heads * value_dim),
    )  # fmt: skip


def knows(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Can `decode` compute this layer? Query [..., D]; pools [slots, Hkv, D or Dv]."""
    return (
        query.dtype == keys.dtype == values.dtype
        and query.dtype in DTYPES
        and max(keys.shape[-1], values.shape[-1]) <= MAX_HEAD_DIM
    )


def decode(
    query, key_pool, value_pool, rows, tables, lengths, block_size: int, scale: float, *,
    longest: int, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    splits: int | None = None, tile: int | None = None,
):  # fmt: skip
    """Attention of one new token a request, K and V of it in the pool already: [B, Hq, D] -> [B, Hq, Dv].

    rows [B]: each request's row of `tables`, int32 [rows, blocks]. lengths [B]: tokens to attend to, the new one
    included; 0 gives zeros. longest: no length is greater, also not when a graph replays this launch.
    splits and tile are chosen here unless given.
    """
    batch, heads, key_dim = query.shape
    kv_heads, value_dim = value_pool.shape[1:]
    query = query if query.stride(-1) == 1 else query.contiguous()
    # A tile of K and one of V stand in shared memory, twice or three times: 99 KiB a program on the smaller GPUs.
    tile = tile or (64 if max(key_dim, value_dim) * query.itemsize <= 256 else 32)
    if splits is None:
        splits = split_count(batch * kv_heads, processors(query.device), min(longest, window or longest), tile)
    out = query.new_empty(batch, heads, value_dim)
    if not batch:
        return out
    split = splits > 1
    partial = query.new_empty((batch, heads, splits, value_dim) if split else (1,), dtype=torch.float32)
    lse = query.new_empty((batch, heads, splits) if split else (1,), dtype=torch.float32)
    kernels.decode[(batch, kv_heads, splits)](
        query, key_pool, value_pool, out, partial, lse, rows, tables, lengths, lse if sinks is None else sinks,
        scale, softcap or 1.0, window or 0, splits,
        query.stride(0), query.stride(1), key_pool.stride(0), key_pool.stride(1),
        value_pool.stride(0), value_pool.stride(1), out.stride(0), out.stride(1), tables.stride(0),
        GROUP=heads // kv_heads, GROUP_PAD=max(16, _power(heads // kv_heads)),
        KEY_DIM=key_dim, VALUE_DIM=value_dim, KEY_PAD=max(16, _power(key_dim)), VALUE_PAD=max(16, _power(value_dim)),
        BLOCK_SIZE=block_size, TILE=tile,
        SOFTCAP=softcap is not None, WINDOW=bool(window), SINKS=sinks is not None, SPLIT=split,
        PRECISION="ieee",  # of float32: TF32 would keep 10 bits
    )  # fmt: skip
    if split:
        kernels.reduce[(batch, heads)](
            partial, lse, out, lse if sinks is None else sinks, splits, out.stride(0), out.stride(1),
            VALUE_DIM=value_dim, VALUE_PAD=_power(value_dim), SPLITS_PAD=_power(splits), SINKS=sinks is not None,
        )  # fmt: skip
    return out


def split_count(programs: int, processors: int, longest: int, tile: int) -> int:
    """Splits of each context so that all processors have work: 1 where batch and heads already give enough programs,
    and never more than there are tiles."""
    wanted = -(-PROGRAMS_A_PROCESSOR * processors // max(programs, 1))
    return max(1, min(wanted, MAX_SPLITS, -(-longest // tile)))


def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()
