"""Clients that leave, engines that fail, queues that fill: nobody waits for ever and nothing is left behind."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest

from tests.server.conftest import eventually, serving
from tests.server.scripted import Bird

LONG = {"prompt": "tell me a long story ", "max_tokens": 480}
SLOW_S = 0.02  # a step; a long story takes ten seconds then


def send(port: int, body: dict, path: str = "/v1/completions") -> socket.socket:
    """A raw request on a connection of its own."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 3}, {"prompt": ["a", "b"], "stream": True}])
def test_a_client_that_leaves_frees_its_blocks(parrot, http, more):
    parrot.bird.runner.step_s = SLOW_S
    parrot.bird.runner.gate.clear()  # the first step is held until the client is gone
    connection = send(parrot.port, LONG | more)
    expected = more.get("n", 1) * len(more.get("prompt", [""]))
    eventually(lambda: parrot.running == expected, "the requests are in the engine")
    connection.close()
    parrot.bird.runner.gate.set()
    eventually(parrot.idle, "the engine forgot them")
    ends = parrot.host.hub.read(lambda state: [state.requests[n].reason for n in state.ended[-expected:]])
    assert ends == ["abort"] * expected


def test_a_client_that_leaves_in_the_middle_of_a_stream(parrot, http):
    parrot.bird.runner.step_s = SLOW_S
    aborted = parrot.host.hub.read(lambda state: state.totals.aborted)
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "user": "leaver"}) as answer:
        next(answer.iter_lines())
    eventually(parrot.idle)
    assert parrot.host.hub.read(lambda state: state.totals.aborted) == aborted + 1


def test_first_words_come_while_the_rest_is_not_yet_said(parrot, http):
    """No buffering: what one step says is with the client before the next step runs."""
    parrot.bird.runner.gate.clear()
    allowed = threading.Semaphore(0)
    parrot.bird.runner.gate = _Turnstile(allowed)
    try:
        with http.stream("POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 3, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            for word in "abc":
                allowed.release()
                assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == word
    finally:
        parrot.bird.runner.gate = threading.Event()
        allowed.release(100)
        parrot.bird.runner.gate.set()


class _Turnstile:
    """Lets one step through for each permission."""

    def __init__(self, allowed: threading.Semaphore):
        self._allowed = allowed

    def wait(self, timeout: float) -> None:
        self._allowed.acquire(timeout=timeout)

    def set(self) -> None:
        self._allowed.release(1000)


def test_a_step_that_fails_is_told_and_the_engine_goes_on(parrot, http):
    parrot.bird.runner.fail = "out of luck"
    answer = http.post("/v1/completions", json=LONG)
    assert answer.status_code == 500
    assert "out of luck" in answer.json()["error"]["message"]
    parrot.bird.runner.fail = "out of luck again"
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True})
    frames = answer.text.split("\n\n")
    assert answer.status_code == 200
    assert frames[-2:] == ["data: [DONE]", ""]
    assert "out of luck again" in json.loads(frames[-3].removeprefix("data: "))["error"]["message"]
    assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}).status_code == 200
    assert http.get("/health").status_code == 200


def test_abort_by_id(parrot, http):
    parrot.bird.runner.step_s = SLOW_S
    found = {}

    def ask() -> None:
        found["answer"] = httpx.post(
            f"{parrot.url}/v1/completions", json=LONG, headers={"X-Request-Id": "stop-me"}, timeout=20
        )

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: parrot.running == 1)
    assert http.post("/engine/abort/cmpl-stop-me").json() == {"aborted": 1}
    thread.join(20)
    assert found["answer"].json()["choices"][0]["finish_reason"] == "abort"
    assert http.post("/engine/abort/cmpl-stop-me").json() == {"aborted": 0}


@pytest.fixture
def crowded():
    """One request runs, slowly, and three may wait."""
    with serving(Bird(max_waiting=3, max_running=1)) as served:
        served.wait_ready().bird.runner.step_s = SLOW_S
        first = send(served.port, LONG)
        eventually(lambda: served.host.hub.read(lambda state: state.running), "the first runs")
        yield served
        first.close()
        served.bird.runner.step_s = 0
        eventually(served.idle, "nothing is left of what was refused")


def test_a_full_queue_says_when_to_come_back(crowded):
    waiting = [send(crowded.port, LONG) for _ in range(3)]
    eventually(lambda: crowded.running == 4)
    answer = httpx.post(f"{crowded.url}/v1/completions", json={"prompt": "x"}, timeout=20)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "queue_full"
    too_many = httpx.post(f"{crowded.url}/v1/completions", json={"prompt": ["x"] * 4}, timeout=20)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "prompt")
    for connection in waiting:
        connection.close()


def test_several_prompts_are_all_queued_or_none(crowded):
    second = send(crowded.port, LONG | {"prompt": ["a", "b"]})
    eventually(lambda: crowded.running == 3)
    answer = httpx.post(f"{crowded.url}/v1/completions", json={"prompt": ["c", "d"]}, timeout=20)
    assert answer.status_code == 429
    eventually(
        lambda: crowded.host.hub.read(lambda state: state.totals.aborted) == 1, "the one with a place left again"
    )
    assert crowded.running == 3
    second.close()


def test_the_server_ends_at_once_with_open_streams():
    with serving(Bird(max_model_len=4096, num_blocks=2048)) as served:
        served.wait_ready()
        endless = {"prompt": "x" * 1000, "max_tokens": 3000, "stream": True}
        answers = []

        def read() -> None:
            with httpx.stream("POST", f"{served.url}/v1/completions", json=endless, timeout=20) as answer:
                answers.append(answer.read().decode())

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        follower = httpx.stream("GET", f"{served.url}/engine/events?follow=1", timeout=20)
        lines = follower.__enter__().iter_lines()
        next(lines)
        eventually(lambda: served.running == 3)
        begin = time.monotonic()
        served.stop()
        assert time.monotonic() - begin < 3
        for reader in readers:
            reader.join(20)
        assert len(answers) == 3
        for text in answers:
            frames = text.split("\n\n")
            assert frames[-2] == "data: [DONE]"
            assert "shutting down" in frames[-3]
        assert list(lines)  # ended properly, not broken off
        follower.__exit__(None, None, None)


def test_a_dead_engine_is_said_everywhere(monkeypatch):
    with serving(Bird()) as served, httpx.Client(base_url=served.wait_ready().url, timeout=20) as http:
        served.bird.runner.gate.clear()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=LONG)))
        thread.start()
        eventually(lambda: served.running == 1)
        monkeypatch.setattr(served.bird.loop.engine.pool, "check", lambda _: 1 / 0)
        served.bird.runner.gate.set()
        thread.join(20)
        eventually(lambda: http.get("/health").status_code == 503)
        assert "ZeroDivisionError" in http.get("/health").json()["error"]["message"]
        for answer in (http.get("/v1/models"), http.post("/v1/completions", json=LONG), http.get("/engine/state")):
            assert answer.status_code == 503
        assert '"fatal":true' in http.get("/engine/events?since=0").text
        assert http.get("/metrics").status_code == 200
