"""A foreign engine as a source: what pages see of it, what our own requests become, and how it goes and returns."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from backend import events
from backend.sources import SourceError, open_source
from backend.sources.attach import scraper, sender
from backend.sources.attach.source import AttachedSource
from backend.sources.attach.target import Secret, TargetConfig
from backend.sources.remote import EngineError
from backend.sources.roofs import RoofKeeper
from backend.workload.users import Habits, Users
from tests.server.conftest import serving
from tests.server.scripted import Bird
from tests.sources.attach.talker import Said, Talker, told
from tests.sources.attach.texts import body, line, recorded, vllm_010
from tests.waiting import eventually

QUICK = 0.2  # seconds between scrapes
KEY = "sk-very-secret"
MODELS = told({"data": [{"id": "m", "owned_by": "vllm"}]})


@contextmanager
def attached(url: str, **config) -> Iterator[AttachedSource]:
    source = AttachedSource(TargetConfig(url=url, interval_s=QUICK, **config))
    try:
        yield source
    finally:
        source.close()


def ready(source: AttachedSource) -> AttachedSource:
    eventually(lambda: source.status.phase == "ready" and source.hub.read(lambda state: state.scrape), "a scrape")
    return source


def scrapes(source: AttachedSource) -> int:
    return source.hub.read(lambda state: state.step)


def request(source: AttachedSource, number: int = 1) -> tuple:
    def look(state):
        found = state.requests[number]
        return found.state, found.reason, found.message, found.prompt_tokens, found.output_tokens, found.user

    return source.hub.read(look)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(scraper, "BACKOFF_S", (0.05, 0.2))


# metrics


def test_its_metrics_become_state():
    answers = {"/metrics": Said(recorded("vllm_metrics_load")), "/v1/models": MODELS}
    with Talker(answers) as talker, attached(talker.url) as source:
        ready(source)
        state = source.hub.read(lambda state: state)
        assert (state.source, state.evidence, state.model.name) == ("vllm", "measured", "m")
        assert (state.block_size, state.num_blocks, state.config) == (128, 363, {"prefix_cache": True})
        assert (state.pool.used_blocks, state.scrape.values["running"].value) == (25, 12)
        assert state.capabilities.kind == "vllm" and state.scrape.scrape_s > 0
        assert source.unknown["vllm:request_success_total"] > 0 and state.scrape.unknown > 50
        eventually(lambda: len(source.hub.read(lambda state: state.series)) > 2)
        assert state.gaps == 0 and (source.kind, source.can_restart, source.engine) == ("attached", False, None)
        with pytest.raises(SourceError, match="where it runs"):
            source.restart()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvscope-attach"]


def test_a_server_that_ends_and_comes_back_begins_a_new_epoch_and_nothing_falls_below_zero():
    with Talker({"/metrics": Said(vllm_010(500)), "/v1/models": MODELS}) as talker, attached(talker.url) as source:
        ready(source)
        epoch = source.hub.read(lambda state: state.epoch)
        talker.stop()
        eventually(lambda: source.status.phase == "dead", "it is gone")
        assert "nothing listens" in source.status.message and source.hub.read(lambda state: state.scrape)
        again = Talker({"/metrics": Said(vllm_010(3)), "/v1/models": MODELS}, port=talker.port)
        with again:
            eventually(lambda: source.hub.read(lambda state: state.epoch) != epoch, "a new epoch")
            ready(source)
            assert source.reading.restarts == 1
            again.answers["/metrics"] = Said(vllm_010(5))
            eventually(lambda: source.hub.read(lambda state: state.totals.output_tokens) == 40, "2 × 10 × 2")
            rows = source.hub.read(lambda state: [list(row) for row in state.series])
            assert all(value >= 0 for row in rows for value in row)


def test_an_address_where_nothing_is_says_so_and_is_asked_again():
    with Talker() as talker:
        port = talker.port
    with attached(f"http://127.0.0.1:{port}") as source:
        eventually(lambda: source.status.phase == "dead")
        assert "nothing listens" in source.status.message and source.found is None
        with pytest.raises(EngineError, match="not reached"):
            source.client.models()
        with pytest.raises(EngineError, match="nothing listens"):
            source.client.chat([{"role": "user", "content": "hi"}])
        with Talker({"/metrics": Said(vllm_010(1)), "/v1/models": MODELS}, port=port):
            ready(source)


def test_metrics_that_turn_into_a_web_page_do_not_end_it():
    with Talker({"/metrics": Said(vllm_010(1)), "/v1/models": MODELS}) as talker, attached(talker.url) as source:
        ready(source)
        talker.answers["/metrics"] = Said(b"<html>login</html>")
        eventually(lambda: "web page" in source.status.message)
        talker.answers["/metrics"] = Said(vllm_010(2))
        eventually(lambda: source.status.message == "")


def test_a_server_without_metrics_shows_our_own_requests_only():
    with Talker({"/v1/models": told({"data": [{"id": "m"}]})}) as talker, attached(talker.url) as source:
        ready(source)
        running = source.hub.read(lambda state: state.scrape.values["running"])
        assert (running.value, running.quality) == (0, "derived") and "sent from here" in running.note
        assert source.hub.read(lambda state: state.scrape.values["kv_usage"].value) is None


def test_the_environment_may_name_it(tmp_path):
    (tmp_path / "key").write_text(KEY)
    with Talker({"/metrics": Said(vllm_010(1)), "/v1/models": MODELS}) as talker:
        environ = {"KVSCOPE_ATTACH_URL": f"{talker.url}/v1", "KVSCOPE_ENGINE_KEY_FILE": str(tmp_path / "key")}
        source = open_source(environ=environ)
        try:
            ready(source)
        finally:
            source.close()
        assert talker.keys() == {f"Bearer {KEY}"}
    with pytest.raises(SourceError, match="no address"):
        open_source(environ={"KVSCOPE_ATTACH_URL": "ftp://x"})
    with pytest.raises(SourceError, match="cannot be read"):
        open_source(environ={"KVSCOPE_ATTACH_URL": "http://x", "KVSCOPE_ENGINE_KEY_FILE": str(tmp_path / "none")})


# requests of our own


def piece(text: str, **more) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}, **more}]}).encode() + b"\n\n"


async def short(question: dict) -> AsyncIterator[bytes]:
    yield piece("", role="assistant")
    yield piece("Hello")
    yield piece(" there", finish_reason="stop")
    usage = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}}
    yield b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"


async def endless(question: dict) -> AsyncIterator[bytes]:
    while True:
        yield piece("more ")
        await asyncio.sleep(0.01)


async def broken(question: dict) -> AsyncIterator[bytes]:
    yield piece("Hel")
    yield b'data: {"error": {"message": "the GPU is on fire"}}\n\n'


async def cut(question: dict) -> AsyncIterator[bytes]:
    yield piece("Hel")


@pytest.fixture
def talker() -> Iterator[Talker]:
    with Talker({"/metrics": Said(vllm_010(1)), "/v1/models": MODELS}) as talker:
        yield talker


@pytest.fixture
def source(talker) -> Iterator[AttachedSource]:
    with attached(talker.url, key=Secret(KEY)) as source:
        yield ready(source)


def ask(source: AttachedSource, talker: Talker, stream) -> str:
    talker.answers["/v1/chat/completions"] = Said(stream=stream)
    return source.client.chat([{"role": "user", "content": "hi"}], max_tokens=9, user="me")


def test_a_chat_is_followed_by_what_is_heard(source, talker):
    id = ask(source, talker, short)
    eventually(lambda: request(source)[0] == "finished")
    assert request(source) == ("finished", "stop", "", 11, 4, "me")
    assert source.hub.text(1)[0]["text"] == "Hello there" and "user: hi" in source.hub.text(1)[0]["prompt"]
    assert source.hub.read(lambda state: (state.requests[1].id, len(state.ttfts))) == (id, 1)
    sent = next(json.loads(body) for _, path, _, body in talker.asked if path == "/v1/chat/completions")
    assert (sent["model"], sent["stream"], sent["max_tokens"]) == ("m", True, 9)
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    lines = b"".join(source.hub.lines_since(0) or [])
    assert KEY.encode() not in lines and talker.keys() == {f"Bearer {KEY}"}


def test_an_abort_closes_the_stream(source, talker):
    id = ask(source, talker, endless)
    eventually(lambda: request(source)[4] > 3)
    assert source.client.abort(id) == 1
    eventually(lambda: request(source)[:2] == ("finished", "abort"))
    eventually(lambda: talker.gone == 1, "the server noticed")
    assert source.client.abort(id) == source.client.abort("nobody") == 0


@pytest.mark.parametrize(("stream", "words"), [(broken, "on fire"), (cut, "before the answer was finished")])
def test_a_stream_that_breaks_is_an_error_with_its_reason(source, talker, stream, words):
    ask(source, talker, stream)
    eventually(lambda: request(source)[0] == "finished")
    assert request(source)[1] == "error" and words in request(source)[2] and request(source)[4] == 1


@pytest.mark.parametrize("when", ["after", "next"])
def test_a_server_that_drops_kept_connections_without_a_word(talker, when):
    """As llama.cpp's does."""
    talker.drops = when
    with attached(talker.url) as source:
        before = scrapes(ready(source))
        for number in (1, 2, 3):
            ask(source, talker, short)
            eventually(lambda number=number: request(source, number)[:2] == ("finished", "stop"))
            assert source.client.health() == ""
        eventually(lambda: scrapes(source) > before + 2)
        assert source.status.message == ""


