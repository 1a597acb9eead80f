from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from backend.server.app import create_app
from backend.server.host import EngineHost
from backend.server.kv_publish import KvPublisher
from backend.server.listen import bind
from backend.server.serve import Server
from tests.server.scripted import Bird

DEADLINE_S = 20.0


def eventually(condition: Callable[[], object], what: str = "", deadline_s: float = DEADLINE_S) -> None:
    """Waits until `condition()` holds."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"did not come true: {what or condition}"
        time.sleep(0.005)


class Served:
    """A server on a free port, in a thread of its own."""

    def __init__(self, bird: Bird, kv: KvPublisher | None = None, **options: object):
        self.bird, self.kv = bird, kv
        self.host: EngineHost | None = None
        self._options = options
        self._socket = bind("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self.host = EngineHost(self.bird.boot, names=("also-parrot",), sensors=False, kv=self.kv)
        self.server = Server(create_app(self.host, **self._options))
        self._started.set()
        await self.server.serve([self._socket])

    def start(self) -> Served:
        self._thread.start()
        assert self._started.wait(DEADLINE_S)
        return self

    def stop(self) -> None:
        self.server.end()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the server did not end"

    def wait_ready(self, deadline_s: float = DEADLINE_S) -> Served:
        with httpx.Client() as client:
            eventually(lambda: client.get(f"{self.url}/health").status_code == 200, "ready", deadline_s)
        return self

    @property
    def running(self) -> int:
        """Requests that the engine has."""
        return self.host.hub.read(lambda state: state.in_flight)

    def idle(self) -> bool:
        return self.running == 0 and self.bird.loop.engine.idle


@contextlib.contextmanager
def serving(bird: Bird, **options: object) -> Iterator[Served]:
    served = Served(bird, **options).start()
    try:
        yield served
    finally:
        bird.release()
        served.stop()


@pytest.fixture(scope="session")
def parrot() -> Iterator[Served]:
    """One server for all tests that leave it as they found it."""
    with serving(Bird()) as served:
        yield served.wait_ready()


@pytest.fixture
def http(parrot: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=parrot.url, timeout=DEADLINE_S) as client:
        yield client
        parrot.bird.release()
        eventually(parrot.idle, "the engine is idle after the test")
