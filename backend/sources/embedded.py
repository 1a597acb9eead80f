"""The engine as a process of our own: started on a free loopback port, watched, restarted, and never left behind.

The process ends when its stdin closes, and only this process holds the other end: however this one dies, the engine
follows. Nothing of the engine is imported here; torch must not be in the UI's process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from backend.cpu import SPIN_COUNT
from backend.sources import child
from backend.sources.status import Status

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "backend", "serve")
END_S = 5.0  # for a process that was asked to end
KILL_S = 3.0  # and for one that was told to
KEPT_LINES = 200
SHOWN_LINES = 12

Option = str | int | float | bool | None


class _Announcement(msgspec.Struct):
    """The first line on the engine's stdout."""

    kvscope: str
    port: int


class EmbeddedEngine:
    """`options`: flags of `python -m backend serve` by name (`num_blocks=512`, `prefix_cache=False`); None: not given.

    `changed` is called, from whatever thread, when the address or the status may be another one.
    """

    def __init__(self, options: Mapping[str, Option] | None = None, *, command: Sequence[str] = COMMAND):
        self.options = dict(options or {})
        self.changed: Callable[[], None] = lambda: None
        self._command = tuple(command)
        self._lock = threading.RLock()  # start and stop exclude each other
        self._run: _Run | None = None
        child.stop_at_exit(self)

    @property
    def url(self) -> str | None:
        """Where it listens; None while it does not."""
        run = self._run
        return run.url if run else None

    @property
    def status(self) -> Status:
        """Of the process: ready means that it listens, not that its model is loaded."""
        run = self._run
        return run.status() if run else Status(phase="stopped", message="the engine is not running")

    def start(self) -> None:
        """Starts it if it does not run. Raises OSError when there is nothing to start."""
        with self._lock:
            if self._run is None or not self._run.alive:
                self._run = _Run([*self._command, *flags(self.options)], self.options, lambda: self.changed())

    def restart(self, options: Mapping[str, Option] | None = None) -> None:
        """Ends what runs and starts anew, with other `options` if given."""
        with self._lock:
            self.stop()
            if options is not None:
                self.options = dict(options)
            self.start()

    def stop(self) -> None:
        """Ends it; returns when the process is gone."""
        with self._lock:
            if self._run is not None:
                self._run.end()
                self._run = None
        self.changed()


def flags(options: Mapping[str, Option]) -> list[str]:
    """Command line of `serve`, always on a free port, always tied to this process."""
    given = ["--port", "0", "--die-with-parent"]
    for name, value in options.items():
        if name == "prefix_cache":
            given += ["--no-prefix-cache"] if value is False else []
        elif value is not None:
            given += [f"--{name.replace('_', '-')}", str(value)]
    return given


def environment(options: Mapping[str, Option]) -> dict[str, str]:
    """Ours, with threads that soon sleep: spinning ones would take the cores from the page."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = int(options.get("threads") or cores)
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": SPIN_COUNT,
        "PYTHONUNBUFFERED": "1",
    }


class _Run:
    """One process, from start to end."""

    def __init__(self, command: list[str], options: Mapping[str, Option], changed: Callable[[], None]):
        self.url: str | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._changed = changed
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl+C in the terminal is for the page's process, which then ends this one
        )
        self._readers = [
            threading.Thread(target=read, name="engine-log", daemon=True)
            for read in (self._read_stdout, self._read_stderr)
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._wait, name="engine-watch", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def status(self) -> Status:
        lines = tuple(self._lines)[-SHOWN_LINES:]
        code = self._process.poll()
        if code is not None:
            return Status(phase="dead", message=_ended(code), lines=lines, exit_code=code)
        if self.url is None:
            return Status(phase="starting", message="the engine's process is starting", lines=lines)
        return Status(phase="ready", lines=lines)

    def end(self) -> None:
        process = self._process
        with contextlib.suppress(OSError):
            process.stdin.close()  # asks it to end
        for patience_s, then in ((END_S, process.terminate), (KILL_S, process.kill), (None, None)):
            try:
                process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                then()
        for reader in self._readers:
            reader.join(KILL_S)

    def _wait(self) -> None:
        self._process.wait()
        for reader in self._readers:  # what it said last is part of why it ended
            reader.join(KILL_S)
        self.url = None
        self._changed()

    def _read_stdout(self) -> None:
        for line in self._process.stdout:
            if self.url is None:
                try:
                    announced = msgspec.json.decode(line, type=_Announcement)
                except msgspec.DecodeError:
                    pass
                else:
                    self.url = f"http://127.0.0.1:{announced.port}"
                    self._changed()
                    continue
            if text := child.clean(line):
                self._lines.append(text)

    def _read_stderr(self) -> None:
        for text in child.lines(self._process.stderr):
            self._lines.append(text)


def _ended(code: int) -> str:
    if code < 0:
        return f"the engine's process was ended by signal {-code}"
    return f"the engine's process ended with exit code {code}"
