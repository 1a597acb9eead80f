"""Percentiles, goodput, the knee, over-saturation, Little's law: rules against numpy and computed queues."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.experiments import latency, little, saturation
from backend.experiments.percentiles import percentiles
from backend.workload.job import Answer, Tick
from tests.experiments.queue_model import play


@given(
    samples=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300),
    wanted=st.lists(st.floats(0, 100), min_size=1, max_size=5),
)
def test_percentiles_equal_numpys(samples, wanted):
    expected = np.percentile(samples, wanted, method="linear")
    assert percentiles(samples, wanted) == pytest.approx(list(expected), rel=1e-9, abs=1e-6)


def test_percentiles_of_nothing_and_of_nonsense():
    assert percentiles([], (50, 99)) == [None, None]
    assert percentiles([3.0], (0, 50, 99, 100)) == [3.0] * 4
    with pytest.raises(ValueError, match="not a number"):
        percentiles([1.0, math.nan], (50,))
    with pytest.raises(ValueError, match="percentile"):
        percentiles([1.0], (101,))


def answer(number: int, *times: float, state: str = "ok", tokens: int | None = None) -> Answer:
    return Answer(
        number=number,
        arrival_s=1.0,
        sent_s=1.001,
        end_s=(times[-1] if times else 1.5) + 0.001,
        state=state,
        times_s=list(times),
        wanted_input=8,
        wanted_output=4,
        input_tokens=8,
        output_tokens=tokens,
    )


def test_the_words_mean_what_they_say():
    """Four tokens in three pieces: TPOT goes by tokens, ITL by pieces."""
    answers = [answer(0, 1.2, 1.3, 1.5, tokens=4), answer(1, 2.0, tokens=1), answer(2, state="refused")]
    row = latency.summary(2.0, answers, [Tick(t=1.0, arrived=3, left=0, in_flight=3)], "here")
    assert row["ttft_p50_s"] == pytest.approx((0.2 + 1.0) / 2)
    assert row["tpot_p50_s"] == pytest.approx(0.3 / 3) and row["e2e_mean_s"] == pytest.approx((0.5 + 1.0) / 2)
    assert row["itl_mean_s"] == pytest.approx(0.15)
    for one in (latency.request_row(2.0, answers[0]), latency.request_row(2.0, answers[1])):
        later = (one["output_tokens"] - 1) * (one["tpot_s"] or 0)
        assert one["e2e_s"] == pytest.approx(one["ttft_s"] + later)
    assert (row["requests"], row["ok"], row["refused"], row["in_flight_max"]) == (3, 2, 1, 3)
    assert row["duration_s"] == pytest.approx(1.001) and row["output_tokens_per_s"] == pytest.approx(5 / 1.001)


def test_a_sweep_without_an_answer_has_no_latency_rather_than_zero():
    row = latency.summary(2.0, [answer(0, state="failed")], [], "here")
    assert row["ttft_p99_s"] is None and row["itl_mean_s"] is None and row["achieved_rate_per_s"] == 0


def test_goodput_counts_who_kept_every_limit():
    answers = [answer(i, 1.0 + wait, 1.0 + wait + 0.3, tokens=4) for i, wait in enumerate((0.1, 0.2, 0.4))]
    answers += [answer(3, 1.1, tokens=1), answer(4, state="refused")]
    table = pd.DataFrame([latency.summary(5.0, answers, [], "here")])
    requests = latency.requests_table(latency.request_row(5.0, one) for one in answers)
    lasted = table["duration_s"].iloc[0]
    for slo, good in (
        (latency.Slo(), 4),
        (latency.Slo(ttft_s=0.25), 3),
        (latency.Slo(ttft_s=0.25, tpot_s=0.05), 1),  # only the one that has no TPOT
        (latency.Slo(e2e_s=0.45), 2),
    ):
        found = latency.goodput(table, requests, slo).iloc[0]
        assert found["good_share"] == good / 5 and found["goodput_per_s"] == pytest.approx(good / lasted)


def test_the_knee_is_where_power_is_greatest():
    assert saturation.knee([(1, 1.0), (2, 1.1), (4, 1.6), (5, 4.0)]) == 2
    assert saturation.knee([(1, 1.0), (2, 1.1), (4, 1.2)]) is None  # power still grows
    assert saturation.knee([(1, 1.0), (2, 9.0)]) is None
    assert saturation.knee([(1, 1.0), (2, 1.1), (0, 0.0)]) == 1


def share_over(load: float, count: int, runs: int = 25) -> float:
    """Of `runs` computed queues of eight places at this share of what they can do, those called over-saturated."""
    found = 0
    for seed in range(runs):
        _, ticks, last = play(rate=8 * load / 0.5, count=count, places=8, service_s=0.5, seed=seed)
        found += saturation.judge(ticks, last).state == "over-saturated"
    return found / runs


def test_over_saturation_is_seen_and_not_imagined():
    """Twenty-odd runs in twenty-five each way; at 90 % of what it can do a short run may look like too much."""
    assert share_over(0.6, 200) == 0
    assert share_over(0.8, 200) <= 0.1
    assert share_over(1.5, 200) >= 0.8
    assert share_over(1.3, 600) >= 0.9


def test_a_run_shorter_than_its_answers_is_called_too_short():
    _, ticks, last = play(rate=5, count=100, places=1000, service_s=15, seed=1, even=True)
    assert saturation.judge(ticks, last).state == "too short"
    assert saturation.judge([], 10.0).state == "too short"


@pytest.mark.parametrize("seed", range(5))
def test_littles_residual_is_small_in_steady_state(seed):
    answers, ticks, last = play(rate=8, count=400, places=8, service_s=0.5, seed=seed)
    points = little.series(ticks, answers, last)
    assert abs(points[-1].residual) < little.SMALL
    assert little.verdict(points, "steady")[0] == "steady"
    assert 60 <= len(points) <= 2 * little.POINTS and points[-1].t == pytest.approx(last, abs=0.2)
    # Three measurements: none is computed from the other two.
    stays = [a.end_s - a.arrival_s for a in answers if 0.2 * last <= a.end_s <= points[-1].t]
    assert points[-1].w_s == pytest.approx(sum(stays) / len(stays), rel=0.01)
    assert points[-1].rate_per_s == pytest.approx(8, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_littles_residual_grows_in_overload_and_is_called_unstable(seed):
    answers, ticks, last = play(rate=24, count=600, places=8, service_s=0.5, seed=seed)
    points = little.series(ticks, answers, last)
    left_over = [point.l - point.rate_times_w for point in points]
    assert left_over[-1] > 1.3 * left_over[len(points) // 4] > 0 and points[-1].residual > 2 * little.SMALL
    assert little.verdict(points, saturation.judge(ticks, last).state)[0] == "unstable"


def test_too_few_requests_settle_nothing():
    answers, ticks, last = play(rate=8, count=50, places=8, service_s=0.1, seed=0)
    assert little.verdict(little.series(ticks, answers, last), "steady")[0] == "too early"
    assert little.verdict([], "steady") == ("too early", "no request has left yet")


def test_the_exercise_of_the_book():
    """40 in flight, 1,000 tokens at 25 ms: 25 s each, 1.6 requests/s, 1,600 tokens/s."""
    place = little.Capacity(in_flight=40, tokens=1000, tpot_s=0.025)
    assert (place.w_s, place.rate_per_s, place.tokens_per_s) == pytest.approx((25.0, 1.6, 1600.0))
