"""Synthetic users against a server that answers without a model."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from backend.sources.background import Background
from backend.workload.prompts import QUESTIONS, SYSTEM, output_tokens, question, system_prompt
from backend.workload.users import MAX_USERS, Habits, Users, ask
from tests.sources.fake_engine import FakeEngine, Serving
from tests.waiting import eventually

QUICK = Habits(think_s=(0.0, 0.01))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background("test-users")
    yield background
    background.close()


@pytest.fixture
def users(engine, background) -> Iterator[Users]:
    with Serving(engine) as url:
        users = Users(background, lambda: url, seed=1)
        yield users
        users.stop()


def test_they_ask_wait_and_ask_again(users, engine):
    users.start(8, QUICK)
    eventually(lambda: users.counts.done >= 30)
    counts = users.counts
    assert counts.users == 8 and counts.failed == 0 and counts.in_flight <= 8
    assert {body["user"] for body in engine.bodies} == {f"user {n}" for n in range(1, 9)}
    assert all("stream" not in body for body in engine.bodies)
    assert len({body["messages"][-1]["content"] for body in engine.bodies}) > 10
    assert len({body["max_tokens"] for body in engine.bodies}) > 10


def test_stopping_takes_less_than_a_second_and_aborts_what_is_in_flight(users, engine):
    engine.answer_s = 60
    users.start(32, QUICK)
    eventually(lambda: engine.seen["begun"] == 32)
    begin = time.monotonic()
    users.stop()
    assert time.monotonic() - begin < 1.0
    assert users.counts.users == users.counts.in_flight == 0
    eventually(lambda: engine.seen["gone"] == 32, "the engine noticed all of them")


def test_the_number_of_users_follows_at_once(users, engine):
    engine.answer_s = 60
    users.start(3, QUICK)
    eventually(lambda: engine.seen["begun"] == 3)
    users.set_count(9)
    eventually(lambda: engine.seen["begun"] == 9)
    users.set_count(2)
    assert users.counts.users == users.counts.in_flight == 2
    eventually(lambda: engine.seen["gone"] == 7)
    users.set_count(10_000)
    assert users.counts.users == MAX_USERS
    users.set_count(-5)
    assert users.counts.users == 0


def test_counters_begin_anew_with_each_start(users):
    users.start(2, QUICK)
    eventually(lambda: users.counts.done > 3)
    users.stop()
    assert users.counts.done > 3
    users.start(1, Habits(think_s=(30, 30)))
    assert users.counts.done == 0


def test_refusals_are_counted_told_and_survived(users, engine):
    engine.full = True
    users.start(4, QUICK)
    eventually(lambda: users.counts.failed >= 4)
    assert users.counts.last_error == "the queue is full" and users.counts.done == 0
    engine.full = False
    eventually(lambda: users.counts.done >= 4)


def test_an_engine_that_goes_away_is_waited_for(engine, background):
    where: list[str | None] = [None]
    users = Users(background, lambda: where[0], seed=1)
    users.start(2, QUICK)
    eventually(lambda: users.counts.failed >= 2)
    assert users.counts.last_error == "the engine is not running"
    with Serving(engine) as where[0]:
        eventually(lambda: users.counts.done >= 2)
    eventually(lambda: "cannot reach the engine" in users.counts.last_error)
    users.stop()


def test_habits_count_from_the_next_question_on(users, engine):
    users.start(2, QUICK)
    eventually(lambda: users.counts.done > 2)
    users.habits = Habits(think_s=(0.0, 0.01), break_prefix=True)
    eventually(lambda: engine.bodies[-1]["messages"][0]["content"].startswith("Customer number"))


def test_a_user_says_the_same_with_the_same_seed():
    def talk(seed: int, user: int) -> list:
        lots = random.Random(f"{seed} {user}")
        return [ask(user, lots, Habits()) for _ in range(5)]

    assert talk(1, 1) == talk(1, 1)
    assert talk(1, 1) != talk(2, 1) and talk(1, 1) != talk(1, 2)


def test_who_shares_which_prompt():
    lots = random.Random(0)
    shared = [ask(user, lots, Habits())[1]["messages"] for user in (1, 2)]
    assert shared[0][0] == shared[1][0] == {"role": "system", "content": SYSTEM}
    broken = [ask(user, lots, Habits(break_prefix=True))[1]["messages"][0]["content"] for user in range(1, 65)]
    first_lines = {text.splitlines()[0] for text in broken}
    assert len(first_lines) == 64 and all(text.endswith(SYSTEM) for text in broken)
    (alone,) = ask(1, lots, Habits(shared_prompt=False))[1]["messages"]
    assert alone["role"] == "user"


def test_a_model_without_a_chat_template_gets_plain_text():
    path, body = ask(1, random.Random(0), Habits(chat=False))
    assert path == "/v1/completions" and body["prompt"].startswith(SYSTEM) and body["prompt"].endswith("Answer:")
    path, body = ask(1, random.Random(0), Habits(chat=False, shared_prompt=False))
    assert body["prompt"].startswith("Question:")


def test_lengths_vary_widely():
    lots = random.Random(0)
    words = sorted(len(question(lots).split()) for _ in range(400))
    assert words[0] <= 5 and words[-1] >= 100
    outputs = sorted(output_tokens(lots, 16, 160) for _ in range(400))
    assert outputs[0] < 20 and outputs[-1] > 130 and 40 < outputs[200] < 65
    assert 280 < len(SYSTEM.split()) < 350 and len(set(QUESTIONS)) >= 30
    assert system_prompt(1, broken=True) != system_prompt(2, broken=True)
