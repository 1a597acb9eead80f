"""An engine over HTTP: followed through cuts and restarts, and asked things."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from backend import events
from backend.hub import Hub
from backend.sources import Source, SourceError, Status, follow, open_source
from backend.sources.remote import EngineError
from tests.scripted_engine import ScriptedEngine
from tests.sources.fake_engine import FakeEngine, Serving
from tests.test_hub import state_of
from tests.waiting import eventually


def remote(url: str, **environ: str) -> Source:
    return open_source(environ={"KVSCOPE_ENGINE_URL": url, **environ})


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def serving(engine) -> Iterator[Serving]:
    serving = Serving(engine)
    with serving:
        yield serving


@pytest.fixture
def source(serving) -> Iterator[Source]:
    source = remote(serving.url + "/")
    yield source
    source.close()


def script(hub: Hub, **options) -> ScriptedEngine:
    engine = ScriptedEngine(hub.publish, blocks=40, running=4, prompt=(5, 30), **options)
    engine.hello()
    engine.top_up(5)
    return engine


def caught_up(source: Source, engine: FakeEngine) -> None:
    seq = engine.hub.read(lambda state: state.seq)
    eventually(lambda: source.hub.read(lambda state: state.seq) == seq, "all events came")


def test_it_follows_a_running_engine(source, engine):
    work = script(engine.hub)
    eventually(lambda: source.status.phase == "ready")
    for _ in work.run(20):
        pass
    caught_up(source, engine)
    assert state_of(source.hub) == state_of(engine.hub)
    assert source.kind == "remote" and not source.can_restart
    with pytest.raises(SourceError, match="elsewhere"):
        source.restart()


def test_after_a_cut_it_goes_on_where_it_was(source, engine, serving):
    work = script(engine.hub)
    for _ in work.run(5):
        pass
    caught_up(source, engine)
    for _ in range(3):
        before = engine.seen["follow"]
        serving.cut()
        for _ in work.run(5):
            pass
        eventually(lambda before=before: engine.seen["follow"] > before)
        caught_up(source, engine)
    assert engine.seen["snapshot"] == 1
    assert state_of(source.hub) == state_of(engine.hub)


def test_a_new_epoch_behind_the_same_address_starts_over(source, engine, serving):
    for _ in script(engine.hub).run(10):
        pass
    caught_up(source, engine)
    serving.cut()
    engine.hub = Hub()  # another engine process: its numbers have passed ours when we ask
    for _ in script(engine.hub, epoch="second", seed=8).run(30):
        pass
    eventually(lambda: source.hub.read(lambda state: state.epoch) == "second")
    caught_up(source, engine)
    assert state_of(source.hub) == state_of(engine.hub)


def test_what_was_lost_is_made_good_by_a_snapshot(source, engine):
    work = script(engine.hub)
    for _ in work.run(5):
        pass
    caught_up(source, engine)
    work.seq += 7  # events that never reached the engine's hub
    work.step()
    # The engine's own hub has the hole too; what matters is that its follower notices and asks for a snapshot.
    eventually(lambda: engine.seen["snapshot"] == 2)
    for _ in work.run(3):
        pass
    caught_up(source, engine)
    assert source.hub.read(lambda state: state.gaps) == 0


def test_what_is_said_comes_too(source, engine):
    work = script(engine.hub)
    for _ in work.run(10):
        pass
    caught_up(source, engine)
    number = work.running[0].number
    assert source.hub.text(number) == engine.hub.text(number)
    assert source.hub.table(number) == engine.hub.table(number)


def test_it_waits_for_an_engine_that_is_not_there_yet(engine):
    with Serving(engine) as url:
        port = int(url.rpartition(":")[2])
    source = remote(url)
    try:
        eventually(lambda: source.status.phase == "dead")
        assert url in source.status.message
        again = FakeEngine()
        script(again.hub)
        with Serving(again, port):
            eventually(lambda: source.status.phase == "ready")
        eventually(lambda: source.status.phase == "dead")
    finally:
        source.close()


def test_an_open_port_without_an_answer(monkeypatch):
    """At first it is taken for an engine that still loads its code; one that served before hangs."""
    monkeypatch.setattr(follow, "SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        source = remote(f"http://127.0.0.1:{mute.getsockname()[1]}")
        try:
            taken = []
            for _ in range(3):
                taken.append(mute.accept()[0])
                assert source.status.phase == "starting"
            source._follower.status = Status(phase="ready")
            eventually(lambda: source.status.phase == "dead")
            assert "does not answer" in source.status.message
        finally:
            source.close()


def test_silence_is_no_death(serving, engine, monkeypatch):
    monkeypatch.setattr(follow, "SILENCE_S", 0.2)
    work = script(engine.hub)
    source = remote(serving.url)
    try:
        eventually(lambda: source.status.phase == "ready")
        eventually(lambda: engine.seen["follow"] >= 3, "it asked again")
        assert source.status.phase == "ready" and engine.seen["snapshot"] == 1
        work.step()
        caught_up(source, engine)
    finally:
        source.close()


def test_loading_and_refused_are_told_apart(serving, engine):
    engine.problem = "loading the model"
    source = remote(serving.url)
    try:
        eventually(lambda: (source.status.phase, source.status.message) == ("starting", "loading the model"))
        engine.problem = "no such model: nonesuch"
        eventually(lambda: (source.status.phase, source.status.message) == ("refused", "no such model: nonesuch"))
        engine.problem = ""
        script(engine.hub)
        eventually(lambda: source.status.phase == "ready")
    finally:
        source.close()


def test_the_key_is_read_from_its_file(tmp_path):
    engine = FakeEngine(key="a-key-of-sixteen")
    script(engine.hub)
    file = tmp_path / "key"
    with Serving(engine) as url:
        file.write_text("a-key-of-sixteen\n")
        source = remote(url, KVSCOPE_ENGINE_KEY_FILE=str(file))
        eventually(lambda: source.status.phase == "ready")
        assert source.client.models() == ["fake"]
        source.close()
        file.write_text("another-key")
        source = remote(url, KVSCOPE_ENGINE_KEY_FILE=str(file))
        eventually(lambda: source.status.phase == "refused")
        assert "API key" in source.status.message and "another-key" not in source.status.message
        source.close()


@pytest.mark.parametrize("url", ["box:8000", "ftp://box", "http://", "http://box:port"])
def test_an_address_that_cannot_be_is_refused_at_once(url):
    with pytest.raises(SourceError, match="KVSCOPE_ENGINE_URL"):
        remote(url)


def test_a_key_file_that_cannot_be_read_is_refused_at_once(tmp_path):
    with pytest.raises(SourceError, match="cannot be read"):
        remote("http://127.0.0.1:9", KVSCOPE_ENGINE_KEY_FILE=str(tmp_path / "none"))


def refused_with(serving: Serving) -> str:
    source = remote(serving.url)
    try:
        eventually(lambda: source.status.phase == "refused")
        return source.status.message
    finally:
        source.close()


def test_something_else_at_the_address(serving, engine):
    engine.app.router.routes[:] = []
    assert "no KVScope engine answers there" in refused_with(serving)


def test_lines_that_are_no_events(serving, monkeypatch):
    async def nonsense(self, since=None, epoch=""):
        yield [b"<html>"]

    monkeypatch.setattr(Hub, "follow", nonsense)
    assert "does not send KVScope's events" in refused_with(serving)


def test_a_newer_engine_is_refused_in_words(serving, monkeypatch):
    async def newer(self, since=None, epoch=""):
        yield [events.encode(events.Snapshot(schema=events.SCHEMA + 1, state={}))]

    monkeypatch.setattr(Hub, "follow", newer)
    assert "update KVScope" in refused_with(serving)


# asking


def test_questions_and_their_refusals(source, engine):
    client = source.client
    assert client.health() == "" and client.models() == ["fake"] and client.state()["config"]["block_size"] == 16
    assert client.configure({"block_size": 32}) == {"block_size": 32}
    client.reset()
    assert client.abort("nobody") == 0
    with pytest.raises(EngineError, match="unknown switch 'colour'") as refused:
        client.configure({"colour": 1})
    assert refused.value.status == 422
    engine.idle = False
    for ask in (client.reset, lambda: client.configure({"block_size": 8})):
        with pytest.raises(EngineError) as refused:
            ask()
        assert refused.value.status == 409
    with pytest.raises(EngineError, match="HTTP 404"):
        client.ceilings()


def test_a_chat_is_started_drained_and_known_by_its_id(source, engine):
    id = source.client.chat([{"role": "user", "content": "hello"}], max_tokens=5)
    assert id.startswith("chatcmpl-") and engine.ids == [id]
    assert engine.bodies[0] == {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True}
    eventually(lambda: engine.seen["ended"] == 1, "the stream was read to its end")
    assert source.client.abort(id) == 1
    assert source.client.complete("Once").startswith("cmpl-")


def test_a_chat_that_is_refused_says_why_at_once(source, engine):
    with pytest.raises(EngineError, match="the prompt is empty") as refused:
        source.client.chat([])
    assert refused.value.status == 400
    engine.full = True
    with pytest.raises(EngineError) as refused:
        source.client.chat([{"role": "user", "content": "x"}])
    assert refused.value.status == 429


def test_closing_lets_go_of_everything(engine, serving):
    engine.answer_s = 60
    script(engine.hub)
    before = set(threading.enumerate())
    source = remote(serving.url)
    eventually(lambda: source.status.phase == "ready")
    source.client.chat([{"role": "user", "content": "x"}])
    source.close()
    eventually(lambda: engine.seen["gone"] == 1)
    eventually(lambda: {t for t in threading.enumerate() if t.name.startswith("kvscope")} <= before)
    assert source.status.phase in ("ready", "dead")
    source.close()


def test_nobody_there():
    source = remote("http://127.0.0.1:9")
    try:
        assert "cannot reach the engine" in source.client.health()
        with pytest.raises(EngineError, match="cannot reach the engine"):
            source.client.chat([{"role": "user", "content": "x"}])
    finally:
        source.close()
