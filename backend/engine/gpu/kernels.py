"""Triton kernels: new K and V into the paged pool, and attention of single tokens that reads the pool in place.

Token t of a request whose block table is `table` stands in slot table[t // block_size] * block_size + t % block_size.
Offsets into the pool are 64 bit: a pool of more than 2³¹ elements a layer is ordinary on a large GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)  # when it was imported: TRITON_INTERPRET=1, on the CPU

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def write(
    key, value, key_pool, value_pool, slots,
    key_head, key_token, value_head, value_token, key_pool_slot, value_pool_slot,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """One program a token: its K and V of all heads, [heads, dim] with any strides, to its slot [slots, heads, dim].

    *_PAD: the powers of two that hold HEADS * dim.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, KEY_PAD)
    inside = at < HEADS * KEY_DIM
    row = tl.load(key + token * key_token + (at // KEY_DIM) * key_head + at % KEY_DIM, mask=inside)
    tl.store(key_pool + slot * key_pool_slot + at, row, mask=inside)
    at = tl.arange(0, VALUE_PAD)
    inside = at < HEADS * VALUE_DIM
    row = tl.load(value + token * value_token + (at // VALUE_DIM) * value_head + at % VALUE_DIM, mask=inside)
    tl.store(value_pool + slot * value_pool_slot + at, row, mask=inside)


@triton.jit(do_not_specialize=["window", "splits"])  # they differ by batch and by layer: one binary serves all
def decode(
    query, key_pool, value_pool, out, partial, lse, rows, tables, lengths, sinks,
    scale, softcap, window, splits,
    query_row, query_head, key_slot, key_head, value_slot, value_head, out_row, out_head, table_row,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (request, KV head, split of its context): the query heads that share the KV head attend to the
    split's tokens, TILE at a time, with a running softmax.

    SPLIT: normalised partial sums [B, heads, splits, VALUE_DIM] and the log₂ of their weights [B, heads, splits] for
    `reduce`; else the answer itself. A length of 0 (padding of a batch) gives zeros. softcap, window and sinks mean
    nothing unless their switch is on; a window counts the new token itself.
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request).to(tl.int32)
    seen_from = 0
    if WINDOW:
        seen_from = tl.maximum(length - window, 0)
    tiles = (length - seen_from + TILE - 1) // TILE
    share = (tiles + splits - 1) // splits * TILE
    first = seen_from + split * share
    end = tl.minimum(first + share, length)

    head = tl.arange(0, GROUP_PAD)
    key_dim, value_dim = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    real = head < GROUP
    heads = kv_head * GROUP + head
    q = tl.load(
        query + request.to(tl.int64) * query_row + heads[:, None] * query_head + key_dim[None, :],
        mask=real[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    table = tables + tl.load(rows + request).to(tl.int64) * table_row
    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weight = tl.full([GROUP_PAD], 0.0, tl.float32)
    total = tl.full([GROUP_PAD, VALUE_PAD], 0.0, tl.float32)
    for at in range(first, end, TILE):
        position = at + tl.arange(0, TILE)
        valid = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        k = tl.load(
            key_pool + slot[:, None] * key_slot + kv_head * key_head + key_dim[None, :],
            mask=valid[:, None] & (key_dim < KEY_DIM)[None, :],
            other=0.0,
        )
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh, which Triton has only by library
        score = tl.where(valid[None, :], score * LOG2E, float("-inf"))
        better = tl.maximum(best, tl.max(score, 1))
        p = tl.exp2(score - better[:, None])
        fade = tl.exp2(best - better)
        v = tl.load(
            value_pool + slot[:, None] * value_slot + kv_head * value_head + value_dim[None, :],
            mask=valid[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        weight = weight * fade + tl.sum(p, 1)
        total = total * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        best = better

    stored = real[:, None] & (value_dim < VALUE_DIM)[None, :]
    if SPLIT:
        place = (request * tl.num_programs(1) * GROUP + heads).to(tl.int64) * splits + split
        # A split without tokens has log₂ 0 = -inf as its weight; its sums are neither written nor read.
        weight = tl.where(weight == 0, 1.0, weight)
        tl.store(lse + place, best + tl.log2(weight), mask=real)
        tl.store(
            partial + place[:, None] * VALUE_DIM + value_dim[None, :],
            total / weight[:, None],
            mask=stored & (first < end),
        )
    else:
        if SINKS:
            # One more score a head, which takes weight and gives no value.
            sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
            better = tl.maximum(best, sink)
            fade = tl.exp2(best - better)
            weight = weight * fade + tl.exp2(sink - better)
            total = total * fade[:, None]
        answer = total / tl.where(weight == 0, 1.0, weight)[:, None]
        tl.store(
            out + request.to(tl.int64) * out_row + heads[:, None] * out_head + value_dim[None, :],
            answer.to(out.dtype.element_ty),
            mask=stored,
        )


@triton.jit(do_not_specialize=["splits"])
def reduce(
    partial, lse, out, sinks, splits, out_row, out_head,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program a (request, query head): the splits' sums, weighed."""
    request, head = tl.program_id(0), tl.program_id(1)
    split, dim = tl.arange(0, SPLITS_PAD), tl.arange(0, VALUE_PAD)
    place = (request * tl.num_programs(1) + head).to(tl.int64) * splits + split
    logs = tl.load(lse + place, mask=split < splits, other=float("-inf"))
    # Not "greater than": a weight that is not a number must stay visible in the answer.
    there = logs != float("-inf")
    best = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        best = tl.maximum(best, sink)
    best = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(logs - best)
    sums = tl.load(
        partial + place[:, None] * VALUE_DIM + dim[None, :],
        mask=there[:, None] & (dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    weight = tl.sum(weights, 0)
    if SINKS:
        weight += tl.exp2(sink - best)
    answer = tl.sum(sums * weights[:, None], 0) / tl.where(weight == 0, 1.0, weight)
    tl.store(
        out + request.to(tl.int64) * out_row + head * out_head + dim, answer.to(out.dtype.element_ty),
        mask=dim < VALUE_DIM,
    )  # fmt: skip
