"""What all pages and tabs of this process share: the source of events, and the synthetic users."""

from __future__ import annotations

import os
import secrets
import shlex
import threading
import zlib
from collections.abc import Callable

import msgspec

from backend.experiments.job import Lab
from backend.hub import Hub
from backend.phases import Phases
from backend.server.live import Extras
from backend.sources import Source, open_source
from backend.sources.embedded import COMMAND
from backend.sources.lease import TelemetryLease
from backend.sources.remote import EngineClient, EngineError
from backend.sources.roofs import RoofKeeper
from backend.sources.status import Status
from backend.workload.users import Habits, Users

MODEL = "KVSCOPE_MODEL"  # for an engine that is started here; what `python -m backend serve` takes if not set
FLAGS = "KVSCOPE_ENGINE_FLAGS"  # the rest of its command line
NUM_BLOCKS = 512  # a pool whose blocks can be read on a screen, and that 64 users fill; the page's switches change it
TOKEN = secrets.token_urlsafe(16)  # of the live WebSocket, new with each process

routes_mounted = False  # app.py says so; without it pages fall back to reruns

_lock = threading.Lock()
_service: Service | None = None


class Service:
    def __init__(self, source: Source):
        self.source = source
        self.own_options = dict(source.engine.options) if source.engine else {}
        self.users = Users(source.background, _address(source), source.client.headers)
        self.lab = Lab()  # experiments of all pages: one at a time
        self.telemetry = TelemetryLease(source.client, source.background)
        self.roofs = RoofKeeper(source.client, source.background)
        self.phases = Phases(source.hub, self.roofs.known)

    @property
    def hub(self) -> Hub:
        return self.source.hub

    @property
    def client(self) -> EngineClient:
        return self.source.client

    @property
    def status(self) -> Status:
        return self.source.status

    @property
    def in_flight(self) -> int:
        return self.hub.read(lambda state: state.in_flight)

    @property
    def habits(self) -> Habits:
        return self.users.habits

    def fixed(self) -> tuple:
        """What a page's widgets were drawn from: when it is another one, the page must be drawn again."""
        config = self.hub.read(lambda state: tuple(state.config.items()))
        return self.status.phase, self.users.counts.users, self.habits, config

    def pulse(self) -> str:
        """Another text when something has changed that a page's widgets or its header were drawn from."""
        status = self.status
        said = (status.message, status.lines[-1:]) if status.phase != "ready" else None
        heard = self.hub.read(lambda state: (state.epoch, state.in_flight > 0))
        return f"{zlib.crc32(repr((self.fixed(), said, heard)).encode()):08x}"

    def extras(self) -> Extras:
        """What the live WebSocket tells beside the events."""
        return Extras(self.phases.message, self.telemetry.renew, self.pulse)

    def set_habits(self, **changes) -> None:
        """Counts from the users' next questions on."""
        self.users.habits = msgspec.structs.replace(self.users.habits, **changes)

    def set_users(self, count: int) -> None:
        """Users speak to a chat model in messages, to a base model in plain text."""
        self.set_habits(chat=self.hub.read(lambda state: state.model.chat_template))
        self.users.start(count)

    def stop_all(self) -> None:
        """No users, and nothing in the engine. Raises EngineError when it does not answer."""
        self.users.stop()
        for id in self.hub.read(lambda state: [r.id for r in state.requests.values() if r.state != "finished"]):
            self.client.abort(id)

    def play(self, model: str, gpu: str, *, tp: int, dtype: str, kv: str, speed: float) -> None:
        """The engine anew, modelled: a model and an accelerator of the planner's catalogues. Raises SourceError."""
        self._restart({"model": model, "on": gpu, "tp": tp, "dtype": dtype, "kv": kv, "speed": speed})

    def play_no_more(self) -> None:
        """The engine that this process was started for."""
        self._restart(self.own_options)

    def _restart(self, options: dict) -> None:
        self.users.stop()
        self.source.restart(options)

    def close(self) -> None:
        self.lab.close()
        self.source.close()


def _address(source: Source) -> Callable[[], str | None]:
    """Where the engine listens now, None while it does not."""

    def address() -> str | None:
        try:
            return source.client.url
        except EngineError:
            return None

    return address


def get() -> Service:
    """The one service, started when first asked for. Raises SourceError or OSError when there is nothing to start."""
    global _service
    with _lock:
        if _service is None:
            flags = shlex.split(os.environ.get(FLAGS, ""))
            options = {"model": os.environ.get(MODEL) or None}
            if "--num-blocks" not in flags:
                options["num_blocks"] = NUM_BLOCKS
            _service = Service(open_source(options, command=(*COMMAND, *flags)))
        return _service


def close() -> None:
    """Ends the engine's process with everything else. Harmless when nothing runs."""
    global _service
    with _lock:
        if _service is not None:
            _service.close()
            _service = None
