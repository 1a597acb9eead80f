"""vLLM as a process of ours: its command, its log as progress, and nothing of it left behind."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from backend.sources.launch import VllmLaunch
from backend.sources.vllm_command import LaunchError, Options
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
def vllm(tmp_path) -> str:
    """Path of a program that behaves like vLLM's."""
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests/sources/fake_vllm.py"}" "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def launch() -> Iterator[VllmLaunch]:
    launch = VllmLaunch(patience_s=0.3)
    yield launch
    launch.stop()


def pids(launch: VllmLaunch) -> set[int]:
    """The leash, vLLM, and the process that vLLM started and that has left its group."""
    leash = psutil.Process(launch._run._process.pid)
    child = next(int(line.split()[1]) for line in launch.status.lines if line.startswith("child "))
    return {leash.pid, child, *(process.pid for process in leash.children(recursive=True))}


def gone(pids: set[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def ready(launch: VllmLaunch) -> str:
    return eventually(lambda: launch.status.url, "ready")


def test_it_starts_says_how_far_it_is_and_serves(vllm, launch):
    seen = []
    launch.changed = lambda: seen.append((launch.status.phase, launch.status.share))
    launch.start(Options(model="some/good", name="m"), executable=vllm)
    url = ready(launch)
    phases = [phase for phase, _ in seen]
    assert phases[0] == "starting" and "weights" in phases and phases[-1] == "ready"
    assert [share for _, share in seen] == sorted(share for _, share in seen)
    argv = httpx.get(f"{url}/argv").json()["argv"]
    assert argv[:4] == ["serve", "some/good", "--host", "127.0.0.1"]
    assert {"--enable-mfu-metrics", "--enable-prompt-tokens-details"} <= set(argv)
    assert not any("\x1b" in line for line in launch.status.lines)
    assert launch.shown.count("--kv-events-config") == 1 and str(argv[argv.index("--port") + 1]) in launch.shown


def test_stop_ends_every_process_even_those_that_do_not_listen(vllm, launch):
    launch.start(Options(model="some/deaf"), executable=vllm)
    argv = httpx.get(f"{ready(launch)}/argv").json()["argv"]
    config = json.loads(argv[argv.index("--kv-events-config") + 1])
    assert config["endpoint"].startswith("ipc://") and config["replay_endpoint"].startswith("ipc://")
    folder = Path(config["endpoint"].removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # prompts' tokens go through it
    started = pids(launch)
    assert len(started) == 3
    launch.stop()
    assert gone(started) and not folder.exists()
    assert launch.status.phase == "stopped" and not launch.running


def test_nothing_is_left_when_who_started_it_is_killed(vllm):
    code = f"""
import sys, time
from backend.sources.launch import VllmLaunch, Options
launch = VllmLaunch(patience_s=0.3)
launch.start(Options(model="some/good"), executable={vllm!r})
while not launch.status.url: time.sleep(0.02)
child = next(line.split()[1] for line in launch.status.lines if line.startswith("child "))
print(launch._run._process.pid, child, launch._run._sockets, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        leash, child, folder = owner.stdout.readline().split()
        leash, child = int(leash), int(child)
        started = {leash, child, *(process.pid for process in psutil.Process(leash).children(recursive=True))}
        assert len(started) == 3
    finally:
        owner.kill()
        owner.wait()
    eventually(lambda: gone(started), "all of them have ended")
    assert not Path(folder).exists()


def test_the_command_ends_when_its_leash_is_killed(vllm, launch):
    launch.start(Options(model="some/good"), executable=vllm)
    ready(launch)
    leash = launch._run._process.pid
    vllm_pid = next(p.pid for p in psutil.Process(leash).children() if "serve" in p.cmdline())
    stray = pids(launch) - {leash, vllm_pid}
    os.kill(leash, signal.SIGKILL)
    try:
        eventually(lambda: gone({vllm_pid}), "vLLM has ended")
        assert eventually(lambda: launch.status.phase == "failed")
    finally:
        for pid in stray:  # vLLM ends its own workers; this one is only told to
            os.kill(pid, signal.SIGKILL)


def test_why_it_failed_is_the_first_error_of_its_log(vllm, launch):
    launch.start(Options(model="some/crash"), executable=vllm)
    status = eventually(lambda: (s := launch.status).phase == "failed" and s)
    assert "exit code 1: torch.OutOfMemoryError: no memory for 8 GiB" in status.words


def test_a_flag_that_this_vllm_does_not_know_is_named(vllm, launch):
    launch.start(Options(model="some/old"), executable=vllm)
    status = eventually(lambda: (s := launch.status).phase == "failed" and s)
    assert "does not know --enable-mfu-metrics" in status.words
    launch.start(Options(model="some/good"), executable=vllm)  # and it can be started again
    ready(launch)


def test_not_installed_and_already_running_are_said(vllm, launch, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("KVSCOPE_VLLM", raising=False)
    with pytest.raises(LaunchError, match="not installed here"):
        launch.start(Options(model="m"))
    monkeypatch.undo()
    launch.start(Options(model="some/good"), executable=vllm)
    with pytest.raises(LaunchError, match="stop it first"):
        launch.start(Options(model="some/good"), executable=vllm)
