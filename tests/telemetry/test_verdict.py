"""The rule on synthetic steps, overhead-bound included."""

import pytest

from backend.telemetry.ceiling import Ceiling, Ceilings, Conditions
from backend.telemetry.verdict import FAR, RULE, verdict

HERE = {"read": {"value": 100e9}, "matmul": {"value": 10e12}}  # ridge: 100 FLOP/byte


MEMORY, COMPUTE = "% of the bandwidth ceiling", "% of the arithmetic ceiling"


@pytest.mark.parametrize(
    ("flops", "moved", "seconds", "regime", "words"),
    [
        (1e9, 1e9, 0.0125, "memory", f"memory-bound: 80 {MEMORY}"),
        (1e11, 1e8, 0.0125, "compute", f"compute-bound: 80 {COMPUTE}"),
        (1e9, 1e9, 0.0199, "memory", f"memory-bound: 50 {MEMORY}"),
        (1e9, 1e9, 0.0310, "overhead", f"overhead-bound: 3.1 × the time that memory needs (32 {MEMORY})"),
        (1e11, 1e8, 0.0250, "overhead", f"overhead-bound: 2.5 × the time that arithmetic needs (40 {COMPUTE})"),
        (1e7, 1e6, 0.0100, "overhead", f"overhead-bound: 1000.0 × the time that memory needs (0 {MEMORY})"),
        (1e9, 1e9, 0.0000, "unknown", "nothing was measured yet"),
        (0, 0, 0.01, "unknown", "nothing was measured yet"),
    ],
)
def test_a_step_is_limited_by(flops, moved, seconds, regime, words):
    found = verdict(flops, moved, seconds, HERE)
    assert (found.regime, found.words) == (regime, words)
    assert found.bound_s == max(moved / 100e9, flops / 10e12)


def test_the_ridge_parts_memory_from_compute():
    assert verdict(100e9, 1e9, 0.011, HERE).regime == "memory"  # exactly on it
    assert verdict(101e9, 1e9, 0.011, HERE).regime == "compute"


def test_more_than_the_ceiling_is_explained_and_not_cut():
    found = verdict(1e9, 1e9, 0.008, HERE)
    assert found.mbu == pytest.approx(1.25) and "caches" in found.words


def test_sums_over_steps_are_judged_like_one_and_the_object_like_its_json():
    value = lambda v, unit: Ceiling(value=v, low=v, high=v, unit=unit, way="w", ways={}, rounds=1)  # noqa: E731
    where = Conditions(device="cpu", device_name="", host="", dtype="float32", threads=1, torch="")
    ceilings = Ceilings(copy=value(1, "B/s"), read=value(100e9, "B/s"), matmul=value(10e12, "FLOP/s"), conditions=where)
    assert verdict(5e9, 5e9, 0.06, ceilings) == verdict(5e9, 5e9, 0.06, HERE)


def test_the_rule_is_in_words():
    assert f"{FAR:g} ×" in RULE and "overhead-bound" in RULE
    assert verdict(1, 1, 1, HERE).rule == RULE
