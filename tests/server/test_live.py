"""The live WebSocket in a real server, read by a real client."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from backend import events
from backend.hub import Hub
from backend.server import live
from tests.scripted_engine import ScriptedEngine
from tests.test_hub import Viewer, state_of, without_seq

DEADLINE_S = 20
TOKEN = "a token"


class Site:
    """A server with the live route, its hub, and a scripted engine that publishes into it."""

    def __init__(self, hub: Hub, address: str, prefix: str):
        self.hub, self.address = hub, address
        self.url = f"ws://{address}{prefix}{live.PATH}?token=a%20token"
        self.engine = ScriptedEngine(hub.publish, blocks=60, running=6, prompt=(5, 40), output=(5, 30), seed=5)
        self.engine.hello()
        self.engine.top_up(7)

    def steps(self, count: int, pause_s: float = 0.0) -> None:
        for _ in self.engine.run(count):
            if pause_s:
                time.sleep(pause_s)


@contextmanager
def serving(prefix: str = "", **options) -> Iterator[Site]:
    hub = Hub()
    app = Starlette(routes=live.routes(options.pop("get_hub", lambda: hub), prefix, token=TOKEN, **options))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield Site(hub, f"127.0.0.1:{listening.getsockname()[1]}", prefix)
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listening.close()
        assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="module")
def shared_site() -> Iterator[Site]:
    with serving(prefix="/base", allowed_origins=["https://friend.example"]) as site:
        yield site


def read_until(client: ClientConnection, viewer: Viewer, enough: Callable[[Viewer], bool]) -> list[dict]:
    """Messages that came; fails when `enough` does not come true in time."""
    deadline, messages = time.monotonic() + DEADLINE_S, []
    while not enough(viewer):
        frame = client.recv(timeout=max(0.01, deadline - time.monotonic()))
        viewer.take(frame)
        messages += json.loads(frame)
    return messages


def question(client: ClientConnection, kind: str, **asked) -> dict:
    client.send(json.dumps(asked))
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for message in json.loads(client.recv(timeout=max(0.01, deadline - time.monotonic()))):
            if message["type"] == kind:
                return message


@pytest.mark.parametrize(
    ("query", "origin"),
    [
        ("", None),
        ("?token=", None),
        ("?token=wrong", None),
        ("?token=a%20token", "https://evil.example"),
        ("?token=a%20token", "null"),
        ("?token=%C3%A9", None),
    ],
)
def test_strangers_stay_outside(shared_site, query, origin):
    with pytest.raises(InvalidStatus) as refused:
        connect(shared_site.url.split("?")[0] + query, origin=origin)
    assert refused.value.response.status_code == 403


def test_own_pages_and_named_ones_come_in(shared_site):
    for origin in (None, f"http://{shared_site.address}", "https://friend.example"):
        with connect(shared_site.url, origin=origin) as client:
            assert json.loads(client.recv(timeout=DEADLINE_S))[0]["type"] == "snapshot"


def test_a_snapshot_first_then_only_what_is_new(shared_site):
    site, viewer = shared_site, Viewer()
    with connect(site.url) as client:
        read_until(client, viewer, lambda v: v.state.epoch == "scripted")
        site.steps(30, pause_s=0.002)
        messages = read_until(client, viewer, lambda v: v.state.step == site.engine.steps)
    assert {message["type"] for message in messages} <= {"step", "queued", "finished"}
    assert viewer.snapshots == 1


def test_no_more_than_sixty_arrays_a_second():
    with serving() as site, connect(site.url) as client:
        viewer, frames = Viewer(), 0
        read_until(client, viewer, lambda v: v.state.epoch != "")
        worker = threading.Thread(target=site.steps, args=(500, 0.002))
        begin = time.monotonic()
        worker.start()
        while viewer.state.step < 500:
            viewer.take(client.recv(timeout=DEADLINE_S))
            frames += 1
        elapsed = time.monotonic() - begin
        worker.join()
        assert frames <= 60 * elapsed + 2
        assert viewer.snapshots == 1


def test_a_viewer_that_does_not_read_holds_up_nobody_and_catches_up():
    with serving() as site, connect(site.url, max_queue=1, max_size=None) as slow, connect(site.url) as quick:
        viewer = Viewer()
        for _ in range(40):
            site.steps(100)
            read_until(quick, viewer, lambda v: v.state.step == site.engine.steps)
        behind, frames = Viewer(), 0
        while behind.state.step < site.engine.steps:
            behind.take(slow.recv(timeout=DEADLINE_S))
            frames += 1
        assert frames < 40 * 100 / 10
        assert without_seq(behind.state) == without_seq(viewer.state)


def test_twenty_viewers_see_the_same():
    with serving() as site, ExitStack() as stack:
        clients = [stack.enter_context(connect(site.url)) for _ in range(20)]
        viewers = [Viewer() for _ in clients]
        worker = threading.Thread(target=site.steps, args=(40, 0.005))
        worker.start()
        for client, viewer in zip(clients, viewers, strict=True):
            read_until(client, viewer, lambda v: v.state.step == 40)
        worker.join()
        expected = state_of(site.hub)
        for client, viewer in zip(clients, viewers, strict=True):
            # what came after the step: requests that ended with it
            read_until(client, viewer, lambda v: without_seq(v.state) == expected)


def test_reading_along_blocks_and_tables():
    with serving() as site, connect(site.url) as client:
        site.steps(10)
        job = site.engine.running[0]
        told = question(client, "text", watch=[job.number])
        assert told["prompt"] == "".join(job.pieces[: job.prompt]) and told["from"] == 0
        site.steps(1)
        more = question(client, "text", watch=[job.number])
        assert "prompt" not in more and more["from"] == len(told["text"].encode("utf-16-le")) // 2
        job = site.engine.running[-1]
        assert question(client, "table", table=job.number)["blocks"][0][0] == job.table[0]
        block = question(client, "block", block=job.table[0])
        assert job.number in block["owners"] and block["text"]
        tree = question(client, "tree", tree=1)
        assert any(job.number in holders for _, _, _, holders, *_ in tree["nodes"])


def test_a_table_that_only_somebody_concludes_is_told_as_inferred():
    told = []
    extras = live.Extras(inferred=lambda request: told.append(request) or [0, 1])
    with serving(get_extras=lambda: extras) as site, connect(site.url) as client:
        site.steps(10)
        job = site.engine.running[0]
        answer = question(client, "table", table=job.number)
        assert answer["inferred"] is True and [block for block, _ in answer["blocks"]] == [0, 1]
        assert told == [job.number]


def test_what_does_not_exist_is_not_answered_and_does_no_harm():
    with serving() as site, connect(site.url) as client:
        client.send(json.dumps({"watch": [999, -1], "block": 10**9, "table": 12345, "later": True}))
        site.steps(3)
        viewer = Viewer()
        messages = read_until(client, viewer, lambda v: v.state.step == 3)
        assert not {"text", "block", "table"} & {message["type"] for message in messages}


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("nonsense", 1003),
        ("[]", 1003),
        ('{"watch": "all"}', 1003),
        ('{"block": 1.5}', 1003),
        (b"{}", 1003),
        ('{"watch": [' + ",".join(["1"] * 17) + "]}", 1003),
        ('{"watch": []' + " " * 5000 + "}", 1009),
    ],
)
def test_whoever_says_something_else_is_shown_out(shared_site, said, code):
    with connect(shared_site.url) as client:
        client.recv(timeout=DEADLINE_S)
        client.send(said)
        with pytest.raises(ConnectionClosed) as closed:
            for _ in range(100):
                client.recv(timeout=DEADLINE_S)
        assert closed.value.rcvd.code == code


def test_the_server_ends_at_once_with_viewers_that_read_and_that_do_not():
    with ExitStack() as clients:
        with serving() as site:
            reading = clients.enter_context(connect(site.url, max_size=None))
            stuck = clients.enter_context(connect(site.url, max_queue=1, close_timeout=0.5))
            for client in (reading, stuck):
                client.recv(timeout=DEADLINE_S)
            for _ in range(12):  # far more than the buffers between the two hold
                site.engine.seq += 1
                site.hub.publish(events.Fault(seq=site.engine.seq, message="x" * 10**6))
            read_until(reading, Viewer(), lambda v: v.state.fault != "")
            begin = time.monotonic()
        assert time.monotonic() - begin < 5
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                reading.recv(timeout=DEADLINE_S)
        assert closed.value.rcvd.code == 1012


def test_a_page_hears_when_it_was_drawn_from_something_that_has_changed():
    pulse = ["a"]
    with serving(get_extras=lambda: live.Extras(pulse=lambda: pulse[0])) as site, connect(site.url) as client:
        said = []

        def heard(wanted: int) -> list[str]:
            deadline = time.monotonic() + DEADLINE_S
            while len(said) < wanted:
                frame = json.loads(client.recv(timeout=max(0.01, deadline - time.monotonic())))
                said.extend(message["pulse"] for message in frame if message["type"] == "pulse")
            return said

        assert heard(1) == ["a"]
        pulse[0] = "b"  # while no event comes
        assert heard(2) == ["a", "b"]
        site.steps(5)
        pulse[0] = "c"
        assert heard(3) == ["a", "b", "c"]  # each said once


def test_phases_come_only_to_those_who_ask_and_only_when_they_are_new():
    asked, said = [], ['{"type":"phases","t":1}']

    def phases() -> str:
        asked.append(1)
        return said[0]

    extras = live.Extras(phases=phases)
    with serving(get_extras=lambda: extras) as site, connect(site.url) as silent, connect(site.url) as asking:
        site.steps(20)
        read_until(silent, Viewer(), lambda v: v.state.step == 20)
        assert not asked, "nobody asked, nothing may be computed"
        assert question(asking, "phases", phases=True)["t"] == 1
        said[0] = '{"type":"phases","t":2}'  # while no event comes, as when ceilings are measured
        more = []
        while not more:
            frame = json.loads(asking.recv(timeout=DEADLINE_S))
            more = [message["t"] for message in frame if message["type"] == "phases"]
        assert more == [2]
        asking.send(json.dumps({"phases": False}))
        question(asking, "table", table=site.engine.running[0].number)  # it has been heard
        count = len(asked)
        site.steps(5)
        assert not [m for m in read_until(silent, Viewer(), lambda v: v.state.step == 25) if m["type"] == "phases"]
        assert len(asked) == count


def test_a_lease_on_phases_ends_by_itself(monkeypatch):
    monkeypatch.setattr(live, "LEASE_S", 0.0)
    asked = []
    extras = live.Extras(phases=lambda: asked.append(1) or "")
    with serving(get_extras=lambda: extras) as site, connect(site.url) as client:
        client.send(json.dumps({"phases": True}))
        site.steps(3)
        read_until(client, Viewer(), lambda v: v.state.step == 3)
        assert not asked


def test_who_looks_at_sensors_is_passed_on():
    wanted = []
    extras = live.Extras(watch_telemetry=wanted.append)
    with serving(get_extras=lambda: extras) as site, connect(site.url) as client:
        client.send(json.dumps({"telemetry": ["pcie"]}))
        client.send(json.dumps({"telemetry": []}))
        site.steps(2)
        job = site.engine.running[0]
        question(client, "table", table=job.number)
        assert wanted == [["pcie"], []]
        client.send(json.dumps({"telemetry": ["x" * 21]}))
        with pytest.raises(ConnectionClosed):
            while True:
                client.recv(timeout=DEADLINE_S)


def test_viewers_start_over_when_the_page_turns_to_another_source():
    own, other = Hub(), Hub()
    hubs = [own]
    with serving(get_hub=lambda: hubs[0]) as site, connect(site.url) as first, connect(site.url) as second:
        engine = ScriptedEngine(own.publish, blocks=60, running=6, prompt=(5, 40), output=(5, 30), seed=5)
        engine.hello()
        viewers = [(first, Viewer()), (second, Viewer())]
        for client, viewer in viewers:
            read_until(client, viewer, lambda v: v.state.epoch == "scripted")
        model, device = events.ModelInfo(name="another"), events.DeviceInfo()
        other.publish(events.Hello(seq=1, epoch="elsewhere", model=model, device=device, num_blocks=7, block_size=32))
        hubs[0] = other
        for client, viewer in viewers:
            read_until(client, viewer, lambda v: v.state.epoch == "elsewhere")
            assert viewer.state.num_blocks == 7 and not viewer.state.requests
        other.publish(events.Fault(seq=2, message="heard of the other one"))
        for client, viewer in viewers:
            read_until(client, viewer, lambda v: v.state.fault == "heard of the other one")
        hubs[0] = own  # back again: the same connection, and nothing of the other one is left
        for client, viewer in viewers:
            read_until(client, viewer, lambda v: v.state.epoch == "scripted")
            assert viewer.state.num_blocks == 60 and not viewer.state.fault


def test_a_fleet_comes_only_to_those_who_ask_with_the_replica_that_they_chose():
    asked = []

    def fleet(chosen: str) -> str:
        asked.append(chosen)
        return json.dumps({"type": "fleet", "chosen": chosen})

    extras = live.Extras(fleet=fleet)
    with serving(get_extras=lambda: extras) as site, connect(site.url) as silent, connect(site.url) as asking:
        site.steps(3)
        read_until(silent, Viewer(), lambda v: v.state.step == 3)
        assert not asked
        assert question(asking, "fleet", fleet="")["chosen"] == ""
        assert question(asking, "fleet", fleet="http://a:1")["chosen"] == "http://a:1"
        site.steps(3)
        assert not [m for m in read_until(silent, Viewer(), lambda v: v.state.step == 6) if m["type"] == "fleet"]
        asking.send(json.dumps({"fleet": "x" * 601}))
        with pytest.raises(ConnectionClosed):
            while True:
                asking.recv(timeout=DEADLINE_S)
