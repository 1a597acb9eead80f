"""The whole of it on a real (tiny, random) Llama: loader, self-check, engine, server."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import httpx
import msgspec
import openai
import pytest

from backend import events, what_if
from backend.server.serve import Wanted
from tests.server.conftest import Served, eventually
from tests.server.test_serve import TINY


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    switches = {"num_blocks": 40, "block_size": 8, "max_running": 16}
    wanted = Wanted(model=str(folder), weights="random", dtype="float32", device="cpu", switches=switches)
    served = Served(SimpleNamespace(boot=wanted.boot)).start()
    try:
        yield served.wait_ready(deadline_s=60)
    finally:
        served.stop()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_greedy_text_does_not_depend_on_how_it_is_asked_for(served, client):
    (model,) = client.models.list().data
    asked = dict(model=model.id, prompt="The quick brown fox jumps", max_tokens=24, temperature=0)
    alone = client.completions.create(**asked, logprobs=1)
    text = alone.choices[0].text
    assert alone.usage.completion_tokens == 24
    assert len(alone.choices[0].logprobs.tokens) == 24
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == text
    assert [choice.text for choice in client.completions.create(**asked, n=2).choices] == [text, text]
    ids = httpx.post(f"{served.url}/tokenize", json={"prompt": asked["prompt"]}).json()["tokens"]
    assert client.completions.create(**asked | {"prompt": ids}).choices[0].text == text
    together = client.completions.create(**asked | {"prompt": [asked["prompt"], "Another text", "A third one"]})
    assert together.choices[0].text == text


def test_a_template_is_needed_to_chat(client):
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(
            model=client.models.list().data[0].id, messages=[{"role": "user", "content": "x"}]
        )


def test_a_crowd_is_served_through_preemption(served):
    """More at once than the pool holds, half of them streaming, a few leaving: all others get what they asked for."""

    async def ask(http: httpx.AsyncClient, number: int) -> int | None:
        body = {
            "prompt": f"user {number} says " + "la " * number,
            "max_tokens": 40,
            "ignore_eos": True,
            "temperature": 0.7,
        }
        if number % 5 == 4:
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                await lines.aclose()
            return None
        if number % 2:
            answer = await http.post(
                "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
            )
            return json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))["usage"]["completion_tokens"]
        return (await http.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"]

    async def crowd() -> list[int | None]:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
            return await asyncio.gather(*(ask(http, number) for number in range(20)))

    counts = asyncio.run(crowd())
    assert [count for count in counts if count is not None] == [40] * 16
    eventually(lambda: served.running == 0)
    state = httpx.get(f"{served.url}/engine/state").json()
    assert state["requests"] == []
    assert state["blocks"]["used"] == 0
    assert served.host.hub.read(lambda state: state.totals.preemptions) > 0
    metrics = httpx.get(f"{served.url}/metrics").text
    assert 'vllm:num_requests_running{engine="0"' in metrics


def test_long_texts_and_streams_do_not_disturb_each_other(served, client):
    """Long prompts are tokenized in a thread while streams decode with the same tokenizer."""
    asked = dict(model=None, prompt="hello there", max_tokens=60, temperature=0, extra_body={"ignore_eos": True})
    asked["model"] = client.models.list().data[0].id
    whole = client.completions.create(**asked).choices[0].text
    stream = client.completions.create(**asked, stream=True)
    pieces = [next(stream).choices[0].text]
    for _ in range(5):
        long = httpx.post(f"{served.url}/tokenize", json={"prompt": "so many words " * 80}, timeout=60)
        assert long.json()["count"] > 500
    assert "".join(pieces + [chunk.choices[0].text for chunk in stream]) == whole


def test_the_told_shape_counts_what_the_engine_counted(served, client):
    """The phases page's modelled step and the engine's own events are one arithmetic on one model."""
    hub = served.host.hub
    shape = what_if.shape_of(hub.read(lambda state: msgspec.to_builtins(state.model))["shape"])
    before = hub.read(lambda state: state.seq)
    ids = list(range(40, 57))
    client.completions.create(
        model=client.models.list().data[0].id, prompt=[ids, ids[::-1]], max_tokens=6, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    steps = [event for event in map(events.decode, hub.lines_since(before)) if isinstance(event, events.Step)]
    decoded = [step for step in steps if step.flops and not step.prefill]
    assert len(decoded) >= 4
    kv = shape.kv_bytes_per_token
    for step in decoded:
        batch = step.kv_write_bytes // kv
        cost = what_if.decode_step(shape, batch, step.kv_read_bytes // kv // batch)
        counted = step.flops, step.weight_bytes, step.kv_read_bytes, step.kv_write_bytes, step.activation_bytes
        assert counted == (
            cost.flops,
            cost.weight_bytes,
            cost.kv_read_bytes,
            cost.kv_write_bytes,
            cost.activation_bytes,
        )
        assert step.attention_flops == cost.attention_flops