def late(source, talker, said: Said) -> None:
    """Asks a server that lets us wait for the head of its answer, as llama.cpp's does while no slot is free."""
    talker.answers["/v1/chat/completions"] = said
    source.client.chat([{"role": "user", "content": "hi"}])
    assert request(source)[0] == "queued" and source.hub.read(lambda state: state.requests[1].spans[0][2]) is None


def test_a_request_that_the_server_lets_wait_is_seen_waiting(source, talker, monkeypatch):
    monkeypatch.setattr(sender, "WAITS_S", 0.1)
    late(source, talker, Said(stream=short, delay_s=0.4))
    eventually(lambda: request(source)[:2] == ("finished", "stop"))
    phases = source.hub.read(lambda state: [span[0] for span in state.requests[1].spans])
    assert phases == ["queued", "prefill", "decode"]


def test_a_request_that_is_refused_after_a_while_is_an_error(source, talker, monkeypatch):
    monkeypatch.setattr(sender, "WAITS_S", 0.1)
    late(source, talker, told({"error": {"message": "too much at once"}}, status=429, delay_s=0.4))
    eventually(lambda: request(source)[:3] == ("finished", "error", "too much at once"))


def test_a_refusal_is_no_request(source, talker):
    talker.answers["/v1/chat/completions"] = told({"error": {"message": "max_tokens is too large"}}, status=400)
    with pytest.raises(EngineError, match="too large") as refused:
        source.client.chat([{"role": "user", "content": "hi"}])
    assert refused.value.status == 400 and source.hub.read(lambda state: state.requests) == {}


