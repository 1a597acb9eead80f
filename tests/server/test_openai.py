"""The OpenAI client, unmodified, against the server; and what vLLM's endpoints beside it answer."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.server.conftest import Served

MESSAGES = [{"role": "user", "content": "ping"}]
CHAT_PROMPT = "user: ping\n"  # as the parrot's template puts it; the parrot repeats its prompt


@pytest.fixture(scope="module")
def client(parrot: Served):
    with openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_models_tell_the_context_length(client, http):
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len) == ("parrot", 512)
    assert client.models.retrieve("parrot").id == "parrot"
    assert http.get("/version").json()["version"]


def test_a_completion(client):
    answer = client.completions.create(model="parrot", prompt="hello ", max_tokens=8, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("hello he", "length", None)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 8, 14)


def test_timings_and_the_engines_number_travel_with_the_choice(client, parrot):
    before = parrot.bird.loop.engine.state()["counters"]["requests"]
    choice = client.completions.create(model="parrot", prompt="hello ", max_tokens=8).choices[0]
    assert choice.kvscope["request"] == before + 1
    timings = choice.kvscope["timings"]
    assert 0 <= timings["queue_s"] <= timings["ttft_s"] <= timings["e2e_s"]
    assert timings["tpot_s"] > 0


def test_sixteen_tokens_when_none_are_asked_for(client):
    assert client.completions.create(model="parrot", prompt="x").usage.completion_tokens == 16


def test_a_chat_fills_what_is_left_when_no_limit_is_given(client):
    answer = client.chat.completions.create(model="parrot", messages=MESSAGES)
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_a_chat(client):
    answer = client.chat.completions.create(model="parrot", messages=MESSAGES, max_completion_tokens=5)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "user:")
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"


def test_the_end_token_ends_an_answer(client):
    answer = client.completions.create(model="parrot", prompt="bye\0", max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bye", "stop")
    on = client.completions.create(model="parrot", prompt="bye\0", max_tokens=20, extra_body={"ignore_eos": True})
    assert (on.choices[0].finish_reason, on.usage.completion_tokens) == ("length", 20)


def test_streamed_pieces_make_the_whole(client):
    prompt = "Grüße, 日本 🙂! "
    whole = client.completions.create(model="parrot", prompt=prompt, max_tokens=60).choices[0].text
    pieces = list(client.completions.create(model="parrot", prompt=prompt, max_tokens=60, stream=True))
    texts = [piece.choices[0].text for piece in pieces]
    assert "".join(texts) == whole
    assert len(texts) > 10
    assert not any("\ufffd" in text for text in texts[:-1])
    assert [piece.choices[0].finish_reason for piece in pieces[-2:]] == [None, "length"]


def test_a_streamed_chat_names_the_role_first(client):
    chunks = list(client.chat.completions.create(model="parrot", messages=MESSAGES, max_tokens=4, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "user"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("stop", ["world", ["nowhere", "world"]])
def test_a_stop_string_ends_the_text_before_it(client, stop):
    answer = client.completions.create(model="parrot", prompt="hello world ", max_tokens=40, stop=stop)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hello ", "stop", "world")
    stream = client.completions.create(model="parrot", prompt="hello world ", max_tokens=40, stop=stop, stream=True)
    texts = [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == "hello "
    assert not any("w" in text for text in texts)
    kept = client.completions.create(
        model="parrot", prompt="hello world ", max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "hello world"


def test_a_stop_token_ends_the_text(client):
    answer = client.completions.create(
        model="parrot", prompt="abcdef", max_tokens=40, extra_body={"stop_token_ids": [ord("d")]}
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("abc", "stop", ord("d"))


def test_two_choices_and_two_prompts(client):
    answer = client.completions.create(model="parrot", prompt=["ab", "cde"], n=2, max_tokens=3, temperature=0)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "aba"), (1, "aba"), (2, "cde"), (3, "cde")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    texts = {}
    for chunk in client.completions.create(model="parrot", prompt=["ab", "cde"], n=2, max_tokens=3, stream=True):
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert texts == {0: "aba", 1: "aba", 2: "cde", 3: "cde"}


def test_two_chat_choices(client):
    answer = client.chat.completions.create(model="parrot", messages=MESSAGES, n=2, max_tokens=4)
    assert [c.message.content for c in answer.choices] == ["user", "user"]
    assert answer.usage.prompt_tokens == len(CHAT_PROMPT)


@pytest.mark.parametrize("prompt", [list(b"hello "), [list(b"hello ")]])
def test_prompts_as_token_ids(client, prompt):
    answer = client.completions.create(model="parrot", prompt=prompt, max_tokens=8, echo=True)
    assert answer.choices[0].text == "hello hello he"


def test_echo_puts_the_prompt_in_front_once(client):
    whole = client.completions.create(model="parrot", prompt="hello ", max_tokens=3, echo=True)
    assert whole.choices[0].text == "hello hel"
    stream = client.completions.create(model="parrot", prompt="hello ", max_tokens=3, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hello hel"


def test_logprobs_of_a_completion(client):
    answer = client.completions.create(model="parrot", prompt="abc", max_tokens=4, logprobs=2, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c", "a"]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert all(-0.01 < p <= 0 for p in logprobs.token_logprobs)
    assert list(logprobs.top_logprobs[0]) == ["a", "b"]
    chunks = client.completions.create(
        model="parrot", prompt="abc", max_tokens=4, logprobs=0, temperature=0, stream=True
    )
    assert [c.choices[0].logprobs.text_offset for c in chunks] == [[0], [1], [2], [3]]


def test_logprobs_of_a_chat(client):
    answer = client.chat.completions.create(
        model="parrot", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2, temperature=0
    )
    first = answer.choices[0].logprobs.content[0]
    assert (first.token, first.bytes) == ("u", [ord("u")])
    assert [top.token for top in first.top_logprobs] == ["u", "v"]
    chunks = client.chat.completions.create(
        model="parrot", messages=MESSAGES, max_tokens=3, logprobs=True, temperature=0, stream=True
    )
    told = [item.token for c in chunks if c.choices[0].logprobs for item in c.choices[0].logprobs.content]
    assert told == list("use")


def test_usage_comes_last_in_a_stream_and_without_choices(client):
    prompt = "a prompt that nobody sent before, long enough to fill a few blocks"
    for cached in (0, len(prompt) // 4 * 4 - (4 if len(prompt) % 4 == 0 else 0)):
        chunks = list(
            client.completions.create(
                model="parrot", prompt=prompt, max_tokens=4, stream=True, stream_options={"include_usage": True}
            )
        )
        assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
        assert chunks[-1].choices == []
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 4)
        assert usage.prompt_tokens_details.cached_tokens == cached


def test_a_cache_salt_keeps_prompts_apart(client):
    def cached(salt):
        prompt = "the same words for two tenants, word by word"
        answer = client.completions.create(model="parrot", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") > 0


def test_seeds_repeat(client):
    def text(seed):
        # So hot that the parrot's next best byte comes up as well.
        return (
            client.completions.create(model="parrot", prompt="a" * 64, max_tokens=64, temperature=2, seed=seed)
            .choices[0]
            .text
        )

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_stream_framing(http):
    body = {"prompt": "ab", "max_tokens": 2, "stream": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(frame.removeprefix("data: "))["object"] == "text_completion" for frame in frames[:-2])


def test_what_is_unknown_is_ignored_and_listed(http):
    body = {"prompt": "ab", "max_tokens": 1, "session_id": 7, "vllm_xargs": {}, "b\r\nset-cookie: x": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-kvscope-ignored"] == "session_id, vllm_xargs, b??set-cookie??x"
    part = {"type": "text", "text": "x", "cache_control": {}}
    body = {"messages": [{"role": "user", "content": [part, part], "name": "n"}], "max_tokens": 1, "stream": True}
    body["stream_options"] = {"include_usage": False, "include_obfuscation": False}
    listed = "stream_options.include_obfuscation, messages[].name, messages[].content[].cache_control"
    assert http.post("/v1/chat/completions", json=body).headers["x-kvscope-ignored"] == listed
    assert http.post("/tokenize", json={"prompt": "x", "odd": 1}).headers["x-kvscope-ignored"] == "odd"
    body = {"prompt": "ab", "max_tokens": 1, "repetition_penalty": 1.0, "logprobs": None}
    assert "x-kvscope-ignored" not in http.post("/v1/completions", json=body).headers


def test_a_request_id_is_echoed_and_names_the_request(http):
    answer = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    assert http.get("/health").headers["x-request-id"]


@pytest.mark.parametrize("name", ["parrot", "also-parrot"])
def test_a_model_answers_to_its_names(http, name):
    answer = http.post("/v1/completions", json={"model": name, "prompt": "ab", "max_tokens": 1})
    assert answer.json()["model"] == name


def test_tokenize_and_back(http):
    found = http.post("/tokenize", json={"model": "parrot", "prompt": "hé", "add_special_tokens": False}).json()
    assert found == {"count": 3, "max_model_len": 512, "tokens": list("hé".encode()), "token_strs": None}
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "hé"}
    chat = http.post("/tokenize", json={"messages": MESSAGES, "return_token_strs": True}).json()
    assert "".join(chat["token_strs"]) == CHAT_PROMPT


def test_token_ids_are_returned_on_request(http):
    body = {"prompt": "abc", "max_tokens": 3, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (list(b"abc"), list(b"abc"))


def test_a_model_without_a_template_says_so(parrot, http: httpx.Client):
    parrot.bird.has_template = False
    try:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES})
    finally:
        parrot.bird.has_template = True
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]["message"]
