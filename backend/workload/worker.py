"""The load client in a process of its own: a rerun of a page, or a fold of events, must not make it late.

    python -m backend.workload.worker      jobs in on stdin, what happens out on stdout, one JSON object a line

Commands: {"job": Job} starts a run, {"stop": true} ends it; the end of stdin ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from backend.workload import punctual
from backend.workload.arrivals import LoadError
from backend.workload.job import Answer, End, Job, Said, Tick

ROOT = Path(__file__).resolve().parents[2]
END_S = 5.0


class Command(msgspec.Struct):
    job: Job | None = None
    stop: bool = False


class Worker:
    """The parent's side. One run at a time; `stop` may be called from any thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "backend.workload.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the parent's, which then ends this
        )

    def run(self, job: Job) -> Iterator[Said]:
        """What the client says, up to its End. Raises LoadError when the process ends before."""
        self._send(Command(job=job))
        decode = msgspec.json.Decoder(Tick | Answer | End).decode
        for line in self._process.stdout:
            said = decode(line)
            yield said
            if isinstance(said, End):
                return
        raise LoadError(f"the load client ended by itself (exit status {self._process.wait(END_S)})")

    def stop(self) -> None:
        self._send(Command(stop=True))

    def close(self) -> None:
        """Ends the process, and with it every connection. Harmless when it has ended."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _send(self, command: Command) -> None:
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise LoadError("the load client has ended") from None


def main() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        _open_files()
        with asyncio.Runner(loop_factory=punctual.loop) as runner:
            runner.run(_serve())


async def _serve() -> None:
    # late: the parent's side does without them
    from backend.workload.client import Client

    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[Command | None] = asyncio.Queue()
    out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(loop, commands), daemon=True).start()
    writing = threading.Thread(target=_write, args=(out,), daemon=True)
    writing.start()
    encode = msgspec.json.Encoder().encode
    gc.collect()
    gc.freeze()  # a collection walks what this run made, not what was imported
    running: asyncio.Task[None] | None = None
    client: Client | None = None
    while (command := await commands.get()) is not None:
        if command.job is not None:
            client = Client(command.job, lambda said: out.put(encode(said)))
            running = asyncio.create_task(client.run())
        elif command.stop and client is not None:
            client.stop()
    if running is not None:
        client.stop()
        await asyncio.wait((running,), timeout=END_S / 2)
    out.put(None)
    writing.join(END_S / 2)


def _read(loop: asyncio.AbstractEventLoop, commands: asyncio.Queue) -> None:
    decode = msgspec.json.Decoder(Command).decode
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(commands.put_nowait, decode(line))
    loop.call_soon_threadsafe(commands.put_nowait, None)


def _write(out: queue.SimpleQueue) -> None:
    """A slow reader must not hold the loop up."""
    with contextlib.suppress(OSError):
        while (line := out.get()) is not None:
            sys.stdout.buffer.write(line + b"\n")
            if out.empty():
                sys.stdout.buffer.flush()


def _open_files() -> None:
    """A connection is an open file; most systems allow a thousand until asked."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65_536, hard))
    except (ImportError, ValueError, OSError):
        pass  # then it is what it is; requests beyond fail and say so


if __name__ == "__main__":
    main()