def test_a_server_that_does_not_know_our_extras_is_asked_without_them(source, talker):
    async def picky(question: dict) -> AsyncIterator[bytes]:
        async for part in short(question):
            yield part

    no = told({"error": {"message": "unknown field: stream_options"}}, status=400)
    talker.choose = lambda path, body: no if b"stream_options" in body else None
    ask(source, talker, picky)
    eventually(lambda: request(source)[:2] == ("finished", "stop"))
    posts = [json.loads(body) for _, path, _, body in talker.asked if path == "/v1/chat/completions"]
    assert ["stream_options" in post for post in posts] == [True, False] and all(post["stream"] for post in posts)


def test_closing_ends_what_is_in_flight(talker):
    with attached(talker.url) as source:
        ask(ready(source), talker, endless)
        eventually(lambda: request(source)[4] > 0)
    assert request(source)[:2] == ("finished", "abort")
    eventually(lambda: talker.gone == 1)


def test_synthetic_users_are_requests_of_our_own(source, talker):
    talker.answers["/v1/chat/completions"] = Said(stream=short)
    client = source.client
    users = Users(source.background, lambda: client.url, client.headers, send=client.send)
    users.start(3, Habits(think_s=(0.0, 0.01)))
    eventually(lambda: users.counts.done >= 9)
    talker.answers["/v1/chat/completions"] = told({"error": {"message": "too many"}}, status=429)
    eventually(lambda: users.counts.failed > 0)
    users.stop()
    assert users.counts.last_error == "too many" and users.counts.in_flight == 0
    names, live = source.hub.read(lambda state: ({r.user for r in state.requests.values()}, state.in_flight))
    assert names == {"user 1", "user 2", "user 3"} and live == 0


