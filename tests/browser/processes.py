"""Starting what the browser looks at, and ending it again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_S = 90.0
END_S = 15.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answer(url: str) -> str | None:
    """Body of a 200 answer, None for anything else."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  addresses of this machine only
            return response.read().decode("utf-8", "replace")
    except (urllib.error.URLError, OSError):
        return None


@contextlib.contextmanager
def process(command: Sequence[str], ready_url: str, log: Path, **environ: str) -> Iterator[subprocess.Popen]:
    """A process that answers `ready_url`; ended by SIGINT, as Ctrl+C does, and that must be enough."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environ}
    with log.open("wb") as out:
        running = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            until = time.monotonic() + START_S
            while answer(ready_url) is None:
                if running.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{command} did not come up:\n{log.read_text(errors='replace')[-4000:]}")
                time.sleep(0.1)
            yield running
        finally:
            if running.poll() is None:
                running.send_signal(signal.SIGINT)
            try:
                running.wait(END_S)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
                raise RuntimeError(f"{command} did not end within {END_S} s of Ctrl+C") from None


def stub_engine(
    port: int, log: Path, *, num_blocks: int = 256, step_ms: float = 15, computes_on: str = "host", **environ: str
):
    """The engine server over a model that is a list of words. `computes_on`: uuid of the device that it says is its."""
    command = [sys.executable, "-m", "tests.browser.stub_server", "--port", str(port)]
    command += ["--num-blocks", str(num_blocks), "--step-ms", str(step_ms), "--computes-on", computes_on]
    return process(command, f"http://127.0.0.1:{port}/health", log, OMP_NUM_THREADS="1", **environ)


def dashboard(port: int, log: Path, *, script: str = "app.py", base: str = "", **environ: str):
    command = [
        sys.executable,
        "-m",
        "streamlit",
        "run",
        script,
        "--server.port",
        str(port),
        "--server.headless",
        "true",
    ]
    if base:
        command += ["--server.baseUrlPath", base]
    prefix = f"/{base}" if base else ""
    return process(command, f"http://127.0.0.1:{port}{prefix}/_stcore/health", log, **environ)
