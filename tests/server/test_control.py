"""State, events, switches: what the dashboard lives on."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from backend import events, fold
from tests.server.conftest import eventually, serving
from tests.server.scripted import Bird

SLOW_S = 0.02


@pytest.fixture
def own():
    """A server of one's own, for what changes it."""
    with serving(Bird()) as served, httpx.Client(base_url=served.wait_ready().url, timeout=20) as http:
        yield served, http


def test_state_shows_who_holds_what(parrot, http):
    parrot.bird.runner.step_s = SLOW_S
    with http.stream(
        "POST", "/v1/completions", json={"prompt": "x" * 20, "max_tokens": 400, "stream": True, "user": "ann"}
    ) as answer:
        lines = answer.iter_lines()  # kept: a dropped iterator closes the stream
        next(lines)
        state = httpx.get(f"{parrot.url}/engine/state").json()
    (request,) = state["requests"]
    assert request["prompt_tokens"] == 20
    assert request["state"] == "decode"
    assert request["id"].startswith("cmpl-")
    assert request["computed_tokens"] == 19 + request["output_tokens"]
    assert len(request["blocks"]) == -(-request["computed_tokens"] // 4) == state["blocks"]["used"]
    assert state["blocks"]["total"] == 128
    assert state["config"]["block_size"] == 4
    assert state["model"]["name"] == "parrot"
    assert "device" in state


def test_a_past_is_told_in_lines_and_a_late_comer_gets_a_snapshot(own):
    served, http = own
    http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
    eventually(served.idle)
    answer = http.get("/engine/events", params={"since": 0})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = answer.text.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == list(range(1, len(lines) + 1))
    told = fold.State()
    for line in lines:
        fold.apply(told, events.decode(line))
    assert told.totals.output_tokens == 4
    assert told.in_flight == 0
    first = events.decode(http.get("/engine/events").text.splitlines()[0])
    assert isinstance(first, events.Snapshot)
    late = fold.State()
    fold.apply(late, first)
    assert late == told
    assert http.get("/engine/events", params={"since": len(lines)}).text == ""
    assert '"snapshot"' in http.get("/engine/events", params={"since": 10**9}).text.splitlines()[0]
    assert '"snapshot"' in http.get("/engine/events", params={"since": 1, "epoch": "another"}).text.splitlines()[0]


def test_a_follower_hears_what_happens_as_it_happens(own):
    served, _http = own
    heard: list[events.Event] = []
    with httpx.stream("GET", f"{served.url}/engine/events?follow=1", timeout=20) as answer:
        lines = answer.iter_lines()
        heard.append(events.decode(next(lines)))
        assert isinstance(heard[0], events.Snapshot)
        threading.Thread(
            target=lambda: httpx.post(f"{served.url}/v1/completions", json={"prompt": "hey", "max_tokens": 3})
        ).start()
        while not isinstance(heard[-1], events.Finished):
            heard.append(events.decode(next(lines)))
    state = fold.State()
    for event in heard:
        fold.apply(state, event)
    assert state.gaps == 0
    assert state.totals.output_tokens == 3
    assert {type(event) for event in heard} >= {events.Queued, events.Prompt, events.Step, events.Tokens}


@pytest.mark.parametrize(
    ("query", "field"), [("since=x", "since"), ("since=-1", "since"), ("since=1&follow=maybe", "follow")]
)
def test_a_bad_query_is_named(http, query, field):
    answer = http.get(f"/engine/events?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_switches_change_the_idle_engine(own):
    _served, http = own
    answer = http.patch("/engine/config", json={"block_size": 8, "num_blocks": 32, "policy": "static"})
    assert answer.status_code == 200
    assert (answer.json()["block_size"], answer.json()["num_blocks"], answer.json()["policy"]) == (8, 32, "static")
    assert http.get("/engine/state").json()["blocks"] == {
        "total": 32,
        "block_size": 8,
        "used": 0,
        "cached": 0,
        "free": 32,
        "largest_hole": 32,
    }
    assert http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3}).json()["choices"][0]["text"] == "aba"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "big"}, "block_size"),
        ({"policy": "dynamic"}, "policy"),
        ({"chunk_size": 16, "prefix_cache": 1}, "prefix_cache"),
        ({"token_budget": 1}, "token_budget"),
        ({"max_model_len": 513}, "max_model_len"),
        ({"num_blocks": 10**12}, "num_blocks"),
        ({"num_blocks": 20_000}, "num_blocks"),  # fewer than too many, but more than the bird's megabyte holds
    ],
)
def test_a_switch_that_cannot_be_is_422(http, changes, field):
    before = http.get("/engine/state").json()["config"]
    answer = http.patch("/engine/config", json=changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, field)
    assert field in answer.json()["error"]["message"]
    assert http.get("/engine/state").json()["config"] == before


def test_a_busy_engine_keeps_its_pool(parrot, http):
    parrot.bird.runner.step_s = SLOW_S
    with http.stream("POST", "/v1/completions", json={"prompt": "busy", "max_tokens": 400, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: a dropped iterator closes the stream
        next(lines)
        for refused in (
            httpx.patch(f"{parrot.url}/engine/config", json={"block_size": 8}),
            httpx.post(f"{parrot.url}/engine/reset"),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_idle")
        assert (
            httpx.patch(f"{parrot.url}/engine/config", json={"chunk_size": 64}).status_code == 200
        )  # needs no idle engine
    httpx.patch(f"{parrot.url}/engine/config", json={"chunk_size": 512})


def test_reset_empties_the_prefix_cache(own):
    _served, http = own
    body = {"prompt": "a prompt of a few blocks", "max_tokens": 1}

    def cached() -> int:
        return http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached() > 0) == (0, True)
    assert http.post("/engine/reset").status_code == 200
    assert http.get("/engine/state").json()["blocks"]["cached"] == 0
    assert cached() == 0


def test_aborting_what_is_not_there_is_fine(http):
    for name in ("cmpl-unknown", "a/b", "%00", "x" * 1000):
        assert http.post(f"/engine/abort/{name}").json() == {"aborted": 0}


def test_steps_are_held_and_go_on(own):
    served, http = own
    assert http.post("/engine/hold", json={"seconds": 30}).json() == {"steps": 0}
    sent = threading.Thread(target=lambda: http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}))
    sent.start()
    eventually(lambda: served.running == 1, "the request is there")
    assert http.post("/engine/hold", json={"seconds": 30}).json() == {"steps": 0}
    http.post("/engine/hold", json={"seconds": 0})
    sent.join(20)
    assert http.post("/engine/hold", json={"seconds": 0}).json()["steps"] == 2


@pytest.mark.parametrize("body", [{"seconds": 1000}, {"seconds": -1}, {}, {"seconds": 1, "forever": True}])
def test_a_hold_that_cannot_be_is_400(http, body):
    assert http.post("/engine/hold", json=body).status_code == 400