def test_what_only_an_engine_of_our_own_can_do_says_why(source, talker):
    client = source.client
    for ask, words in (
        (client.state, "does not tell its state"),
        (lambda: client.configure({"chunk_size": 1}), "where it is started"),
        (lambda: client.hold(1.0), "between two steps"),
        (client.ceilings, "not known"),
        (client.measure_ceilings, "not known"),
        (client.watch_telemetry, "sensors"),
        (client.reset, "VLLM_SERVER_DEV_MODE"),
        (lambda: client.tokenize("a"), "no such command"),
    ):
        with pytest.raises(EngineError, match=words):
            ask()
    roofs = RoofKeeper(client, source.background)
    assert "vLLM's machine" in eventually(lambda: roofs.known("e")["text"])


def test_what_it_offers_is_used(source, talker):
    talker.answers |= {
        "/reset_prefix_cache": Said(),
        "/tokenize": told({"count": 2, "tokens": [5, 6]}),
        "/detokenize": told({"prompt": "hi"}),
        "/health": Said(),
    }
    client = source.client
    client.reset()
    assert (client.tokenize("hi"), client.detokenize([5, 6]), client.models(), client.health()) == (
        [5, 6],
        "hi",
        ["m"],
        "",
    )
    assert client.url == talker.url


# our own engine, seen from outside


def test_our_own_server_attached_as_a_foreign_one_tells_the_same_as_its_own_events():
    with serving(Bird()) as served:
        served.wait_ready()
        with attached(served.url) as source:
            ready(source)
            assert source.found.kind == "kvscope" and source.found.models == ["parrot"]
            ids = [source.client.chat([{"role": "user", "content": "hello" * n}], max_tokens=20) for n in (3, 9, 30)]
            source.client.complete([[65, 66, 67], [68, 69]], max_tokens=5)
            eventually(lambda: source.hub.read(lambda state: state.totals.finished) == 5, "all have ended")
            told = served.host.hub.read(lambda state: {r.id: r for r in state.requests.values()})
            heard = source.hub.read(lambda state: list(state.requests.values()))
            lengths = sorted((r.prompt_tokens, r.output_tokens) for r in told.values() if "chat" in r.id)
            assert sorted((r.prompt_tokens, r.output_tokens) for r in heard if r.id in ids) == lengths
            assert sum(r.output_tokens for r in heard if r.id not in ids) == 10
            output = served.host.hub.read(lambda state: state.totals.output_tokens)
            eventually(lambda: source.hub.read(lambda state: state.totals.output_tokens) == output, "counters agree")
            model, evidence = source.hub.read(lambda state: (state.model, state.evidence))
            own = served.host.hub.read(lambda state: state.model.kv_bytes_per_token)
            assert (model.kv_bytes_per_token, evidence) == (own, "measured")
            # Its blocks have 4 tokens, cells of the map 16.
            assert source.hub.read(lambda state: (state.num_blocks, state.block_size)) == (32, 16)
            assert source.hub.read(lambda state: state.gaps) == 0
            assert source.client.tokenize("abc") == [97, 98, 99]
            source.client.reset()


