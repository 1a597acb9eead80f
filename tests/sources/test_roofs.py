"""What pages ask of an engine in the background: its ceilings, and to keep its sensors awake."""

from __future__ import annotations

import threading

import pytest

from backend.sources.background import Background
from backend.sources.lease import RENEW_S, TelemetryLease
from backend.sources.remote import EngineError
from backend.sources.roofs import RoofKeeper
from tests.waiting import eventually

CEILINGS = {"read": {"value": 1.0}}


@pytest.fixture
def background():
    background = Background("test")
    yield background
    background.close()


class Client:
    """An engine's answers; `go` lets a measurement end."""

    def __init__(self, found=CEILINGS):
        self.found, self.asked, self.go, self.watched = found, 0, threading.Event(), []

    def ceilings(self):
        self.asked += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def measure_ceilings(self):
        assert self.go.wait(20)
        if isinstance(self.found, Exception):
            raise self.found
        return {"read": {"value": 2.0}}

    def ceilings_progress(self):
        return {"share": 0.5, "text": "copy"}

    def watch_telemetry(self, panels):
        self.watched.append(panels)
        if isinstance(self.found, Exception):
            raise self.found


def test_ceilings_are_asked_once_an_epoch(background):
    client = Client()
    roofs = RoofKeeper(client, background)
    assert roofs.known("")["state"] == "unknown" and client.asked == 0  # nobody to ask
    eventually(lambda: roofs.known("one")["state"] == "measured")
    assert roofs.known("one")["ceilings"] == CEILINGS
    assert client.asked == 1
    eventually(lambda: roofs.known("two")["state"] == "measured")
    assert client.asked == 2


def test_an_engine_that_cannot_say_is_not_asked_at_every_look(background):
    client = Client(EngineError("busy", 409))
    roofs = RoofKeeper(client, background)
    eventually(lambda: roofs.known("one").get("text") == "busy")
    for _ in range(50):
        roofs.known("one")
    assert client.asked == 1 and "ceilings" not in roofs.known("one")


def test_measuring_tells_how_far_it_is_and_replaces_what_was_known(background):
    client = Client()
    roofs = RoofKeeper(client, background)
    eventually(lambda: roofs.known("one")["state"] == "measured")
    roofs.measure()
    eventually(lambda: roofs.known("one")["share"] == 0.5)
    assert roofs.known("one")["state"] == "measuring" and roofs.known("one")["ceilings"] == CEILINGS
    client.go.set()
    eventually(lambda: roofs.known("one")["state"] == "measured")
    assert roofs.known("one")["ceilings"] == {"read": {"value": 2.0}}


def test_a_refused_measurement_leaves_what_was_known(background):
    client = Client()
    roofs = RoofKeeper(client, background)
    eventually(lambda: roofs.known("one")["state"] == "measured")
    client.found = EngineError("2 requests run", 409)
    roofs.measure()
    client.go.set()
    eventually(lambda: roofs.known("one")["text"] == "2 requests run")
    assert roofs.known("one")["state"] == "measured" and roofs.known("one")["ceilings"] == CEILINGS


def test_many_viewers_renew_one_lease(background):
    client, now = Client(), [0.0]
    lease = TelemetryLease(client, background, clock=lambda: now[0])
    for _ in range(20):
        lease.renew([])
    eventually(lambda: client.watched == [[]] and not lease._asking)
    now[0] += RENEW_S
    lease.renew([])
    eventually(lambda: len(client.watched) == 2)


def test_an_opened_panel_does_not_wait_and_a_closed_one_is_forgotten(background):
    client, now = Client(), [0.0]
    lease = TelemetryLease(client, background, clock=lambda: now[0])
    lease.renew([])
    eventually(lambda: client.watched == [[]] and not lease._asking)
    lease.renew(["pcie"])
    eventually(lambda: client.watched[-1] == ["pcie"] and not lease._asking)
    now[0] += 3 * RENEW_S
    lease.renew([])
    eventually(lambda: client.watched[-1] == [] and len(client.watched) == 3)


def test_a_dead_engine_does_not_matter(background):
    client, now = Client(EngineError("cannot reach the engine")), [0.0]
    lease = TelemetryLease(client, background, clock=lambda: now[0])
    lease.renew([])
    eventually(lambda: len(client.watched) == 1 and not lease._asking)
    now[0] += RENEW_S
    lease.renew([])
    eventually(lambda: len(client.watched) == 2)
