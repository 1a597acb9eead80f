"""Experiments on an engine over HTTP whose model is a list of words: the schedule is the real one, times are not."""

import asyncio
import contextlib
import random
import threading

import pytest

from backend.engine.config import EngineConfig
from backend.experiments import ExperimentError, Partial, Progress
from backend.experiments.bench import Ask, Bench
from backend.experiments.chunked import Settings as ChunkedSettings
from backend.experiments.chunked import chunked
from backend.experiments.job import Busy, Lab
from backend.experiments.race import Settings as RaceSettings
from backend.experiments.race import race
from backend.experiments.races import computations
from backend.experiments.sweep import Settings as SweepSettings
from backend.experiments.sweep import knee, sweep
from backend.experiments.waves import POLICIES, draw, planned, predicted_gain, waves
from backend.experiments.waves import Settings as WavesSettings
from backend.server.app import create_app
from backend.server.host import EngineHost
from backend.server.listen import bind
from backend.server.serve import Server
from backend.sources.background import Background
from backend.sources.remote import EngineClient
from tests.browser.stub_server import boot
from tests.waiting import eventually


@contextlib.contextmanager
def serving():
    """(an engine's server in a thread, a client of it)"""
    socket = bind("127.0.0.1", 0)
    host = EngineHost(lambda emit, say: boot(emit, say, config=CONFIG, step_s=0.002), sensors=False)
    server = Server(create_app(host))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([socket])), daemon=True)
    thread.start()
    background = Background()
    client = EngineClient(lambda: f"http://127.0.0.1:{socket.getsockname()[1]}", background)
    eventually(lambda: client.health() == "", "the engine is ready")
    yield server, client
    background.close()
    client.close()
    server.end()
    thread.join(10)


@pytest.fixture(scope="module")
def client():
    with serving() as (_, client):
        yield client


CONFIG = EngineConfig(num_blocks=256, max_model_len=4096, chunk_size=128)


def finish(experiment):
    """(result, all that was reported)"""
    reports = []
    while True:
        try:
            reports.append(next(experiment))
        except StopIteration as end:
            return end.value, reports


def switches(client):
    return client.state()["config"]


def test_the_batch_sweep_measures_each_point_and_puts_the_engine_back(client):
    before = switches(client)
    result, reports = finish(
        sweep(client, SweepSettings(batches=(1, 3, 24), contexts=(32, 64), steps=5, measure_roof=False))
    )
    table = result.table
    assert list(zip(table["prompt (tokens)"], table["batch"], strict=True)) == [
        (c, b) for c in (32, 64) for b in (1, 3, 24)
    ]
    assert (table["steps"] == 5).all()
    for _, rows in table.groupby("prompt (tokens)"):  # in each step measured the whole batch decoded, and nothing else
        per_request = rows["FLOPs a step"] / rows["batch"]
        assert per_request.tolist() == pytest.approx([per_request.iloc[0]] * 3, rel=0.01)
    assert (table["p10 step (ms)"] <= table["step (ms)"]).all()
    assert table["tok/s"].tolist() == pytest.approx((table["batch"] / table["step (ms)"] * 1e3).tolist())
    assert result.notes[0].startswith("Batches at 32 tokens of context: knee at 24; KV memory")
    assert any(isinstance(r, Progress) and r.left_s for r in reports)
    assert [len(r.result.table) for r in reports if isinstance(r, Partial)] == [1, 2, 3, 4, 5, 6]
    assert switches(client) == before


def test_knee():
    assert knee([(1, 10), (2, 20), (4, 38), (8, 50), (16, 51)]) == 4
    assert knee([(1, 10), (2, 20), (4, 40)]) == 4
    assert knee([(1, 10)]) is None


def test_waves_follow_the_plan_step_by_step(client):
    settings = WavesSettings(kind="exponential", requests=40, slots=8, scale=80, prompt_tokens=4)
    result, _ = finish(waves(client, settings))
    lengths = draw(settings)
    for policy, steps in zip(result.table["policy"], result.table["steps"], strict=True):
        assert steps == len(planned(policy, lengths, 8))
    requests = result.tables["requests"]
    assert len(requests) == 2 * 40
    for policy in POLICIES:  # nobody sits on another's slot
        for _, slot in requests[requests["policy"] == policy].groupby("slot"):
            rows = slot.sort_values("enters (s)")
            assert (rows["ends (s)"].shift()[1:] <= rows["enters (s)"][1:] + 1e-9).all()
    by_name = {number.name: number.value for number in result.numbers}
    assert by_name["continuous gains, in steps"] == pytest.approx(by_name["this trace, planned"])


@pytest.mark.parametrize("kind", ["exponential", "bimodal"])
def test_the_planned_gain_is_the_predicted_one(kind):
    settings = WavesSettings(kind=kind, requests=128, slots=8)
    static, continuous = (len(planned(policy, draw(settings), 8)) for policy in POLICIES)
    assert static / continuous == pytest.approx(predicted_gain(kind, 8), rel=0.15)


def test_predicted_gains():
    assert predicted_gain("exponential", 32) == pytest.approx(4.06, abs=0.01)
    assert predicted_gain("exponential", 8) == pytest.approx(2.72, abs=0.01)
    assert predicted_gain("uniform", 32) == pytest.approx(1.89, abs=0.01)
    lots = random.Random(1)
    drawn = [lots.choice((20, 800)) for _ in range(4000)]
    assert predicted_gain("uploaded", 8, drawn) == pytest.approx(predicted_gain("bimodal", 8), rel=0.05)


