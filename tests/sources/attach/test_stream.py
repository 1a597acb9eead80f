"""Streams of foreign servers, in the ways they differ: what is heard, when, and how many tokens it was."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend import events, fold
from backend.sources.attach.journal import FLUSH_S, Journal, Own
from backend.sources.attach.stream import Broken, hear, pieces
from tests.sources.attach.texts import DATA


class Story:
    """A journal whose events are folded at once, on a clock that moves by hand."""

    def __init__(self):
        self.now, self.seq = 0.0, 0
        self.state, self.told = fold.State(), []
        self.journal = Journal(self._publish, lambda: self.now)
        model = events.ModelInfo(name="m")
        self._publish(events.Hello(epoch="e", model=model, device=events.DeviceInfo(), block_size=0, num_blocks=0))

    def _publish(self, event: events.Event) -> None:
        self.seq += 1
        event.seq = self.seq
        self.told.append(event)
        fold.apply(self.state, event)

    def text(self, request: int) -> str:
        return "".join(text for e in self.told if type(e) is events.Tokens for n, text in e.texts if n == request)


def chunk(content: str | None = None, *, index: int = 0, reason: str | None = None, **more) -> dict:
    delta = {} if content is None else {"content": content}
    return {"choices": [{"index": index, "delta": delta, "finish_reason": reason, **more}]}


def follow(*parts: dict, count: int = 1) -> tuple[Story, list[Own]]:
    """Each piece comes a second after the one before; the request was sent at 1 s."""

    async def run() -> tuple[Story, list[Own]]:
        story = Story()
        owns = [story.journal.begin("id", "hello", t_sent=1.0, max_tokens=9) for _ in range(count)]
        for second, part in enumerate(parts, 2):
            story.now = float(second)
            hear(part, owns, story.journal)
        story.journal.flush()
        return story, owns

    return asyncio.run(run())


def test_a_role_is_no_token_and_usage_without_choices_counts():
    """As vLLM streams a chat."""
    usage = {
        "choices": [],
        "usage": {"prompt_tokens": 34, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 32}},
    }
    story, [own] = follow(
        chunk("", role="assistant"), chunk("Besides"), chunk(" Pink, Cheer"), chunk("", reason="length"), usage
    )  # fmt: skip
    assert (own.t_first, own.t_last, own.reason) == (3.0, 4.0, "length")
    assert (own.prompt_tokens, own.output_tokens, own.cached_tokens) == (34, 6, 32)
    assert own.tpot_s == 1.0 / 5  # two pieces were six tokens
    request = story.state.requests[1]
    assert (request.state, request.ttft_s, request.output_tokens) == ("decode", 2.0, 6)
    assert story.text(1) == "Besides Pink, Cheer"


def test_usage_in_the_last_piece_with_choices():
    """As llama.cpp does, and with a field that is nobody's."""
    last = {**chunk(None, reason="stop"), "usage": {"prompt_tokens": 5, "completion_tokens": 2}, "timings": {"a": 1}}
    _, [own] = follow(chunk("a"), chunk("b"), last)
    assert (own.prompt_tokens, own.output_tokens, own.reason) == (5, 2, "stop")


def test_without_usage_pieces_are_counted_and_with_ids_tokens_are():
    _, [own] = follow(chunk("a b"), chunk("c"))
    assert own.output_tokens == 2
    _, [own] = follow(chunk("a b", token_ids=[5, 6], prompt_token_ids=[1, 2, 3]), chunk("c", token_ids=[7]))
    assert (own.output_tokens, own.prompt_tokens, own.token_ids) == (3, 3, [1, 2, 3, 5, 6, 7])


def test_answers_to_several_prompts_are_told_apart():
    story, owns = follow(
        {"choices": [{"index": 1, "text": "one"}]},
        {"choices": [{"index": 0, "text": "zero", "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 99, "completion_tokens": 99}}, count=2,
    )  # fmt: skip
    assert [story.text(own.request) for own in owns] == ["zero", "one"]
    assert [own.output_tokens for own in owns] == [1, 1] and [own.reason for own in owns] == ["stop", ""]


def test_thoughts_are_words_too():
    story, _ = follow({"choices": [{"delta": {"reasoning_content": "hm"}}]}, chunk("yes"))
    assert story.text(1) == "hmyes"


def test_vllm_tells_how_long_it_waited():
    _, [own] = follow(chunk("a"), {"choices": [], "metrics": {"queue_time_ms": 250.0}})
    assert own.queue_s == 0.25


def test_an_error_in_the_stream_is_said():
    with pytest.raises(Broken, match="out of memory"):
        follow(chunk("a"), {"error": {"message": "out of memory"}})


def test_the_end_is_told_with_times_by_our_clock():
    async def run() -> Story:
        story = Story()
        own = story.journal.begin("id", "hello", t_sent=0.5, user="user 1", max_tokens=3)
        assert story.state.requests[1].state == "queued"
        story.journal.taken(own)
        assert story.state.requests[1].state == "prefill"
        for story.now in (2.0, 3.0):
            hear(chunk("x"), [own], story.journal)
        story.now = 4.0
        story.journal.end(own, "stop")
        story.journal.end(own, "error")  # once is enough
        return story

    story = asyncio.run(run())
    done = story.state.requests[1]
    assert (done.reason, done.ttft_s, done.tpot_s, done.e2e_s, done.output_tokens) == ("stop", 1.5, 1.0, 3.5, 2)
    assert story.state.totals.finished == 1 and story.state.in_flight == 0 and not story.journal.live


def test_many_pieces_make_few_events():
    async def run() -> Story:
        story = Story()
        own = story.journal.begin("id", "", t_sent=0.5)
        for _ in range(500):
            hear(chunk("x"), [own], story.journal)
        await asyncio.sleep(2 * FLUSH_S)
        return story

    story = asyncio.run(run())
    assert len(story.told) == 4 and len(story.text(1)) == 500


async def gathered(*parts: bytes) -> list[dict]:
    async def source():
        for part in parts:
            yield part

    return [piece async for piece in pieces(source())]


def test_pieces_are_found_wherever_the_network_cuts_them():
    stream = b': hi\r\n\r\ndata: {"a": 1}\r\n\r\ndata:{"b": "\xc3\xa9"}\n\nevent: x\ndata: [DONE]\n\ndata: {"c": 3}\n\n'
    for size in (1, 2, 7, 1000):
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert asyncio.run(gathered(*parts)) == [{"a": 1}, {"b": "é"}]
    with pytest.raises(Broken):
        asyncio.run(gathered(b"data: {\n\n"))


def test_a_recorded_stream_of_vllm():
    body = (DATA / "vllm_chat_stream.sse").read_bytes()
    found = asyncio.run(gathered(body))
    usage = [piece["usage"] for piece in found if piece.get("usage")][-1]
    story, [own] = follow(*found)
    assert (own.prompt_tokens, own.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert own.pieces < own.output_tokens and own.reason == "stop"
    said = "".join(choice["delta"].get("content") or "" for piece in found for choice in piece["choices"])
    assert story.text(1) == said and own.t_first == 3.0  # the first piece has only a role


KEYS = ["choices", "delta", "usage", "content", "index", "token_ids", "text", "completion_tokens"]
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["choices", "usage", "metrics"]), anything))
def test_no_piece_breaks_it(piece):
    json.dumps(piece)
    follow(piece, {"choices": [piece]}, count=2)
    follow({"choices": [piece], "usage": piece})
