"""Growth of counters, and quantiles of histograms: against numpy on the observations themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.sources.attach import windows
from backend.sources.attach.exposition import Exposition, Reader
from backend.sources.attach.windows import PROCESS_START, Counters, Recent, quantile
from tests.sources.attach.texts import body, line

BOUNDS = [0.01, 0.1, 0.5, 1.0, 10.0, math.inf]


def told(value: float | None, *, start: float = 0.0, cut: bool = False, name: str = "a_total") -> Exposition:
    rows = [] if value is None else [line(name, value)]
    found = Reader({name, PROCESS_START}).read(body(*rows, line(PROCESS_START, start)))
    found.cut = cut
    return found


def grown(counters: Counters, said: Exposition) -> float:
    return sum(counters.take(said).get("a_total", {}).values())


@settings(max_examples=120, deadline=None)
@given(st.lists(st.floats(1e-4, 50), min_size=1, max_size=60), st.floats(0.01, 0.99), st.lists(st.sampled_from(BOUNDS)))
def test_the_true_quantile_lies_within_the_bounds(seen, share, some):
    bounds = sorted({*some, math.inf})
    found = quantile([(bound, float(sum(x <= bound for x in seen))) for bound in bounds], share)
    truth = float(np.quantile(seen, share, method="inverted_cdf"))
    assert found.low <= truth and (found.high is None or truth <= found.high)
    assert found.low <= found.value and (found.high is None or found.value <= found.high)
    if found.high is None:
        assert found.value == found.low == (bounds[-2] if len(bounds) > 1 else 0.0)


def test_a_quantile_is_interpolated_in_its_bucket():
    buckets = [(0.5, 0.0), (0.75, 1.0), (1.0, 16.0), (2.5, 24.0), (math.inf, 24.0)]
    assert quantile(buckets, 0.5) == (0.75 + 0.25 * 11 / 15, 0.75, 1.0)
    assert quantile(buckets, 0.95) == pytest.approx((1.0 + 1.5 * 6.8 / 8, 1.0, 2.5))


def test_nothing_observed_has_no_quantile():
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5) is None


@settings(max_examples=80, deadline=None)
@given(st.lists(st.none() | st.floats(0, 1e6), min_size=2, max_size=12))
def test_growth_is_never_negative(values):
    counters = Counters({"a_total"})
    counters.take(told(values[0]))
    for value in values[1:]:
        assert grown(counters, told(value)) >= 0


def test_a_counter_that_fell_was_started_anew():
    counters = Counters({"a_total"})
    assert counters.take(told(100)) is None
    assert (grown(counters, told(130)), counters.restarts) == (30, 0)
    assert (grown(counters, told(8)), counters.restarts) == (8, 1)
    assert (grown(counters, told(9)), counters.restarts) == (1, 1)


def test_a_new_process_that_is_already_further_is_noticed_by_its_start():
    counters = Counters({"a_total"})
    counters.take(told(100, start=50))
    assert (grown(counters, told(300, start=70)), counters.restarts) == (300, 1)


def test_a_changed_birth_of_a_counter_is_a_restart():
    counters, reader = Counters({"a_total"}), Reader({"a_total"})
    counters.take(reader.read(body(line("a_total", 5), line("a_created", 1.5e9))))
    found = counters.take(reader.read(body(line("a_total", 7), line("a_created", 1.6e9))))
    assert sum(found["a_total"].values()) == 7 and counters.restarts == 1


def test_servers_that_answer_in_turn_are_no_restarts_and_no_growth():
    """A load balancer: each scrape comes from another replica."""
    counters = Counters({"a_total"})
    counters.take(told(1000, start=50))
    counters.take(told(5, start=70))
    for scrape in range(4):
        assert grown(counters, told(1000 + scrape, start=50)) == 0
        assert grown(counters, told(5 + scrape, start=70)) == 0
    assert counters.restarts == 1 and counters.turns == 8


def test_a_series_that_is_missing_for_a_while_loses_nothing():
    counters = Counters({"a_total"})
    counters.take(told(100))
    assert grown(counters, told(None)) == 0
    assert grown(counters, told(150)) == 50 and counters.restarts == 0


def test_a_series_that_is_new_began_at_zero_unless_the_text_was_cut():
    counters = Counters({"a_total"})
    counters.take(told(None))
    assert grown(counters, told(40)) == 40
    cut = Counters({"a_total"})
    cut.take(told(None, cut=True))
    assert grown(cut, told(4_000_000)) == 0


def test_labels_that_never_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(windows, "MAX_SERIES", 50)
    counters, reader = Counters({"a_total"}), Reader({"a_total"})
    for scrape in range(40):
        counters.take(reader.read(body(line("a_total", n, request=f"{scrape}-{n}") for n in range(20))))
    assert len(counters._last["a_total"]) <= 120


def test_a_span_forgets_what_is_older():
    recent = Recent(10.0)
    recent.add(0.0, 5.0, {1.0: 1, math.inf: 4})
    recent.add(5.0, 9.0, {1.0: 2, 2.0: 3, math.inf: 3})
    assert recent.buckets() == [(1.0, 3), (math.inf, 7)]  # only bounds that both have
    recent.add(9.0, 14.0, {1.0: 0, math.inf: 0})
    assert recent.buckets() == [(1.0, 2), (2.0, 3), (math.inf, 3)]