def test_a_prompt_in_chunks_disturbs_more_steps_by_less(client):
    settings = ChunkedSettings(chunks=(0, 64), decoders=3, prompt_tokens=256)
    result, _ = finish(chunked(client, settings))
    assert result.table["steps with prompt tokens"].tolist() == [1, 4]
    tokens = result.tables["tokens"]
    assert tokens.groupby("prefill")["prompt tokens in the step"].max().tolist() == [64, 256]
    again, _ = finish(chunked(client, settings))
    column = "prompt tokens in the step"
    assert again.tables["tokens"][column].tolist() == tokens[column].tolist()


def test_the_cache_race_ends_on_the_exact_counts(client):
    result, _ = finish(race(client, RaceSettings("cache")))
    assert result.table["tokens computed"].tolist() == result.table["tokens computed, expected"].tolist() == [7770, 159]
    assert computations(100, 1000) == (599_500, 1_099)


def test_the_memory_race_wastes_what_the_formula_says(client):
    result, _ = finish(race(client, RaceSettings("memory")))
    rows = result.table.set_index("lane")
    assert 60 <= rows.loc["reserve", "wasted at a request's end (%)"] <= 80
    assert rows.loc["paged", "wasted over the run (%)"] < 4
    assert rows.loc["first fit", "largest hole ÷ free, mean"] < 1
    assert rows["most at once"].is_monotonic_increasing


def test_swap_computes_nothing_twice(client):
    result, _ = finish(race(client, RaceSettings("preemption")))
    rows = result.table.set_index("lane")
    assert rows.loc["recompute", "recomputed tokens"] > 0 == rows.loc["swap", "recomputed tokens"]
    assert rows.loc["swap", "tokens computed"] == 8 * (96 + 64 - 1)
    assert rows.loc["recompute", "tokens computed"] == 8 * (96 + 64 - 1) + rows.loc["recompute", "recomputed tokens"]
    assert rows.loc["swap", "swapped (MB)"] > 0


def test_the_prefix_race_skips_whole_blocks_of_the_shared_prompt(client):
    result, _ = finish(race(client, RaceSettings("prefix")))
    rows = result.table.set_index("lane")
    assert rows.loc["off", "found in the cache"] == 0
    assert rows.loc["on", "found in the cache"] == 4 * (375 // 16 * 16)


def test_stopping_keeps_what_there_is_and_puts_the_engine_back(client):
    before, lab = switches(client), Lab()
    job = lab.start(
        "sweep", sweep(client, SweepSettings(batches=(1, 2, 4), contexts=(32,), steps=400, measure_roof=False))
    )
    with pytest.raises(Busy, match="'sweep' is running"):
        lab.start("race", race(client, RaceSettings("cache")))
    eventually(lambda: job.result is not None, "a first point")
    job.stop()
    assert job.wait(10) and job.state == "stopped"
    assert 1 <= len(job.result.table) < 3 and not job.result.complete
    assert switches(client) == before and not client.state()["requests"]
    assert lab.running is None and lab.last("sweep") is job


def test_a_busy_engine_is_left_alone(client):
    with Bench(client, {}) as bench:
        bench.send([Ask([1, 2, 3], 2000)])
        eventually(lambda: client.state()["requests"], "the request is there")
        job = Lab().start("race", race(client, RaceSettings("cache")))
        assert job.wait(10) and job.state == "failed" and "at work on 1 requests" in job.error


def test_what_was_measured_is_kept_when_the_engine_dies():
    with serving() as (server, client):
        settings = SweepSettings(batches=(1, 2, 4), contexts=(32,), steps=400, measure_roof=False)
        job = Lab().start("sweep", sweep(client, settings))
        eventually(lambda: job.result is not None, "a first point")
        server.end()
        assert job.wait(20) and job.state == "failed" and job.error
        assert 1 <= len(job.result.table) < 3 and not job.result.complete


@pytest.mark.parametrize(
    "experiment, settings, words",
    [
        (sweep, SweepSettings(batches=(0,)), "between 1 and 256"),
        (sweep, SweepSettings(batches=(100_000,)), "between 1 and 256"),
        (sweep, SweepSettings(batches=(256,), contexts=(100_000,), measure_roof=False), "num_blocks|max_model_len"),
        (waves, WavesSettings(kind="uploaded"), "no lengths"),
        (waves, WavesSettings(kind="uploaded", lengths=(5, -1)), "1 to 100,000"),
        (waves, WavesSettings(scale=float("nan")), "above 0"),
        (chunked, ChunkedSettings(decoders=0), "between 1 and 256"),
        (waves, WavesSettings(kind="nothing"), "no lengths 'nothing'"),
        (race, RaceSettings("nothing"), "no race"),
        (race, RaceSettings("cache", "huge"), "no size 'huge'"),
    ],
)
def test_what_cannot_be_is_said_in_words(client, experiment, settings, words):
    before = switches(client)
    with pytest.raises(ExperimentError, match=words):
        finish(experiment(client, settings))
    assert switches(client) == before


def test_an_engine_that_is_not_there():
    background = Background()
    client = EngineClient(lambda: "http://127.0.0.1:9", background)
    with pytest.raises(ExperimentError, match="cannot reach the engine"):
        finish(race(client, RaceSettings("cache")))
    background.close()
