"""Curves, map and the own machine."""

import pytest

from backend.planner import accelerators, catalogue, machine, plan, sweep
from tests.planner.test_plan import setup

CEILINGS = {
    "read": {"value": 2e10},
    "matmul": {"value": 3e11},
    "conditions": {"device_name": "A CPU", "dtype": "float32", "date": "2026-01-02T03:04:05"},
}


def test_a_sweep_is_the_plan_at_each_value():
    points = {point.x: point for point in sweep.sweep(setup(batch=16), "context")}
    there = plan.make(setup(batch=16, context=32_768))
    point = points[32_768]
    assert point.room == there["concurrency"].value
    assert point.ceiling == there["ceiling"].value and point.rate.value == there["rate"].value
    assert point.ttft_s == there["ttft"].value and point.usd_per_million == there["cost"].value
    rooms = [points[x].room for x in sorted(points)]
    assert rooms == sorted(rooms, reverse=True)


@pytest.mark.parametrize("knob", sweep.KNOBS)
def test_every_knob_turns(knob):
    points = sweep.sweep(setup(context=16_384, output=64), knob)
    assert len(points) >= 5 and [p.x for p in points] == sorted(p.x for p in points)


def test_the_map_knows_what_fits_where_and_why_not():
    models = [(name, catalogue.find(name).architecture) for name in ("llama-3.1-8b", "llama-3.1-405b")]
    parts = [accelerators.find(name) for name in ("t4", "h100-sxm", "b300-sxm")]
    small, large = sweep.grid(setup(), models, parts)
    assert [cell.gpus for cell in small] == [2, 1, 1]
    assert [cell.gpus for cell in large] == [None, 16, 4]
    assert small[0].room == 0 and "too large" in small[0].why and small[0].ceiling is None
    assert small[1].room == plan.make(setup("llama-3.1-8b"))["concurrency"].value and not small[1].why


def test_what_the_map_shows_first_is_in_the_catalogues():
    assert set(sweep.COMMON_MODELS) <= set(catalogue.models())
    assert set(sweep.COMMON_PARTS) <= set(accelerators.load())


def test_the_own_machine_is_an_accelerator_once_it_was_measured():
    part = machine.from_ceilings(CEILINGS, 2**34)
    assert (part.kind, part.rate("fp32"), part.bandwidth_bytes_per_s) == ("measured", 3e11, 2e10)
    assert "2026-01-02" in part.source
    for broken in (None, {}, {"read": {}}, CEILINGS | {"matmul": {"value": None}}):
        assert machine.from_ceilings(broken, 2**34) is None


def test_a_loaded_model_is_recognised_by_its_counts():
    assert machine.catalogue_key(134_515_008, 30) == "smollm2-135m"
    assert machine.catalogue_key(134_515_008, 31) is None


def test_measured_points_are_of_steps_that_only_decode():
    rows = [(0.010, 0, 4, 4 * 100 * 50)] * 5 + [(0.020, 0, 4, 4 * 100 * 50)] + [(0.5, 64, 4, 0)] * 9
    rows += [(0.03, 0, 8, 800)] * 4  # too few
    (point,) = machine.decode_points(rows, kv_bytes_per_token=100)
    assert (point.batch, point.step_s, point.context, point.steps) == (4, 0.010, 50, 6)
    assert point.tokens_per_s == 400
