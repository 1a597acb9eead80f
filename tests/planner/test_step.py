"""The step arithmetic: against counting pair by pair, against torch's own counter, against live tensors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.planner.shape import AttentionLayer, ModelShape
from backend.planner.step import NOTHING, step_cost

WINDOWS = [None, 1, 5, 16]
SHAPE = ModelShape.from_measured(
    attention=[AttentionLayer(6, 2, 8, 4, window) for window in WINDOWS],
    hidden=48,
    mlp=80,
    vocab=100,
    parameters=50_000,
    matmul_parameters=40_000,
    head_parameters=4_800,
    gathered_parameters=4_800,
    dtype_bytes=4,
    kv_dtype_bytes=2,
)
spans_of_a_step = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6)


@given(spans_of_a_step)
def test_attention_counts_every_visible_pair_and_reads_every_seen_token_once(spans):
    pairs = dict.fromkeys(WINDOWS, 0)
    read = dict.fromkeys(WINDOWS, 0)
    for new, before in spans:
        for window in WINDOWS:
            seen = set()
            for query in range(before, before + new):
                visible = [key for key in range(query + 1) if window is None or key > query - window]
                pairs[window] += len(visible)
                seen |= set(visible)
            read[window] += len(seen)
    cost = step_cost(SHAPE, spans, 0)
    assert cost.attention_flops == sum(2 * 6 * (8 + 4) * n for n in pairs.values())
    assert cost.kv_read_bytes == sum(2 * (8 + 4) * 2 * n for n in read.values())
    assert cost.kv_write_bytes == sum(new for new, _ in spans) * 4 * 2 * (8 + 4) * 2


@given(spans_of_a_step, spans_of_a_step, st.integers(0, 6), st.integers(0, 6))
def test_two_steps_in_one_share_only_the_weights(a, b, rows_a, rows_b):
    one, other, both = (
        step_cost(SHAPE, a, rows_a),
        step_cost(SHAPE, b, rows_b),
        step_cost(SHAPE, a + b, rows_a + rows_b),
    )
    assert both.flops == one.flops + other.flops
    assert both.bytes == one.bytes + other.bytes - one.weight_bytes
    assert both.weight_bytes == one.weight_bytes == other.weight_bytes == (50_000 - 4_800) * 4


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 50))
def test_chunking_changes_no_flops_and_reads_more(before, first, second):
    whole = step_cost(SHAPE, [(first + second, before)], 1)
    chunks = [step_cost(SHAPE, [(first, before)], 0), step_cost(SHAPE, [(second, before + first)], 1)]
    assert whole.flops == sum(c.flops for c in chunks)
    assert whole.kv_write_bytes == sum(c.kv_write_bytes for c in chunks)
    assert whole.kv_read_bytes < sum(c.kv_read_bytes for c in chunks)


@given(st.integers(1, 64), st.integers(0, 500))
def test_decode_grows_with_batch_and_context(batch, context):
    cost = step_cost(SHAPE, [(1, context)] * batch, batch)
    more = step_cost(SHAPE, [(1, context)] * (batch + 1), batch + 1)
    longer = step_cost(SHAPE, [(1, context + 1)] * batch, batch)
    assert more.flops > cost.flops
    assert more.bytes > cost.bytes
    assert more.weight_bytes == cost.weight_bytes
    assert longer.kv_read_bytes > cost.kv_read_bytes
    assert longer.linear_flops == cost.linear_flops


def test_the_head_works_only_on_sampled_rows():
    none, one = step_cost(SHAPE, [(64, 0)], 0), step_cost(SHAPE, [(64, 0)], 1)
    assert one.linear_flops - none.linear_flops == 2 * 4_800
    assert one.activation_bytes - none.activation_bytes == (48 + 100) * 4


def test_an_empty_step_moves_nothing():
    assert step_cost(SHAPE, [], 0) == NOTHING
    assert NOTHING.flop_per_byte == 0


def test_spans_may_be_any_iterable():
    spans = [(3, 20), (1, 2)]
    assert step_cost(SHAPE, iter(spans), 2) == step_cost(SHAPE, spans, 2)


def test_torch_counts_the_same_flops_and_the_cache_holds_the_same_bytes():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=80,
        vocab_size=100,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    shape = ModelShape.from_config(config.to_dict(), 4)
    cache = transformers.DynamicCache(config=config)
    for new, before in ((20, 0), (5, 20), (1, 25)):
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            ids = torch.arange(new)[None]
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cost = step_cost(shape, [(new, before)], 1)
        # eager attention multiplies the masked half too; everything else must be equal
        eager = shape.attention[0].flops_per_pair * shape.layers * new * (before + new)
        rotation = 2 * (config.head_dim // 2) * new  # positions times frequencies, in some versions a matmul
        assert counter.get_total_flops() - cost.linear_flops - eager in (0, rotation)
        assert eager >= cost.attention_flops
        held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
        assert held == cost.kv_read_bytes == shape.kv_bytes(before + new)
    stored = sum(p.nbytes for p in model.parameters())
    assert stored == shape.stored_weight_bytes == shape.step_weight_bytes
