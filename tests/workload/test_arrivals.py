"""When requests arrive and how long they are."""

from __future__ import annotations

import math
import statistics

import pytest

from backend.workload.arrivals import MAX_REQUESTS, Arrivals, LoadError, times
from backend.workload.lengths import SHAREGPT, Lengths, draw
from backend.workload.words import WORDS, text, words_for


def gaps_of(at: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *at], at, strict=False)]


@pytest.mark.parametrize("kind, spread", [("poisson", 1.0), ("constant", 0.0), ("bursty", 2.0)])
def test_gaps_have_the_rate_and_the_spread_of_their_kind(kind, spread):
    """The coefficient of variation of gamma gaps of shape k is 1/sqrt(k): 1 for Poisson, 2 for k = 0.25."""
    at = times(Arrivals(kind), 8.0, 4000, seed=3, burstiness=0.25)
    gaps = gaps_of(at)
    assert at == sorted(at) and len(at) == 4000
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.001)
    assert statistics.pstdev(gaps) * 8 == pytest.approx(spread, abs=0.15)


def test_the_same_seed_gives_the_same_schedule_and_another_another():
    assert times(Arrivals.poisson, 5, 100, seed=1) == times(Arrivals.poisson, 5, 100, seed=1)
    assert times(Arrivals.poisson, 5, 100, seed=1) != times(Arrivals.poisson, 5, 100, seed=2)
    assert draw(Lengths.uniform, 50, 100, 60, seed=1) == draw(Lengths.uniform, 50, 100, 60, seed=1)
    assert draw(Lengths.sharegpt, 50, 999, 999, seed=1) != draw(Lengths.sharegpt, 50, 999, 999, seed=2)


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf, 1e9])
def test_an_impossible_rate_is_refused_by_its_number(rate):
    with pytest.raises(LoadError, match=r"requests/s"):
        times(Arrivals.poisson, rate, 10)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(count=0), "0 requests"),
        (dict(count=MAX_REQUESTS + 1), "requests in one run"),
        (dict(count=10, burstiness=0.0), "burstiness"),
        (dict(count=10, burstiness=math.nan), "burstiness"),
    ],
)
def test_other_impossible_wishes_are_refused(arguments, words):
    with pytest.raises(LoadError, match=words):
        times(Arrivals.bursty, 1.0, **arguments)


def test_lengths_of_each_kind():
    assert draw(Lengths.fixed, 3, 128, 64) == [(128, 64)] * 3
    uniform = draw(Lengths.uniform, 4000, 100, 50)
    assert min(i for i, _ in uniform) >= 1 and max(i for i, _ in uniform) <= 199
    assert statistics.mean(i for i, _ in uniform) == pytest.approx(100, rel=0.05)
    shared = draw(Lengths.sharegpt, 4000, 2000, 2000)
    assert set(shared) <= set(SHAREGPT)
    assert statistics.mean(i for i, _ in shared) == pytest.approx(238, rel=0.1)
    assert max(o for _, o in draw(Lengths.sharegpt, 500, 100, 40)) == 40


def test_the_built_in_mix_has_the_means_that_its_source_states():
    assert len(SHAREGPT) == 100 and all(i >= 4 and o >= 4 and i + o <= 2048 for i, o in SHAREGPT)
    assert statistics.mean(i for i, _ in SHAREGPT) == pytest.approx(238, abs=0.5)
    assert statistics.mean(o for _, o in SHAREGPT) == pytest.approx(217, abs=0.5)


@pytest.mark.parametrize("tokens", [0, -5, 10**9])
def test_impossible_lengths_are_refused(tokens):
    with pytest.raises(LoadError, match="tokens"):
        draw(Lengths.fixed, 1, tokens, 10)
    with pytest.raises(LoadError, match="tokens"):
        draw(Lengths.fixed, 1, 10, tokens)


def test_more_answers_than_times_can_be_kept_of_are_refused():
    with pytest.raises(LoadError, match="output tokens"):
        draw(Lengths.fixed, 20_000, 10, 1000)


def test_prompts_have_their_length_and_share_no_beginning():
    prompts = [text(f"salt {i}", 50) for i in range(200)]
    assert {len(prompt.split()) for prompt in prompts} == {50} and set(prompts[0].split()) <= set(WORDS)
    assert len({" ".join(prompt.split()[:3]) for prompt in prompts}) == 200
    assert text("a", 5) == text("a", 5) and text("a", 0) != ""
    assert words_for(103, 2.0, 3) == 50 and words_for(1, 2.0, 30) == 1
