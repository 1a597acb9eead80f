"""The open-loop client against a server that can be held, broken and closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from backend.workload.client import Client
from backend.workload.job import Answer, End, Job, Target, Tick
from tests.waiting import DEADLINE_S
from tests.workload.talker import Talker


@pytest.fixture
def talker(served) -> Iterator[Talker]:
    """As it was after each test."""
    talker, _ = served
    yield talker
    talker.gate.set()
    fresh = Talker()
    for name in ("token_s", "status", "how", "usage", "metrics", "bodies", "came", "gone"):
        setattr(talker, name, getattr(fresh, name))


def job(served, count: int = 20, rate: float = 200, tokens: int = 4, **other) -> Job:
    target = Target(url=served[1], model="talker", tokens_per_word=2.0, overhead_tokens=3)
    return Job(target=target, requests=[(i / rate, 43, tokens) for i in range(count)], **other)


async def play(job: Job, during=None) -> tuple[list[Answer], list[Tick], End]:
    said: list = []
    client = Client(job, said.append)
    helping = asyncio.create_task(during(client)) if during else None
    await asyncio.wait_for(client.run(), DEADLINE_S)
    if helping:
        await helping
    answers = sorted((one for one in said if isinstance(one, Answer)), key=lambda answer: answer.number)
    return answers, [one for one in said if isinstance(one, Tick)], said[-1]


async def until(condition) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def test_every_request_is_told_with_all_its_times(served, talker):
    talker.token_s = 0.002
    wanted = job(served, extra={"ignore_eos": True})
    answers, ticks, end = await play(wanted)
    assert [answer.number for answer in answers] == list(range(20)) and not end.stopped
    for answer in answers:
        assert (answer.state, answer.code, answer.message) == ("ok", 200, "")
        assert answer.arrival_s == wanted.requests[answer.number][0]
        moments = [answer.arrival_s, answer.sent_s, *answer.times_s, answer.end_s]
        assert moments == sorted(moments) and len(answer.times_s) == 4
        assert (answer.input_tokens, answer.output_tokens) == (43, 4)  # 20 words of two tokens, and three
    assert ticks[-1].arrived == ticks[-1].left == 20 and ticks[-1].in_flight == 0
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in talker.bodies)
    assert len({body["prompt"] for body in talker.bodies}) == 20


async def test_a_stalled_server_does_not_slow_the_arrivals_and_the_stall_shows(served, talker):
    """Coordinated omission: who waits for answers before asking on would never get past the first request here."""
    talker.gate.clear()
    released = 0.0

    async def stall(client: Client) -> None:
        nonlocal released
        await until(lambda: len(talker.came) == 40)  # all of them, though none was answered
        released = time.perf_counter() - client._start
        talker.gate.set()

    answers, _, _ = await play(job(served, count=40), stall)
    assert all(answer.state == "ok" for answer in answers)
    assert all(answer.times_s[0] >= released for answer in answers)
    waits = [answer.times_s[0] - answer.arrival_s for answer in answers]
    assert waits[0] >= 39 / 200  # the first one waited for as long as all the others took to come
    assert sorted(talker.came) == talker.came and max(answer.sent_s for answer in answers) <= released


@pytest.mark.parametrize(
    "strings, state, code, words",
    [
        ({"status": 429}, "refused", 429, "says no with 429"),
        ({"status": 500}, "failed", 500, "says no with 500"),
        ({"how": "early"}, "failed", 200, "ended before the answer did"),
        ({"how": "error"}, "failed", 200, "the server broke off: out of memory"),
        ({"how": "garbage"}, "failed", 200, "no OpenAI chunk"),
        ({"how": "whole"}, "failed", 200, "does not stream"),
    ],
)
async def test_what_is_no_answer_is_told_as_such(served, talker, strings, state, code, words):
    for name, value in strings.items():
        setattr(talker, name, value)
    answers, _, end = await play(job(served, count=3))
    assert {(answer.state, answer.code) for answer in answers} == {(state, code)} and not end.stopped
    assert all(words in answer.message for answer in answers)


async def test_a_server_that_is_not_there(served, talker):
    target = Target(url="http://127.0.0.1:9", model="nobody")
    answers, _, _ = await play(Job(target=target, requests=[(0.0, 5, 5), (0.01, 5, 5)]))
    assert all(answer.state == "failed" and answer.code == 0 for answer in answers)
    assert "no connection" in answers[0].message


async def test_stopping_cuts_off_what_is_in_flight_and_says_so(served, talker):
    talker.gate.clear()

    async def stop(client: Client) -> None:
        await until(lambda: len(talker.came) >= 5)
        client.stop()

    answers, ticks, end = await play(job(served, count=1000, rate=100), stop)
    assert end.stopped and 5 <= len(answers) < 1000 and {answer.state for answer in answers} == {"cut"}
    assert ticks[-1].in_flight == 0
    await until(lambda: talker.gone == len(talker.came))


async def test_nobody_is_waited_for_for_ever(served, talker):
    talker.gate.clear()
    answers, _, end = await play(job(served, count=3, drain_s=0.05))
    assert {answer.state for answer in answers} == {"cut"} and not end.stopped
    answers, _, _ = await play(job(served, count=3, timeout_s=0.05))
    assert {answer.message for answer in answers} == {"not answered within 0.05 s"}


async def test_without_usage_pieces_are_counted(served, talker):
    talker.usage = False
    answers, _, _ = await play(job(served, count=2))
    assert [(answer.input_tokens, answer.output_tokens) for answer in answers] == [(None, 4)] * 2


async def test_chat_answers_begin_with_their_first_text(served, talker):
    plain = job(served, count=2)
    target = Target(url=served[1], model="talker", endpoint="chat")
    answers, _, _ = await play(Job(target=target, requests=plain.requests))
    assert all(answer.state == "ok" and len(answer.times_s) == 4 for answer in answers)
    assert talker.bodies[0]["messages"][0]["role"] == "user"


async def test_the_servers_own_queue_is_read_where_it_tells_one(served, talker):
    talker.gate.clear()
    talker.metrics = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 1.0\n'
    talker.metrics += 'vllm:num_requests_waiting{engine="0"} 2.0\n'
    _, ticks, _ = await play(job(served, count=3, drain_s=0.5))
    assert (ticks[-1].running, ticks[-1].waiting) == (4.0, 2.0)


async def test_prompts_may_have_their_beginning_in_common(served, talker):
    await play(job(served, count=3, prefix="You are a clerk.\n\n"))
    prompts = {body["prompt"] for body in talker.bodies}
    assert len(prompts) == 3 and all(prompt.startswith("You are a clerk.\n\n") for prompt in prompts)
    assert {len(prompt.split()) for prompt in prompts} == {4 + 20}
