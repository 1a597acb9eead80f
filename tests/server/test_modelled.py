"""The server on an engine that is modelled: the same API, roofs from the data sheet, words for what cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from backend.experiments.sweep import Settings, sweep
from backend.models.plain import PlainTokenizer
from backend.server.serve import Wanted
from backend.sources.background import Background
from backend.sources.remote import EngineClient
from tests.server.conftest import eventually, serving


@pytest.fixture(autouse=True)
def plain_words(monkeypatch):
    monkeypatch.setattr("backend.models.loader.any_tokenizer", lambda say: PlainTokenizer(32_000))


def modelled(model: str, **more):
    wanted = Wanted(model=model, on="h100-sxm", modelled=more)
    return serving(SimpleNamespace(boot=wanted.boot, release=lambda: None))


def test_it_serves_like_any_engine_and_says_what_it_is():
    with modelled("llama-3-70b", tp=8, speed=100) as served, httpx.Client(base_url=served.url, timeout=20) as http:
        served.wait_ready()
        said = http.post("/v1/completions", json={"prompt": "ba be bi", "max_tokens": 12}).json()
        assert said["usage"]["completion_tokens"] == 12
        state = http.get("/engine/state").json()
        assert state["model"]["weights"] == "modelled"
        assert state["device"]["name"].startswith("8 × NVIDIA H100")
        eventually(lambda: http.get("/engine/state").json()["counters"]["steps"] == 12)
        roofs = http.get("/engine/ceilings").json()
        assert roofs["read"]["evidence"] == roofs["matmul"]["evidence"] == "data sheet"
        assert roofs["read"]["value"] == pytest.approx(8 * 3.35e12, rel=0.01)
        refused = http.post("/engine/ceilings", json={"fresh": True})
        assert refused.status_code == 409 and "data sheet" in refused.json()["error"]["message"]


def test_results_of_an_experiment_say_that_they_are_modelled():
    with modelled("llama-3-8b", speed=100) as served:
        served.wait_ready()
        background = Background()
        client = EngineClient(lambda: served.url, background)
        try:
            experiment = sweep(client, Settings(batches=(1, 8), contexts=(64,), steps=3))
            while True:
                try:
                    next(experiment)
                except StopIteration as end:
                    result = end.value
                    break
        finally:
            client.close()
            background.close()
    assert "Modelled" in result.modelled and "100 times as fast" in result.modelled
    assert {number.evidence for number in result.numbers} == {"modelled"}
    assert any("the data sheet's read bandwidth" in note for note in result.notes)
    assert (result.table["step (ms)"] >= result.table["lower bound (ms)"]).all()


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("llama-3-70b", {"tp": 1}, "does not fit"),
        ("llama-99", {}, "no model 'llama-99'"),
    ],
)
def test_what_cannot_be_played_is_refused_in_words(model, more, words):
    with modelled(model, **more) as served, httpx.Client(base_url=served.url, timeout=20) as http:
        eventually(lambda: "loading" not in http.get("/health").text)
        answer = http.get("/health")
        assert answer.status_code == 503
        assert any(word in answer.text for word in words.split("|"))
