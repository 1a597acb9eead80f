"""A decode step that never ran, against the numbers of course texts and against plain counting."""

from __future__ import annotations

import msgspec
import pytest

from backend import what_if
from backend.planner.shape import ModelShape

LLAMA_3_8B = ModelShape.from_config(
    {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    },
    dtype_bytes=2,
)  # fmt: skip


def test_a_shape_travels_and_comes_back():
    told = msgspec.json.decode(msgspec.json.encode(LLAMA_3_8B))
    assert what_if.shape_of(told) == LLAMA_3_8B
    assert what_if.shape_of({}) is None
    assert what_if.shape_of({"attention": "many"}) is None


def test_at_batch_1_a_decode_step_has_one_flop_a_byte_and_batching_raises_it():
    one = what_if.decode_step(LLAMA_3_8B, 1, 16)
    assert one.flop_per_byte == pytest.approx(1.0, rel=0.02)  # 2N/P with N = 1 token, P = 2 bytes
    many = what_if.decode_step(LLAMA_3_8B, 64, 16)
    assert many.flop_per_byte == pytest.approx(64, rel=0.1)
    assert what_if.decode_step(LLAMA_3_8B, 64, 8192).flop_per_byte < 16  # the context holds it back


def test_32_sequences_of_8192_read_about_twice_the_weights():
    cost = what_if.decode_step(LLAMA_3_8B, 32, 8192)
    assert cost.kv_read_bytes == 32 * 8192 * 131_072
    assert cost.kv_read_bytes / cost.weight_bytes == pytest.approx(2.15, rel=0.07)


def test_kv_overtakes_the_weights_where_it_says():
    curve = what_if.by_context(LLAMA_3_8B, 32, 512, 131_072)
    under, over = (what_if.decode_step(LLAMA_3_8B, 32, c) for c in (curve.overtakes - 1, curve.overtakes))
    assert under.kv_read_bytes <= under.weight_bytes and over.kv_read_bytes > over.weight_bytes
    assert 32 * curve.overtakes == pytest.approx(122_070, rel=0.07)  # 16 GB ÷ 128 KiB
    by_batch = what_if.by_batch(LLAMA_3_8B, 1, 4096)
    assert what_if.decode_step(LLAMA_3_8B, by_batch.overtakes, 4096).kv_read_bytes > by_batch.weights[0]
    assert what_if.by_batch(LLAMA_3_8B, 1, 16).overtakes is None  # not within what is drawn


def test_a_curve_is_the_sum_of_its_kinds():
    curve = what_if.by_batch(LLAMA_3_8B, 8, 512)
    at = curve.xs.index(8)
    assert sum(getattr(curve, kind)[at] for kind in what_if.KINDS) == curve.total_at
    assert curve.at == 8 and "512" in curve.held


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [(32, 32, 1.0), (32, 8, 4.0), (9, 3, 3.0), (32, 1, 32.0)],
)
def test_grouping_raises_the_intensity_of_attention(heads, kv_heads, expected):
    assert what_if.attention_intensity(heads, kv_heads, 2) == expected
    shape = ModelShape.from_config(
        {
            "model_type": "llama", "hidden_size": heads * 64, "num_hidden_layers": 2, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": 64, "vocab_size": 100,
        },
        dtype_bytes=2,
    )  # fmt: skip
    for batch, context in ((1, 100), (7, 3000)):  # neither changes it
        cost = what_if.decode_step(shape, batch, context)
        assert cost.attention_flops / cost.kv_read_bytes == pytest.approx(expected)


def test_absorbed_latent_attention_is_near_a_ridge():
    assert what_if.mla_intensity(128, 512, 64, 2) == pytest.approx(242, abs=0.5)


def test_groupings_are_those_that_divide_the_heads():
    rows = what_if.groupings(9, 4, 3)
    assert [kv for _, kv, _ in rows] == [9, 3, 1]
    assert [("this model" in name) for name, _, _ in rows] == [False, True, False]


def test_contexts_leave_room_for_a_token():
    assert what_if.contexts(8192)[-1] == 4096
    assert what_if.contexts(8) == [16]
