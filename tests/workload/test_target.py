"""What is found out about a server before any load is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend.workload.arrivals import LoadError
from backend.workload.target import address, check_room, find
from tests.workload.talker import Talker


@pytest.fixture
def talker(served) -> Iterator[Talker]:
    talker, _ = served
    yield talker
    talker.key, talker.chat_only, talker.usage, talker.how, talker.status = "", False, True, "well", 0


def test_it_learns_the_model_and_what_a_word_costs(served, talker):
    found = find(f"{served[1]}/v1/")
    assert (found.url, found.model, found.endpoint, found.max_model_len) == (served[1], "talker", "completions", 1000)
    assert found.tokens_per_word == 2.0 and found.overhead_tokens == 3 and found.counts_tokens


def test_counting_fits_a_small_context(served, talker):
    asked = len(talker.bodies)
    talker.context = 100
    found = find(served[1])
    talker.context = 1000
    assert found.tokens_per_word == 2.0
    assert max(len(body["prompt"].split()) for body in talker.bodies[asked:]) < 80


def test_a_server_that_only_chats_is_spoken_to_in_messages(served, talker):
    talker.chat_only = True
    assert find(served[1]).endpoint == "chat"


def test_a_server_without_usage_is_named_so(served, talker):
    talker.usage = False
    found = find(served[1])
    assert not found.counts_tokens and "no usage" in found.notes[0]


@pytest.mark.parametrize(
    "strings, arguments, words",
    [
        ({"key": "secret"}, {}, "does not let us in: the key is missing"),
        ({}, {"model": "other"}, "does not serve 'other'; it serves talker"),
        ({"how": "whole"}, {}, "does not stream"),
        ({"status": 400}, {}, "does not take a request like ours: says no with 400"),
    ],
)
def test_what_does_not_work_is_said_before_the_load(served, talker, strings, arguments, words):
    for name, value in strings.items():
        setattr(talker, name, value)
    with pytest.raises(LoadError, match=words):
        find(served[1], **arguments)


def test_the_key_is_sent(served, talker):
    talker.key = "secret"
    assert find(served[1], headers={"authorization": "Bearer secret"}).model == "talker"


def test_an_unreachable_address_is_said():
    with pytest.raises(LoadError, match=r"cannot reach http://127\.0\.0\.1:9: .*running"):
        find("http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://user:pw@host", "http://[bad"])
def test_an_impossible_address_is_refused(url):
    with pytest.raises(LoadError, match="address"):
        address(url)


def test_what_can_never_fit_is_refused_with_the_numbers(served, talker):
    with pytest.raises(LoadError, match=r"1,001 tokens.* talker takes 1,000"):
        check_room(find(served[1]), [(10, 10), (900, 101)])