def test_kv_events_fill_the_map_and_are_told_again_to_a_new_epoch():
    pytest.importorskip("zmq")
    from tests.sources.attach.wire import Publisher, payload, stored

    publisher = Publisher()
    sources = told({"0": {"endpoint": publisher.url, "replay_endpoint": publisher.replay_url, "topic": "kv-events"}})
    ids = list(range(100, 132))
    publisher.send(payload(stored(5, tokens=ids, size=32), stored(6, parent=5, size=32)))

    answering = threading.Event()

    async def with_ids(question: dict) -> AsyncIterator[bytes]:
        assert question["return_token_ids"]
        yield piece("a", token_ids=ids[-1:], prompt_token_ids=ids[:-1])
        await asyncio.to_thread(answering.wait, 10)
        yield piece("", finish_reason="stop")

    answers = {"/metrics": Said(recorded("vllm_metrics_load")), "/v1/models": MODELS, "/kv_event_sources": sources}
    with Talker(answers) as talker:
        talker.answers["/v1/chat/completions"] = Said(stream=with_ids)
        with attached(talker.url, kv_events=f"{publisher.url},{publisher.replay_url}") as source:
            eventually(lambda: source.hub.read(lambda state: state.pool.resident_blocks) == 2, "both blocks")
            views = lambda state: {view.view: view.quality for view in state.capabilities.views}  # noqa: E731
            eventually(lambda: source.hub.read(views)["prefix_tree"] in ("exact", "derived"), "it is said")
            source.client.chat([{"role": "user", "content": "hi"}])
            eventually(lambda: len(source.table_of(1)) == 1, "its one full block, by its tokens, while it is answered")
            answering.set()
            eventually(lambda: request(source)[0] == "finished")
            assert len(source.table_of(1)) == 1 and source.table_of(7) == []
            cached = source.hub.read(lambda state: state.scrape.values["cached_tokens_gpu"])
            assert (cached.value, cached.name) == (64, "KV events")
            epoch = source.hub.read(lambda state: state.epoch)
            talker.answers["/metrics"] = Said(recorded("vllm_metrics_preemptions"))
            eventually(lambda: source.hub.read(lambda state: state.epoch) != epoch, "another process, another epoch")
            eventually(lambda: source.hub.read(lambda state: state.pool.resident_blocks) == 2, "told again")
            assert source.hub.read(lambda state: state.num_blocks) == 63
    publisher.close()


def test_requests_in_flight_are_told_again_to_a_new_epoch():
    answering = threading.Event()

    async def slowly(question: dict) -> AsyncIterator[bytes]:
        yield piece("a")
        await asyncio.to_thread(answering.wait, 10)
        yield piece("b", finish_reason="stop")

    answers = {"/metrics": Said(recorded("vllm_metrics_load")), "/v1/models": MODELS}
    with Talker(answers) as talker, attached(talker.url) as source:
        ready(source)
        talker.answers["/v1/chat/completions"] = Said(stream=slowly)
        source.client.chat([{"role": "user", "content": "hi"}], user="me")
        eventually(lambda: request(source)[0] == "decode", "a word")
        epoch = source.hub.read(lambda state: state.epoch)
        talker.answers["/metrics"] = Said(recorded("vllm_metrics_preemptions"))
        eventually(lambda: source.hub.read(lambda state: state.epoch) != epoch, "another process, another epoch")
        eventually(lambda: source.hub.read(lambda state: 1 in state.requests) and request(source)[0] == "decode")
        assert request(source)[4:] == (1, "me")
        answering.set()
        eventually(lambda: request(source)[:2] == ("finished", "stop"))


def test_pages_of_one_token_share_cells():
    rows = [line(f"sglang:{name}", value) for name, value in (
        ("num_running_reqs", 1), ("page_size", 1), ("max_total_num_tokens", 1600), ("token_usage", 0.5),
    )]  # fmt: skip
    with Talker({"/metrics": Said(body(rows))}) as talker, attached(talker.url) as source:
        ready(source)
        state = source.hub.read(lambda state: state)
        assert (state.num_blocks, state.block_size, state.pool.used_blocks) == (100, 16, 50)
        assert "cells of 16 blocks" in state.scrape.values["used_blocks"].note


def test_a_modelled_engine_is_never_called_measured():
    info = {"block_size": "16", "num_gpu_blocks": "10", "kvscope_evidence": "modelled", "kv_cache_memory_bytes": "1000"}
    text = body(
        line("vllm:cache_config_info", 1, **info, kv_cache_size_tokens="160"), line("kvscope:kv_evictions_total", 1)
    )
    with Talker({"/metrics": Said(text)}) as talker, attached(talker.url) as source:
        ready(source)
        assert source.hub.read(lambda state: (state.evidence, state.source)) == ("modelled", "kvscope")
        assert source.hub.read(lambda state: state.model.kv_bytes_per_token) == 0  # 1000 bytes are not 160 tokens


def test_metrics_that_name_no_cache_have_no_map():
    text = body(line("sglang:num_running_reqs", 1, model_name="m"))
    with Talker({"/metrics": Said(text)}) as talker, attached(talker.url) as source:
        ready(source)
        assert source.hub.read(lambda state: (state.num_blocks, state.block_size)) == (0, 0)
        kinds = [type(events.decode(told)) for told in source.hub.lines_since(0)][:3]
        assert kinds == [events.Hello, events.Capabilities, events.Scrape]
