"""The engine's process: started, watched, restarted, never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backend.sources import Source, embedded, open_source
from backend.sources.embedded import EmbeddedEngine, flags
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
FAKE = (sys.executable, str(ROOT / "tests" / "sources" / "fake_engine.py"))


def opened(**options) -> Source:
    return open_source(options, environ={}, command=FAKE)


@pytest.fixture
def source() -> Iterator[Source]:
    source = opened()
    yield source
    source.close()


def pid_of(source: Source) -> int:
    return source.engine._run._process.pid


def ready(source: Source) -> None:
    eventually(lambda: source.status.phase == "ready", "ready")


def steps(source: Source) -> int:
    return source.hub.read(lambda state: state.totals.steps)


def test_it_starts_and_its_events_come_in(source):
    assert source.kind == "embedded" and source.can_restart
    assert source.status.phase == "starting"
    ready(source)
    eventually(lambda: steps(source) > 5)
    assert source.client.health() == ""
    first = json.loads(next(line for line in source.status.lines if line.startswith("{")))
    assert first["flags"] == ["--port", "0", "--die-with-parent"]
    assert (first["OMP_WAIT_POLICY"], first["GOMP_SPINCOUNT"]) == ("PASSIVE", "3000") and int(
        first["OMP_NUM_THREADS"]
    ) >= 1


def test_while_it_loads_its_log_is_the_progress():
    source = opened(model="slow", threads=1)
    try:
        status = eventually(lambda: (s := source.status).phase == "starting" and "loading shards 2/2" in s.lines and s)
        assert "loading shards 1/2" in status.lines  # without its escape codes
        eventually(lambda: source.status.message == "loading the model", "the engine's own reason")
        ready(source)
    finally:
        source.close()


def test_a_killed_process_is_dead_until_it_is_restarted(source):
    ready(source)
    eventually(lambda: steps(source) > 2)
    epoch, pid = source.hub.read(lambda state: state.epoch), pid_of(source)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: source.status.exit_code == -9)
    assert source.status.phase == "dead" and "signal 9" in source.status.message
    assert source.hub.read(lambda state: state.epoch) == epoch  # the last picture stays

    source.restart({"num_blocks": 33})
    eventually(lambda: source.status.phase == "ready" and source.hub.read(lambda state: state.epoch) != epoch)
    assert source.hub.read(lambda state: (state.num_blocks, state.gaps)) == (33, 0)
    eventually(lambda: steps(source) > 2)


def test_a_running_process_can_be_restarted(source):
    ready(source)
    pid = pid_of(source)
    source.restart()
    assert not psutil.pid_exists(pid)
    ready(source)
    assert pid_of(source) != pid


def test_a_model_that_is_refused_is_refused_in_its_words():
    source = opened(model="refused")
    try:
        eventually(lambda: source.status.phase == "refused")
        assert source.status.message == "the model is not one that we can serve"
        assert source.client.health() == source.status.message
        source.restart({"model": "good"})
        ready(source)
    finally:
        source.close()


@pytest.mark.parametrize(
    ("how", "code", "line"), [("silent", 2, "error: cannot listen"), ("crash", 3, "something broke")]
)
def test_a_process_that_ends_by_itself_leaves_its_last_words(how, code, line):
    source = opened(model=how)
    try:
        eventually(lambda: source.status.exit_code == code)
        assert source.status.phase == "dead" and f"exit code {code}" in source.status.message
        eventually(lambda: line in source.status.lines)
        assert source.client.health()
    finally:
        source.close()


def test_a_fatal_fault_is_death_although_the_process_lives(source):
    from backend import events

    ready(source)
    source.hub.ingest(events.encode(events.Fault(message="block 3 released twice", fatal=True)))
    assert (source.status.phase, source.status.message) == ("dead", "block 3 released twice")


def test_nothing_to_start_is_an_error():
    with pytest.raises(OSError):
        open_source({}, environ={}, command=["/no/such/program"])


def test_closing_ends_the_process_even_one_that_is_deaf(monkeypatch):
    monkeypatch.setattr(embedded, "END_S", 0.2)
    monkeypatch.setattr(embedded, "KILL_S", 0.2)
    source = opened(model="deaf")
    ready(source)
    pid = pid_of(source)
    source.close()
    assert not psutil.pid_exists(pid)
    assert source.status.phase == "stopped"
    source.close()


def test_no_process_is_left_behind_when_ours_is_killed():
    script = f"""
import os, signal, time
from backend.sources.embedded import EmbeddedEngine
engine = EmbeddedEngine({{}}, command={FAKE!r})
engine.start()
while engine.url is None:
    time.sleep(0.01)
print(engine._run._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)
    eventually(lambda: not psutil.pid_exists(pid), "the engine is gone")


def test_no_process_is_left_behind_when_ours_forgets_it():
    script = f"""
from backend.sources.embedded import EmbeddedEngine
engine = EmbeddedEngine({{}}, command={FAKE!r})
engine.start()
print(engine._run._process.pid, flush=True)
"""
    parent = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert parent.returncode == 0
    assert not psutil.pid_exists(int(parent.stdout))


def test_flags():
    assert flags({}) == ["--port", "0", "--die-with-parent"]
    given = flags({"num_blocks": 64, "prefix_cache": False, "dtype": None, "model": "a b", "policy": "static"})
    assert given[3:] == ["--num-blocks", "64", "--no-prefix-cache", "--model", "a b", "--policy", "static"]
    assert flags({"prefix_cache": True})[3:] == []


def test_the_ui_process_stays_free_of_torch():
    """Sources, hub and users are what the page's process imports of the backend."""
    script = (
        "import sys, backend.sources, backend.hub, backend.server.live, backend.workload.users\n"
        "print([name for name in ('torch', 'transformers', 'streamlit') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_stopped_is_not_dead():
    engine = EmbeddedEngine({}, command=FAKE)
    assert engine.status.phase == "stopped"
    engine.start()
    engine.stop()
    assert engine.status.phase == "stopped" and engine.url is None
