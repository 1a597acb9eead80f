"""The server on an engine that is modelled: the same API, roofs from the data sheet, words for what cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from backend.models.plain import PlainTokenizer
from backend.server.serve import Wanted
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


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("llama-3-70b", {"tp": 1}, "does not fit"),
        ("llama-99", {}, "no model 'llama-99'"),
        ("mamba", {}, "keeps no keys and values|no model"),
    ],
)
def test_what_cannot_be_played_is_refused_in_words(model, more, words):
    with modelled(model, **more) as served, httpx.Client(base_url=served.url, timeout=20) as http:
        eventually(lambda: "loading" not in http.get("/health").text)
        answer = http.get("/health")
        assert answer.status_code == 503
        assert any(word in answer.text for word in words.split("|"))
