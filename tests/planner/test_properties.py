"""What must hold for every model, part and workload."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.planner import accelerators, capacity, catalogue, kvcache, napkin, queueing, units, weights
from backend.planner import roofline as roof
from backend.planner.formats import KV, WEIGHTS
from backend.planner.shape import UnsupportedArchitecture
from backend.planner.step import step_cost

MODELS = {model.key: model.architecture for model in catalogue.models().values()}
PARTS = [part for part in accelerators.load().values() if "bf16" in part.flops_per_s]
H100 = accelerators.find("h100-sxm")
few = settings(max_examples=40, deadline=None)
models = st.sampled_from(sorted(MODELS)).map(MODELS.get)
parts = st.sampled_from(PARTS)
forms = st.sampled_from([WEIGHTS[name] for name in ("bf16", "fp8-block", "int4-g128", "q4_0")])
caches = st.sampled_from(list(KV.values()))
batches, contexts, groups = st.integers(1, 600), st.integers(1, 200_000), st.sampled_from((1, 2, 4, 8, 16, 64))


@few
@given(models, parts, forms, caches, batches, contexts, groups)
def test_a_step_grows_with_batch_and_context_and_so_does_throughput_with_batch(m, part, form, kv, batch, context, tp):
    def step(b, c):
        return roof.decode_step(m, form, kv, part, batch=b, context=c, tp=tp).value

    here = step(batch, context)
    assert here <= step(batch + 1, context) and here <= step(batch, context + 100)
    assert batch / here <= (batch + 1) / step(batch + 1, context) * (1 + 1e-9)


@few
@given(models, parts, forms, st.integers(1, 100_000), groups)
def test_prefill_grows_with_the_prompt_and_shrinks_with_what_is_cached(m, part, form, tokens, tp):
    whole = roof.prefill_time(m, form, part, tokens=tokens, tp=tp).value
    assert whole <= roof.prefill_time(m, form, part, tokens=tokens + 50, tp=tp).value
    assert roof.prefill_time(m, form, part, tokens=tokens, cached=tokens - 1, tp=tp).value <= whole


@few
@given(models, caches, contexts)
def test_the_cache_is_the_sum_of_its_layers(m, kv, context):
    layers = [dataclasses.replace(m, layers=(layer,)) for layer in m.layers if layer.mixer]
    each = [kvcache.kv_model(one, kv).bytes(context) for one in layers]
    assert sum(each) == pytest.approx(kvcache.kv_model(m, kv).bytes(context))


@few
@given(models, forms)
def test_parameters_are_the_sum_of_layers_tables_and_the_last_norm(m, form):
    rest = dataclasses.replace(m, layers=())
    layers = [dataclasses.replace(m, layers=(layer,)).parameters - rest.parameters for layer in m.layers]
    assert sum(layers) + rest.parameters == m.parameters
    stored = weights.checkpoint(m, form)
    assert sum(term.value for term in stored.terms) == stored.value
    assert stored.value >= m.parameters / 2  # nothing here is smaller than 4 bits


@few
@given(models, forms, caches, contexts, groups)
def test_a_group_of_gpus_never_stores_less_than_one(m, form, kv, context, tp):
    one, share = kvcache.kv_model(m, kv), kvcache.kv_model(m, kv, tp)
    assert share.bytes(context) * tp >= one.bytes(context) * (1 - 1e-9)
    if all(getattr(mixer, "kv_heads", 0) % tp == 0 and hasattr(mixer, "kv_heads") for mixer in m.kv_layers):
        assert share.kv_bytes(context) * tp == pytest.approx(one.kv_bytes(context))  # divisible: exactly as much
    assert weights.per_gpu(m, form, tp).value * tp >= weights.per_gpu(m, form).value * (1 - 1e-9)


@few
@given(models, forms, batches)
def test_reading_is_bounded_by_storing(m, form, batch):
    read = weights.read_bytes(m, form, batch)
    assert read <= weights.read_bytes(m, form, batch + 1) <= weights.checkpoint(m, form).value * (1 + 1e-9)
    assert weights.step_read(m, form, batch).value == pytest.approx(read)


@few
@given(models, forms, st.integers(1, 8), st.integers(0, 600))
def test_the_engines_own_count_of_a_step_agrees(m, form, batch, before):
    """The compact form that the engine counts with, against the fold over layers."""
    try:
        shape = m.shape(2, 2)
    except UnsupportedArchitecture:
        return
    cost = step_cost(shape, [(1, before)] * batch, batch)
    flops = roof.decode_flops(m, batch, before + 1)
    assert (cost.linear_flops, cost.attention_flops) == (flops.terms[0].value, flops.terms[1].value)
    assert cost.weight_bytes == pytest.approx(weights.read_bytes(m, WEIGHTS["bf16"], batch), rel=1e-9)
    assert cost.kv_read_bytes == batch * kvcache.kv_model(m, KV["bf16"]).kv_bytes(before + 1)


@given(st.integers(0, 60), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 40)))
def test_pairs_are_those_that_can_be_counted(new, before, window):
    counted = sum(min(before + i + 1, window or 10**9) for i in range(new))
    assert roof.pairs(new, before, window) == counted


@few
@given(models, forms, caches, contexts, groups)
def test_what_is_said_to_fit_fits_and_one_more_does_not(m, form, kv, context, tp):
    budget = capacity.memory_budget(m, form, H100, tp=tp)
    assert sum(term.value for term in budget.terms) == pytest.approx(budget.value)
    model = kvcache.kv_model(m, kv, tp)
    found = capacity.concurrency(budget.value, model, context)
    if found.value is None:
        assert found.note and budget.value < 0
        return
    each = capacity.sequence_bytes(model, context, 16)
    assert each >= model.bytes(context)
    assert found.value * each <= budget.value < (found.value + 1) * each


@few
@given(models, parts, contexts)
def test_the_crossover_is_where_arithmetic_overtakes_memory(m, part, context):
    form, kv = WEIGHTS["bf16"], KV["bf16"]
    found = roof.crossover_batch(m, form, kv, part, context=context)

    def late(batch):
        step = roof.decode_step(m, form, kv, part, batch=batch, context=context)
        return step.terms[2].value >= step.terms[0].value + step.terms[1].value

    if found.value is None:
        assert found.note.startswith("never") and not late(1 << 20)
    else:
        assert late(found.value) and (found.value == 1 or not late(found.value - 1))


@given(
    st.floats(0.01, 100),
    st.integers(1, 2000),
    st.floats(0, 5),
    st.floats(1e-4, 0.1),
    st.floats(0, 1e-3),
    st.one_of(st.none(), st.integers(1, 300)),
)
def test_little_finds_the_least_batch_that_keeps_up(arrivals, output, ttft_s, base_s, slope_s, most):
    def tpot(batch):
        return base_s + slope_s * batch

    found = queueing.fixed_point(arrivals, output, ttft_s, tpot, most)

    def enough(batch):
        return batch >= arrivals * (ttft_s + output * tpot(batch))

    if found.value is None:
        assert "unstable" in found.note and not any(enough(n) for n in range(1, (most or 1000) + 1))
    else:
        assert enough(found.value) and (found.value == 1 or not enough(found.value - 1))
        assert most is None or found.value <= most


@given(st.floats(0, 1e15), st.sampled_from(sorted(units.SCALES)))
def test_units_come_back(value, unit):
    assert units.from_si(units.to_si(value, unit), unit) == pytest.approx(value)


def test_overlap_is_a_bound_and_the_sum_is_none():
    numbers = {"weight_bytes": 1e10, "kv_bytes": 5e9, "bytes_per_s": 1e12, "flops": 1e13, "flops_per_s": 1e15}
    bound, total = napkin.step_time(**numbers), napkin.step_time_unoverlapped(**numbers)
    assert (bound.kind, total.kind) == ("bound", "estimate") and bound.value <= total.value
