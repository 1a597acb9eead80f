"""Ceilings and sensors over HTTP."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from backend import events, fold
from backend.telemetry import ceiling
from tests.nvml import library
from tests.server.conftest import eventually, serving
from tests.server.scripted import Bird

SLOW_S = 0.01


@pytest.fixture
def own():
    """A server of one's own, for what changes it."""
    with serving(Bird()) as served, httpx.Client(base_url=served.wait_ready().url, timeout=20) as http:
        yield served, http


@pytest.fixture
def measuring(monkeypatch):
    """What was measured so far; a measurement takes until `gate` is set."""
    measured, kept, gate = [], {}, threading.Event()
    gate.set()

    def measure(device: str, dtype: str, progress) -> ceiling.Ceilings:
        progress(0.25, "copy")
        gate.wait(20)
        measured.append((device, dtype))
        value = ceiling.Ceiling(value=1e10, low=9e9, high=1.1e10, unit="B/s", way="copy_", ways={}, rounds=7)
        where = ceiling.Conditions(device=device, device_name="d", host="h", dtype=dtype, threads=1, torch="2")
        return ceiling.Ceilings(copy=value, read=value, matmul=value, conditions=where)

    monkeypatch.setattr(ceiling, "measure", measure)
    monkeypatch.setattr(ceiling, "cached", lambda device, dtype: kept.get(device))
    monkeypatch.setattr(ceiling, "keep", lambda found: kept.update({found.conditions.device: found}))
    return measured, gate


def test_ceilings_are_measured_when_asked_and_kept(own, measuring):
    _served, http = own
    measured, _ = measuring
    assert http.get("/engine/ceilings").json() is None
    for _ in range(2):
        found = http.post("/engine/ceilings", json={}).json()
        assert (found["read"]["value"], found["read"]["low"], found["conditions"]["dtype"]) == (1e10, 9e9, "float32")
    assert http.get("/engine/ceilings").json() == found
    assert measured == [("cpu", "float32")]
    assert http.post("/engine/ceilings", json={"fresh": True}).json() == found
    assert len(measured) == 2


def test_ceilings_are_not_measured_while_a_request_runs(own, measuring):
    served, http = own
    served.bird.runner.step_s = SLOW_S
    with http.stream("POST", "/v1/completions", json={"prompt": "busy", "max_tokens": 400, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: a dropped iterator closes the stream
        next(lines)
        busy = httpx.post(f"{served.url}/engine/ceilings", json={"fresh": True})
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "not_idle")
    eventually(served.idle)
    assert measuring[0] == []


def test_a_measurement_tells_how_far_it_is_and_is_alone(own, measuring):
    served, http = own
    _, gate = measuring
    gate.clear()
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{served.url}/engine/ceilings", json={"fresh": True}, timeout=20))
    )
    progress = lambda: http.get("/engine/ceilings", params={"progress": "1"}).json()  # noqa: E731
    assert progress() == {"measuring": False, "share": 0.0, "text": ""}
    asking.start()
    eventually(lambda: progress() == {"measuring": True, "share": 0.25, "text": "copy"})
    second = http.post("/engine/ceilings", json={"fresh": True})
    assert second.status_code == 409 and "already" in second.json()["error"]["message"]
    gate.set()
    asking.join(20)
    assert answers[0].status_code == 200
    assert progress()["measuring"] is False


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "/engine/ceilings", {"fresh": 1}, "fresh"),
        ("GET", "/engine/ceilings?progress=x", None, "progress"),
        ("POST", "/engine/telemetry/watch", {"panels": "pcie"}, "panels"),
        ("POST", "/engine/telemetry/watch", {"panels": ["x" * 99]}, "panels"),
        ("GET", "/engine/telemetry?format=xml", None, "format"),
    ],
)
def test_what_makes_no_sense_is_named(http, method, path, body, field):
    answer = http.request(method, path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_sensors_are_read_for_who_asks(own):
    _served, http = own
    found = http.get("/engine/telemetry").json()
    host = found["devices"]["devices"][-1]
    assert (host["uuid"], host["used"]) == ("host", True)
    latest = found["latest"][-1]
    assert 0 < latest["memory_available"]["value"] < host["memory_bytes"]
    assert 0 <= latest["memory_available"]["age_s"] < 20 and found["age_s"] < 20
    assert "dram_bandwidth" not in latest
    table = http.get("/engine/telemetry", params={"format": "csv"}).text.splitlines()
    assert table[0] == "t_s,t0_s,device,name,reading,value,unit,source,label"
    assert any(",memory_available," in line and ",B,proc,measured: operating system" in line for line in table)
    lines = http.get("/engine/telemetry", params={"format": "jsonl"}).text.splitlines()
    assert json.loads(lines[-1])["values"]["memory_available"]["unit"] == "B"


def test_readings_are_events_on_the_engines_clock(own):
    served, http = own
    assert http.post("/engine/telemetry/watch", json={"panels": ["pcie"]}).json() == {"lease_s": 10.0}
    http.post("/v1/completions", json={"prompt": "hey", "max_tokens": 3})
    eventually(lambda: served.host.hub.read(lambda state: len(state.samples)) >= 2)
    state, readings = fold.State(), []
    for line in http.get("/engine/events", params={"since": 0}).text.splitlines():
        event = events.decode(line)
        fold.apply(state, event)
        if isinstance(event, events.Sample):
            readings.append(event)
    assert state.gaps == 0 and state.devices.devices[-1].uuid == "host"
    assert all(0 <= r.t0 <= r.t for r in readings)
    assert [r.t for r in readings] == sorted(r.t for r in readings)
    assert len(state.samples) == len(readings) >= 2


def test_hardware_is_not_there_before_the_engine_is():
    bird = Bird()
    bird.boot_gate.clear()
    with serving(bird) as served, httpx.Client(base_url=served.url, timeout=20) as http:
        for method, path in (
            ("GET", "/engine/telemetry"), ("POST", "/engine/telemetry/watch"), ("GET", "/engine/ceilings"),
        ):  # fmt: skip
            assert http.request(method, path, json={}).status_code == 503, path


@pytest.mark.skipif(not library.COMPILER, reason=library.NO_COMPILER)
def test_a_driver_that_hangs_holds_neither_answers_nor_tokens(tmp_path, monkeypatch):
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    for key, value in library.variables("t4", tmp_path).items():
        monkeypatch.setenv(key, value)
    script = library.Script(tmp_path / "t4.txt")
    with serving(Bird()) as served, httpx.Client(base_url=served.wait_ready().url, timeout=20) as http:
        first = http.get("/engine/telemetry").json()
        assert first["devices"]["devices"][0]["fake"] and first["latest"][0]["gpu_busy"]["value"] == 96
        script.update({"delay_ms.nvmlDeviceGetUtilizationRates": 2000})
        eventually(lambda: http.get("/engine/telemetry").json()["hung_s"] > 0.3)
        answer = http.post("/v1/completions", json={"prompt": "hey", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "hey"

        def old() -> bool:
            """Readers see how old a value is, and that a reading does not come back."""
            late = http.get("/engine/telemetry").json()
            return late["latest"][0]["gpu_busy"]["age_s"] > 0.3 and late["hung_s"] > 0.3

        eventually(old)
        script.update({"delay_ms.nvmlDeviceGetUtilizationRates": None})
        thread = served.host.sampler._thread
    eventually(lambda: not thread.is_alive())  # it has the library to itself; the next test wants it too
