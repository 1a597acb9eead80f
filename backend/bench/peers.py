"""The engines that are compared, and how one of them takes its turn: a fresh process, one order in, figures out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from backend.bench import environments, gguf

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks" / "peers"


@dataclass(frozen=True)
class Peer:
    title: str
    script: str  # in benchmarks/peers
    environment: str = ""  # its own, see environments.py; "": ours
    weights: str = ""  # number format of the GGUF file that it wants, "" for none; "as asked": like the others' dtype

    @property
    def python(self) -> str:
        return str(environments.python_of(self.environment)) if self.environment else sys.executable


PEERS = {
    "kvscope": Peer("KVScope", "kvscope.py"),
    "generate": Peer("transformers generate (static batch)", "transformers_generate.py"),
    "continuous": Peer("transformers continuous batching", "transformers_continuous.py"),
    "vllm": Peer("vLLM for CPU", "vllm_cpu.py", "vllm"),
    "llamacpp": Peer("llama.cpp, same weights", "llama_cpp.py", "llamacpp", "as asked"),
    "llamacpp-q4": Peer("llama.cpp, 4-bit weights", "llama_cpp.py", "llamacpp", "Q4"),
}
OURS = "kvscope"


class PeerFailed(Exception):
    """It could not run, or not to the end; the message is for people."""


@dataclass
class Turn:
    ready: dict = field(default_factory=dict)
    jobs: dict[str, dict] = field(default_factory=dict)  # job name -> its line (see benchmarks/peers/protocol.py)


def take_turn(peer: Peer, order: dict, *, timeout_s: float, said: Callable[[dict], None] = lambda line: None) -> Turn:
    """Runs one order in a process of its own, with `order["threads"]` threads. Raises PeerFailed."""
    if peer.environment and (why := environments.missing(peer.environment)):
        raise PeerFailed(f"{peer.title}: {why}")
    if peer.weights:
        try:
            file, number = gguf.weights(order["name"], order["dtype"], peer.weights)
        except gguf.NoWeights as error:
            raise PeerFailed(f"{peer.title}: {error}") from None
        order = order | {"options": order["options"] | {"gguf": str(file), "number": number}}
    threads = str(order["threads"])
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            [peer.python, str(SCRIPTS / peer.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        late = threading.Event()
        timer = threading.Timer(timeout_s, lambda: (late.set(), _kill(process)))
        timer.start()
        turn = Turn()
        try:
            _send(process, order)
            for text in process.stdout:
                line = json.loads(text)
                if "ready" in line:
                    turn.ready = line["ready"]
                else:
                    turn.jobs[line["job"]] = line
                said(line)
            code = process.wait()
        finally:
            timer.cancel()
            _kill(process)
            process.wait()
            process.stdout.close()
        if late.is_set():
            raise PeerFailed(f"{peer.title}: not done after {timeout_s:.0f} s")
        missing = [job["name"] for job in order["jobs"] if job["name"] not in turn.jobs]
        if code or missing:
            raise PeerFailed(f"{peer.title}: {_last_words(complaints) or f'ended with status {code}'}")
        return turn


def _send(process: subprocess.Popen, order: dict) -> None:
    with contextlib.suppress(BrokenPipeError):  # it died at once; its last words say why
        process.stdin.write(json.dumps(order))
        process.stdin.close()


def _kill(process: subprocess.Popen) -> None:
    """The whole group that this process leads: a peer may start workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_words(complaints) -> str:
    complaints.seek(0)
    lines = [line.strip() for line in complaints.read().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
