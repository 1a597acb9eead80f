"""llama.cpp's own HTTP server, from the package xllamacpp, in a process of its own.

PYTHON benchmarks/attach/llamacpp.py MODEL.gguf      says its address on the first line, ends with its stdin
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

SLOTS, CONTEXT, THREADS = 4, 4096, 2


class LlamaCpp:
    """`url` is "" until it listens."""

    def __init__(self, python: str, gguf: str):
        self._said: list[str] = []
        self._process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), gguf],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    @staticmethod
    def installed(python: str) -> bool:
        try:
            return subprocess.run([python, "-c", "import xllamacpp"], capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    def url(self) -> str:
        for line in self._said:
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                return json.loads(line)["url"]
        if self._process.poll() is not None:
            raise SystemExit("llama.cpp's server did not start")
        return ""

    def close(self) -> None:
        """Harmless when it has ended."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._said.append(line)


def main(gguf: str) -> None:
    import os

    import xllamacpp  # of the environment that runs this file

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_parallel, params.n_ctx = SLOTS, CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.endpoint_metrics = params.endpoint_slots = True
    server = xllamacpp.Server(params)
    print(json.dumps({"url": server.listening_address}), flush=True)
    sys.stdin.read()
    os._exit(0)  # its destructor waits for requests


if __name__ == "__main__":
    main(sys.argv[1])
