"""vLLM as a process of our own: started with what makes it watchable, followed by its log until it serves, and ended
with all that it started, however this process ends (`leash.py`)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from backend.sources import child, vllm_command
from backend.sources.vllm_command import LaunchError, Options

LEASH = Path(__file__).with_name("leash.py")
PATIENCE_S = 8.0  # until a process that was asked to end is killed; vLLM's take two or three
END_S = 3.0  # for what only has to be told
POLL_S = 0.3
ASK_S = 2.0
KEPT_LINES = 400
SHOWN_LINES = 40

Phase = Literal["stopped", "starting", "weights", "memory", "compiling", "listening", "ready", "failed"]

# What of vLLM's log begins which phase; how far it is then, as a share of the start; words for people.
PHASES: tuple[tuple[Phase, float, str, re.Pattern[str]], ...] = (
    ("starting", 0.05, "importing vLLM", re.compile(r"vLLM API server version|version \d+\.\d+|non-default args")),
    (
        "starting",
        0.2,
        "starting the engine's process",
        re.compile(r"Initializing a V1 LLM engine|Resolved architecture"),
    ),
    ("weights", 0.4, "loading weights", re.compile(r"Starting to load model|checkpoint shards")),
    ("memory", 0.6, "measuring memory for the KV cache", re.compile(r"Loading weights took|Model loading took")),
    (
        "compiling",
        0.65,
        "compiling",
        # not "disabling torch.compile", which it says right at the start where nothing is compiled
        re.compile(r"vLLM's torch\.compile|torch\.compile t|Dynamo bytecode|Compiling a graph|Capturing CUDA graph"),
    ),
    ("listening", 0.9, "starting the HTTP server", re.compile(r"init engine|KV cache size|Starting vLLM")),
    ("listening", 0.97, "starting the HTTP server", re.compile(r"Application startup complete")),
)
_SHARDS = re.compile(r"(\d{1,3})% (?:Completed)?")
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (.+)")
_ERROR = re.compile(r"^(?:\([^)]*\)\s*)?(?:ERROR \S+ \S+ \[[^\]]*\]\s*)?((?:\w+\.)*\w*(?:Error|Exception): .+)$")


class LaunchStatus(msgspec.Struct, frozen=True, kw_only=True):
    phase: Phase
    words: str
    share: float = 0.0  # of the start that is done, 0 to 1
    lines: tuple[str, ...] = ()  # of its log, the last ones
    url: str = ""  # where it serves; empty while it does not


class VllmLaunch:
    """One vLLM at a time. `changed` is called, from a thread of its own, when the phase is another one."""

    def __init__(self, changed: Callable[[], None] = lambda: None, *, patience_s: float = PATIENCE_S):
        self.changed, self._patience_s = changed, patience_s
        self._lock = threading.RLock()
        self._run: _Run | None = None
        child.stop_at_exit(self)

    @property
    def status(self) -> LaunchStatus:
        run = self._run
        return run.status() if run else LaunchStatus(phase="stopped", words="vLLM is not running")

    @property
    def url(self) -> str:
        return self.status.url

    @property
    def running(self) -> bool:
        return self.status.phase not in ("stopped", "failed")

    @property
    def shown(self) -> str:
        """The command that runs, or ran last, to be copied; empty before the first."""
        return self._run.shown if self._run else ""

    def start(self, options: Options, *, executable: str | None = None, port: int = 0) -> None:
        """Raises LaunchError when vLLM is not installed or the options cannot be; what goes wrong later is `status`.
        `port`: 0 takes a free one."""
        executable = executable or vllm_command.find()
        if executable is None:
            raise LaunchError(
                f"vLLM is not installed here: no program 'vllm' on PATH, and {vllm_command.VLLM} names none. "
                "See https://docs.vllm.ai for how to install it"
            )
        with self._lock:
            if self.running:
                raise LaunchError("vLLM is running: stop it first")
            self.stop()
            self._run = _Run(options, executable, port or _free_port(), lambda: self.changed(), self._patience_s)
        self.changed()

    def stop(self) -> None:
        """Ends it; returns when all of its processes are gone. Harmless when nothing runs."""
        with self._lock:
            if self._run is not None:
                self._run.end()


class _Run:
    """From start to end."""

    def __init__(self, options: Options, executable: str, port: int, changed: Callable[[], None], patience_s: float):
        cpu = vllm_command.on_cpu()
        options = vllm_command.for_machine(options, cpu=cpu, bf16=vllm_command.has_bf16())
        self._sockets = Path(tempfile.mkdtemp(prefix="kvscope-vllm-"))  # 0700: the events hold prompts' tokens
        self._changed, self._patience_s = changed, patience_s
        self._address = f"http://127.0.0.1:{port}"
        self._stopped = False
        self._place, self._phase, self._words = 0.0, "starting", "starting the process"
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            command = vllm_command.local(options, executable, port, self._sockets)
            variables = vllm_command.environment(cpu=cpu, local=Path(options.model).expanduser().is_dir())
            variables = {name: value for name, value in variables.items() if name not in os.environ}
            self.shown = vllm_command.shell(command, variables)
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(LEASH), str(patience_s), str(self._sockets), *command],
                env={**os.environ, **variables, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for this process, which then ends that one
            )
        except (OSError, LaunchError):
            shutil.rmtree(self._sockets, ignore_errors=True)
            raise
        self._reader = threading.Thread(target=self._read, name="vllm-log", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="vllm-watch", daemon=True).start()

    def status(self) -> LaunchStatus:
        lines = tuple(self._lines)[-SHOWN_LINES:]
        code = self._process.poll()
        if code is not None:
            if self._stopped:
                return LaunchStatus(phase="stopped", words="vLLM was stopped", lines=lines)
            return LaunchStatus(phase="failed", words=_why(code, tuple(self._lines)), lines=lines)
        url = self._address if self._phase == "ready" else ""
        return LaunchStatus(phase=self._phase, words=self._words, share=self._place, lines=lines, url=url)

    def end(self) -> None:
        self._stopped = self._stopped or self._process.poll() is None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(self._patience_s * 2 + END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(END_S)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _watch(self) -> None:
        """Until the process has ended: does it serve yet?"""
        while True:
            try:
                self._process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if self._phase != "ready" and _serves(self._address):
                    self._reach("ready", 1.0, f"serving at {self._address}")
                continue
            self._reader.join(END_S)
            self._changed()
            return

    def _read(self) -> None:
        for line in child.lines(self._process.stdout):
            self._log(line)

    def _log(self, text: str) -> None:
        self._lines.append(text)
        for phase, share, words, pattern in PHASES:
            if pattern.search(text):
                part = _SHARDS.search(text) if phase in ("weights", "compiling") else None
                done = min(int(part[1]), 100) if part else 0
                self._reach(phase, share + 0.2 * done / 100, f"{words}, {done} %" if part else words)

    def _reach(self, phase: Phase, share: float, words: str) -> None:
        """Only forwards: lines of several processes come mixed."""
        if share >= self._place and self._phase != "ready":
            self._place, self._words = share, words
            if phase != self._phase:
                self._phase = phase
                self._changed()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serves(address: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address}/health", timeout=ASK_S) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _why(code: int, lines: tuple[str, ...]) -> str:
    """What its log says about the end: a flag that this vLLM does not know, or the last error."""
    for line in reversed(lines):
        if unknown := _UNKNOWN_FLAG.search(line):
            return f"this vLLM does not know {unknown[1][:120]}: switch it off and start again"
    told = [found[1] for line in lines if (found := _ERROR.match(line))]
    if told:
        # the first is the cause: what follows says that a process has failed
        return f"vLLM ended with exit code {code}: {told[0][:300]}"
    signalled = f"by signal {code - 128}" if code > 128 else f"with exit code {code}"
    return f"vLLM ended {signalled}; its last words: {lines[-1] if lines else 'none'}"
