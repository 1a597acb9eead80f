"""Two servers side by side, and a batch seen from outside, against servers without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import pytest

from backend.experiments import ExperimentError
from backend.experiments.client_sweep import client_sweep, together
from backend.experiments.compare import compare, ratio
from backend.experiments.load import Server, Settings
from backend.experiments.sweep import Settings as SweepSettings
from backend.workload.job import Answer
from tests.experiments.test_load_sweep import QUICK, follow
from tests.sources.fake_engine import Serving
from tests.workload.talker import Talker


@pytest.fixture(scope="module")
def two() -> Iterator[list[tuple[Talker, str]]]:
    quick, slow = Talker(), Talker()
    quick.token_s, slow.token_s = 0.002, 0.02
    with Serving(quick) as first, Serving(slow) as second:
        yield [(quick, first), (slow, second)]


def test_both_are_asked_the_same_and_stand_side_by_side(two):
    servers = [(name, Server(url)) for name, (_, url) in zip(("ours", "theirs"), two, strict=True)]
    for talker, _ in two:
        talker.bodies.clear()
    result, progress, partial = follow(compare(servers, Settings(rates=(40,), **QUICK)))
    assert list(result.table["source"]) == ["ours", "theirs"] and list(result.table["ok"]) == [30, 30]
    # Sorted: two that are sent at nearly the same time may arrive in either order.
    asked = [sorted(body["prompt"] for body in talker.bodies[-30:]) for talker, _ in two]
    assert asked[0] == asked[1] and len(set(asked[0])) == 30
    shares = [report.share for report in progress]
    assert shares == sorted(shares) and partial
    side = result.tables["ratio"].set_index("measure")
    tpot = side.loc["tpot_p50_s"]
    assert tpot["theirs ÷ ours"] == pytest.approx(tpot["theirs"] / tpot["ours"]) and tpot["theirs ÷ ours"] > 2
    assert result.complete and set(result.machine) == {"ours", "theirs"}


def test_the_one_that_cannot_be_reached_is_named(two):
    servers = [("ours", Server(two[0][1])), ("theirs", Server("http://127.0.0.1:9"))]
    with pytest.raises(ExperimentError, match=r"theirs: cannot reach http://127\.0\.0\.1:9"):
        follow(compare(servers, Settings(rates=(60,), **QUICK)))
    with pytest.raises(ExperimentError, match="one name"):
        follow(compare([("a", Server("http://x")), ("a", Server("http://y"))], Settings()))


def test_nothing_is_divided_that_is_not_there():
    row = {"offered_rate_per_s": 1.0, **dict.fromkeys(("achieved_rate_per_s", "output_tokens_per_s"), 2.0)}
    rest = {f"{name}_p{share}_s": None for name in ("ttft", "tpot", "e2e") for share in (50, 95)}
    table = pd.DataFrame([row | rest | {"source": "a"}, row | rest | {"source": "b"}])
    found = ratio(table).set_index("measure")["b ÷ a"]
    assert found["achieved_rate_per_s"] == 1 and pd.isna(found["ttft_p95_s"])
    assert ratio(table.iloc[:1]).empty


def test_a_batch_is_measured_from_outside(two):
    talker, url = two[1]
    settings = SweepSettings(batches=(1, 4), contexts=(16,), steps=8)
    result, _, _ = follow(client_sweep(Server(url), settings))
    assert list(result.table["batch"]) == [1, 4] and list(result.tables["marks"]["prompt (tokens)"]) == [16]
    # Each stream says a token every 20 ms, however many there are: never faster, whatever the machine does.
    assert (result.table["step (ms)"] >= 19).all()
    one, four = result.table["tok/s"]
    assert one <= 52 and four > 1.5 * one
    assert talker.bodies[-1]["ignore_eos"] and len({body["prompt"] for body in talker.bodies[-4:]}) == 4


def test_streams_that_never_overlap_are_no_batch():
    def answer(times: list[float]) -> Answer:
        return Answer(
            number=0, arrival_s=0, sent_s=0, end_s=times[-1] if times else 0, state="ok", times_s=times, wanted_input=1,
            wanted_output=2,
        )  # fmt: skip

    begin, end = together([answer([1.0, 2.0]), answer([3.0, 4.0])])
    assert end <= begin
    assert together([answer([1.0, 3.0]), answer([2.0, 4.0])]) == (2.0, 3.0)
    assert together([answer([1.0, 3.0]), answer([])]) == (0.0, 0.0)
