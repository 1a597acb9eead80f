"""Whatever a client sends, it gets an answer in OpenAI's error shape that names the field, and the engine goes on."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.server import schema
from tests.server.conftest import eventually
from tests.server.scripted import VOCAB

DEEP = b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
USER = {"role": "user", "content": "x"}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, after checking its shape."""
    assert answer.headers["content-type"] == "application/json"
    (key,) = answer.json()
    error = answer.json()[key]
    assert key == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


def still_serves(http: httpx.Client) -> bool:
    answer = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3})
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == "aba"


# (fields on top of a good body, the field that the error names)
BOTH = [
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 100_000}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 1_000_000_000}, "n"),
    ({"n": "2"}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 7}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x", None]}, "stop[1]"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"user": 5}, "user"),
    ({"user": "u" * 1000}, "user"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": "high"}, "priority"),
    ({"model": 5}, "model"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ({"repetition_penalty": True}, "repetition_penalty"),
    ({"min_p": 0.1}, "min_p"),
    ({"logit_bias": {"50": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
]
COMPLETION = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": True}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt[1]"),
    ({"prompt": ["x", 1]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.0]}, "prompt[0]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [VOCAB]}, "prompt[0]"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"prompt": [[1, VOCAB]]}, "prompt[1]"),
    ({"prompt": [[[1]]]}, "prompt[0][0]"),
    ({"prompt": "x" * 512}, "prompt"),
    ({"prompt": "x" * 100_000}, "prompt"),
    ({"prompt": [1] * 100_000}, "prompt"),
    ({"prompt": ["x"] * 2000}, "prompt"),
    ({"prompt": ["x"] * 1000, "n": 128}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 1000}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "the end"}, "suffix"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"messages": [USER]}, "messages"),
]
CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600_000}]}, "messages"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"prompt": "x"}, "prompt"),
    ({"echo": True}, "echo"),
    ({"chat_template": "{{x}}"}, "chat_template"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
]
CASES = (
    [("/v1/completions", {"prompt": "x"} | case, field) for case, field in BOTH + COMPLETION]
    + [("/v1/chat/completions", {"messages": [USER]} | case, field) for case, field in BOTH + CHAT]
    + [
        ("/tokenize", case, field)
        for case, field in [({}, "prompt"), ({"prompt": 5}, "prompt"), ({"messages": []}, "messages")]
    ]
    + [
        ("/detokenize", case, field)
        for case, field in [({}, "tokens"), ({"tokens": [VOCAB]}, "tokens[0]"), ({"tokens": ["x"]}, "tokens[0]")]
    ]
)


@pytest.mark.parametrize(("path", "body", "field"), CASES, ids=lambda value: str(value)[:50])
def test_a_bad_field_is_named(http, path, body, field):
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == field
    assert field.partition("[")[0].partition(".")[0] in error["message"] or "prompt" in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"prompt=x",
        b"\xff\xfe{}",
        b'{"prompt": "\xff\xfe", "messages": "\xff", "tokens": "\xff"}',
        b'{"prompt": "\xed\xa0\x80", "messages": "\xed\xa0\x80", "tokens": "\xed\xa0\x80"}',
        rb'{"prompt": "\ud800", "messages": [{"role": "user", "content": "\ud800"}], "tokens": "\ud800"}',
        b'{"prompt": "x", "temperature": NaN, "messages": NaN, "tokens": NaN}',
        b'{"prompt": "x", "temperature": Infinity, "messages": 1, "tokens": 1}',
        b'{"prompt": "x", "temperature": 1e999, "messages": 1, "tokens": 1}',
        b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b', "messages": 1, "tokens": 1}',
        b'{"prompt": "x"} trailing',
        DEEP,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_broken_body_is_refused(http, path, body):
    answer = http.post(path, content=body)
    assert answer.status_code == 400, answer.text
    error_of(answer)


def test_an_unknown_model_is_404(http):
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [USER]})):
        answer = http.post(path, json=body | {"model": "gpt-9"})
        error = error_of(answer)
        assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert http.get("/v1/models/gpt-9").status_code == 404


def test_too_long_a_prompt_states_the_numbers(http):
    error = error_of(http.post("/v1/completions", json={"prompt": "x" * 512, "max_tokens": 1}))
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    error = error_of(http.post("/v1/completions", json={"prompt": "x" * 500, "max_tokens": 13}))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert http.post("/v1/completions", json={"prompt": "x" * 500, "max_tokens": 12}).status_code == 200


def test_neutral_values_of_what_is_not_supported_are_fine(http):
    body = {
        "prompt": "ab", "max_tokens": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logit_bias": {}, "suffix": None, "best_of": 1, "min_p": 0, "logprobs": None, "stop": None, "seed": None,
        "n": None, "response_format": {"type": "text"}, "top_k": -1, "user": None, "stream_options": None,
    }  # fmt: skip
    assert http.post("/v1/completions", json=body).status_code == 200


def test_unknown_paths_and_methods(http):
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
        answer = http.request(method, path)
        assert answer.status_code == status
        error_of(answer)


# ---- anything at all -------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-3, 600),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([-1, 0, 1, 2**31, 2**63]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20))
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
NAMES = st.sampled_from(
    [*schema.Completion.__struct_fields__, *schema.Chat.__struct_fields__, "tokens", "tools", "suffix", "x"]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "developer"])},
    optional={"content": st.one_of(JSON, st.text(max_size=30)), "name": JSON},
)
BODIES = st.tuples(
    st.dictionaries(NAMES, JSON, max_size=5),
    st.sampled_from([{}, {"prompt": "ab"}, {"prompt": ["a", "b"], "n": 2}]),
    st.one_of(st.just({}), st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=3)})),
).map(lambda parts: parts[0] | parts[1] | parts[2])
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(path=PATHS, body=BODIES)
def test_any_json_is_answered(http, path, body):
    check(http.post(path, content=json.dumps(body).encode()))


@FUZZ
@given(path=PATHS, body=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_answered(http, path, body):
    check(http.post(path, content=body))


@FUZZ
@given(
    changes=st.dictionaries(
        st.sampled_from(["chunk_size", "policy", "token_budget", "nope", "prefix_cache"]), JSON, max_size=3
    )
)
def test_any_switch_is_answered(parrot, http, changes):
    before = http.get("/engine/state").json()["config"]
    answer = http.request("PATCH", "/engine/config", content=json.dumps(changes).encode())
    if answer.status_code != 200:
        assert answer.status_code in (400, 422)
        error_of(answer)
        assert http.get("/engine/state").json()["config"] == before
    else:
        http.patch("/engine/config", json=before)


def check(answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error_of(answer)
    elif not answer.headers["content-type"].startswith("text/event-stream"):
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_engine_goes_on_after_all_that(parrot, http):
    eventually(parrot.idle)
    assert still_serves(http)
    assert math.isclose(parrot.bird.loop.engine.pool.used_count, 0)
