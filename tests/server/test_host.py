"""Loading, ready, failed: what the server answers in each."""

from __future__ import annotations

import httpx

from backend.models.errors import ModelError
from tests.server.conftest import eventually, serving
from tests.server.scripted import Bird


def reason(url: str) -> str:
    answer = httpx.get(f"{url}/health")
    assert answer.status_code == 503
    return answer.json()["error"]["message"]


def test_while_it_loads_it_says_how_far_it_is():
    bird = Bird()
    bird.boot_gate.clear()
    with serving(bird) as served:
        eventually(lambda: reason(served.url) == "loading the model: fetching the parrot")
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("GET", "/engine/events"),
            ("GET", "/nope"),
        ):
            answer = httpx.request(method, served.url + path)
            assert answer.status_code == (404 if path == "/nope" else 503)
            if path != "/nope":
                assert answer.headers["retry-after"] == "1"
        assert httpx.get(f"{served.url}/version").status_code == 200
        bird.boot_gate.set()
        served.wait_ready()


def test_a_model_that_cannot_be_loaded_leaves_a_reason():
    bird = Bird()
    bird.boot_error = ModelError("no parrot here: look in the forest")
    with serving(bird) as served:
        eventually(lambda: reason(served.url) == "no parrot here: look in the forest")
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no parrot here: look in the forest")


def test_any_other_accident_leaves_a_reason_too():
    bird = Bird()
    bird.boot_error = KeyError()
    with serving(bird) as served:
        eventually(lambda: reason(served.url) == "KeyError")


def test_the_server_ends_while_the_model_loads():
    bird = Bird()
    bird.boot_gate.clear()
    with serving(bird) as served:
        served.stop()
