"""A sweep from its settings to its tables, against a server without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend.experiments import ExperimentError, Partial, Progress, Result
from backend.experiments.load import Settings, sweep
from backend.workload.arrivals import LoadError
from backend.workload.target import find
from tests.sources.fake_engine import Serving
from tests.workload.talker import Talker

QUICK = dict(requests=30, min_s=0, input_tokens=20, output_tokens=4, drain_s=10)


@pytest.fixture
def served() -> Iterator[tuple[Talker, str]]:
    talker = Talker()
    talker.token_s = 0.002
    with Serving(talker) as url:
        yield talker, url


def follow(experiment, during=lambda report: None) -> tuple[Result, list[Progress], list[Result]]:
    progress, partial = [], []
    while True:
        try:
            report = next(experiment)
        except StopIteration as end:
            return end.value, progress, partial
        during(report)
        if isinstance(report, Partial):
            partial.append(report.result)
        else:
            progress.append(report)


def test_a_sweep_brings_a_row_a_rate_and_all_that_the_pictures_need(served):
    talker, url = served
    result, progress, partial = follow(sweep(find(url), Settings(rates=(60, 30), **QUICK)))
    assert result.complete and list(result.table["offered_rate_per_s"]) == [30, 60]
    assert list(result.table["ok"]) == [30, 30] and len(partial) >= 2  # more on a slow machine
    assert [p.share for p in progress] == sorted(p.share for p in progress) and progress[-1].left_s < 1
    requests = result.tables["requests"]
    assert len(requests) == 60 and len(result.tables["gaps"]) == 60 * 3
    assert set(result.tables["queue"]["offered_rate_per_s"]) == {30, 60}
    p50 = requests[requests["offered_rate_per_s"] == 30]["ttft_s"].quantile(0.5)
    assert result.table["ttft_p50_s"].iloc[0] == pytest.approx(p50)
    asked = [body["prompt"] for body in talker.bodies[-60:]]
    assert len(set(asked)) == len(asked)  # no prompt twice: a prefix cache would answer for the engine
    assert result.machine["model"] == "talker" and result.settings["requests"] == 30
    assert any("numpy's default" in note for note in result.notes)


def test_closing_it_ends_the_load_and_what_was_kept_stays(served):
    _, url = served
    running = sweep(find(url), Settings(rates=(50,), **QUICK | {"requests": 5000}))
    kept = next(report for report in running if isinstance(report, Partial)).result
    running.close()
    assert not kept.complete and 20 < kept.table["ok"].iloc[0] < 5000


def test_a_server_that_refuses_ends_the_sweep_with_the_reason(served):
    talker, url = served
    target = find(url)
    talker.status = 429
    result, _, _ = follow(sweep(target, Settings(rates=(200, 400), **QUICK | {"requests": 2000})))
    assert len(result.table) == 1 and result.table["verdict"].iloc[0] == "over-saturated"
    assert result.notes[0].startswith("Ended at 200 requests/s: the server refuses: 429 for 50 of the last 50 requests")
    assert "says no with 429" in result.notes[0] and "Not run: 400 requests/s" in result.notes[0]
    assert result.table["ttft_p99_s"].iloc[0] is None


def test_a_server_that_dies_mid_sweep_leaves_what_was_measured():
    serving = Serving(Talker())
    url = serving.__enter__()

    def end(report) -> None:
        if isinstance(report, Partial) and serving._thread.is_alive():
            serving.__exit__()

    result, _, _ = follow(sweep(find(url), Settings(rates=(60, 70, 80), **QUICK)), end)
    assert list(result.table["verdict"])[1:] == ["failing"] and result.table["ok"].iloc[0] == 30
    assert "no connection" in result.notes[0] and "Not run: 80" in result.notes[0]


def test_too_much_is_seen_while_it_runs_and_the_rate_is_ended_early(served):
    talker, url = served
    target = find(url)
    talker.gate.clear()

    def let_one_go(report) -> None:  # a server that answers a few and no more
        if isinstance(report, Progress) and report.done > 0.15 and not talker.gate.is_set() and len(talker.came) < 40:
            talker.gate.set()
        elif len(talker.came) > 40:
            talker.gate.clear()

    planned = 440  # many more than are needed: on a busy machine it is seen late
    settings = Settings(rates=(40,), **QUICK | {"requests": planned})
    result, _, _ = follow(sweep(target, settings), let_one_go)
    row = result.table.iloc[0]
    assert row["verdict"] == "over-saturated" and row["little"] == "unstable" and row["cut"] > 0
    assert row["requests"] < planned and "over-saturated: in flight grew" in result.notes[0]


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(rates=(0.0,)), "requests/s"),
        (dict(rates=()), "0 rates"),
        (dict(rates=range(1, 40)), "39 rates"),
        (dict(requests=1), "at least 10"),
        (dict(requests=10**7), "10,000,000 requests"),
        (dict(min_s=float("nan")), "s at each rate"),
        (dict(input_tokens=999, output_tokens=999), "takes 1,000"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_sent(served, settings, words):
    talker, url = served
    target = find(url)
    before = len(talker.bodies)
    with pytest.raises(ExperimentError, match=words):
        next(sweep(target, Settings(**settings)))
    assert len(talker.bodies) == before


def test_the_same_seed_plans_the_same_load():
    assert Settings(seed=4).runs() == Settings(seed=4).runs() != Settings(seed=5).runs()
    assert len(Settings(rates=(1, 10), requests=20, min_s=30).runs()[1][1]) == 300
    with pytest.raises(LoadError):
        Settings(rates=(-1,)).runs()
