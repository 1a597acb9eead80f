"""Sampling against distributions written out by hand."""

import random
from collections import Counter

import pytest
import torch

from backend.engine.request import Request, SamplingParams
from backend.engine.sampling import sample, top_logprobs


def request(seed=None, output_tokens=0, **params):
    tokens = [0] * output_tokens
    return Request(1, "", tokens, 0, params=SamplingParams(**params), rng=random.Random(seed))


def draw(logits, request, count=4000):
    rows = torch.tensor([logits]).expand(count, -1).clone()
    tokens, _ = sample(rows, [request] * count, frozenset())
    return Counter(tokens.tolist())


def expect(counts, probabilities, tolerance=0.03):
    total = sum(counts.values())
    assert set(counts) <= {i for i, p in enumerate(probabilities) if p > 0}
    for i, p in enumerate(probabilities):
        assert abs(counts[i] / total - p) < tolerance, (i, counts[i] / total, p)


LOGITS = [2.0, 1.0, 0.0, -1.0, -30.0]


def test_temperature_follows_the_softmax():
    for temperature in (0.5, 1.0, 2.0):
        expect(
            draw(LOGITS, request(1, temperature=temperature)), (torch.tensor(LOGITS) / temperature).softmax(0).tolist()
        )


def test_top_k_keeps_the_k_best():
    expect(draw(LOGITS, request(2, top_k=2)), [*torch.tensor(LOGITS[:2]).softmax(0).tolist(), 0, 0, 0])


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    full = torch.tensor(LOGITS).softmax(0)
    kept = full[:2] / full[:2].sum()
    expect(draw(LOGITS, request(3, top_p=0.8)), [*kept.tolist(), 0, 0, 0])


def test_top_p_keeps_the_best_token_even_when_it_alone_is_too_much():
    assert set(draw(LOGITS, request(4, top_p=0.01), 50)) == {0}


def test_top_p_over_a_flat_distribution_wider_than_the_first_guess():
    counts = draw([0.0] * 1000, request(5, top_p=0.5), 6000)
    assert 490 <= len(counts) <= 500


def test_top_k_and_top_p_together():
    three = torch.tensor(LOGITS[:3]).softmax(0)
    kept = three[:2] / three[:2].sum()
    expect(draw(LOGITS, request(6, top_k=3, top_p=0.85)), [*kept.tolist(), 0, 0, 0])


def test_greedy_and_nearly_greedy_take_the_best():
    assert set(draw(LOGITS, request(temperature=0.0), 20)) == {0}
    assert set(draw(LOGITS, request(temperature=1e-9), 20)) == {0}


def test_a_seed_says_the_same_whoever_else_is_in_the_batch():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    alone, _ = sample(logits[1:2].clone(), [request(7)], frozenset())
    together, _ = sample(logits.clone(), [request(1, top_p=0.3), request(7), request(temperature=0.0)], frozenset())
    assert together[1] == alone[0]


def test_no_stop_token_before_min_tokens():
    early = request(temperature=0.0, min_tokens=3, stop_token_ids=[1], output_tokens=2)
    late = request(temperature=0.0, min_tokens=3, stop_token_ids=[1], output_tokens=3)
    rows = torch.tensor([LOGITS, LOGITS])
    assert sample(rows, [early, late], frozenset([0]))[0].tolist() == [2, 0]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_choose_nothing(broken):
    rows = torch.tensor([LOGITS, [broken, *LOGITS[1:]]])
    assert sample(rows, [request(temperature=0.0)] * 2, frozenset())[0].tolist() == [0, -1]


def test_logprobs_are_those_of_the_distribution_before_temperature():
    chosen, best = top_logprobs(torch.tensor(LOGITS), 1, 2)
    want = torch.tensor(LOGITS).log_softmax(0)
    assert chosen == pytest.approx(float(want[1]))
    assert [i for i, _ in best] == [0, 1]
    assert [p for _, p in best] == pytest.approx(want[:2].tolist())
