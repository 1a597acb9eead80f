"""What all pages and tabs of this process share: the source of events, and the synthetic users."""

from __future__ import annotations

import os
import secrets
import shlex
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from backend.experiments.job import Lab
from backend.fold import State
from backend.hub import Hub
from backend.phases import Phases
from backend.server.live import Extras
from backend.sources import Source, SourceError, open_source
from backend.sources.attach import fleet_view
from backend.sources.attach.detect import Found, probe
from backend.sources.attach.endpoints import Endpoint
from backend.sources.attach.fleet import Fleet
from backend.sources.attach.source import AttachedSource
from backend.sources.attach.target import TargetConfig
from backend.sources.embedded import COMMAND
from backend.sources.lease import TelemetryLease
from backend.sources.remote import EngineClient, EngineError
from backend.sources.roofs import RoofKeeper
from backend.sources.status import Status
from backend.workload.users import Habits, Users

MODEL = "KVSCOPE_MODEL"  # for an engine that is started here; what `python -m backend serve` takes if not set
FLAGS = "KVSCOPE_ENGINE_FLAGS"  # the rest of its command line
ATTACH_URL = "KVSCOPE_ATTACH_URL"  # attached from the start
ATTACHED = "attached"  # kind of such a source
FLEET_S = 0.9  # a little less than the second in which a fleet is read again
MAX_CHOSEN = 64  # replicas whose details are kept encoded
PROBE_S = 10.0  # twice what a probe takes at most
NUM_BLOCKS = 512  # a pool whose blocks can be read on a screen, and that 64 users fill; the page's switches change it
TOKEN = secrets.token_urlsafe(16)  # of the live WebSocket, new with each process

routes_mounted = False  # app.py says so; without it pages fall back to reruns

_lock = threading.Lock()
_service: Service | None = None


class Service:
    """`source` is what all pages show. It changes when a person attaches to another server, and all else with it."""

    def __init__(self, source: Source):
        self.own: Source | None = None if source.kind == ATTACHED else source
        self.own_options = dict(source.engine.options) if source.engine else {}
        self.lab = Lab()  # experiments of all pages: one at a time
        self.fleet: Fleet | None = None  # servers that are watched together
        self.turns = 0  # how often the source has changed
        self._turning = threading.Lock()
        self._fleet_said: dict[str, tuple[Fleet, float, str]] = {}  # by chosen replica
        self._follow(source)

    def _follow(self, source: Source) -> None:
        self.source = source
        send = getattr(source.client, "send", None)  # of a foreign engine, which tells nothing of single requests
        self.users = Users(source.background, _address(source), source.client.headers, send=send)
        self.telemetry = TelemetryLease(source.client, source.background)
        self.roofs = RoofKeeper(source.client, source.background)
        self.phases = Phases(source.hub, self.roofs.known)
        self.turns += 1

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
        return self.turns, self.status.phase, self.users.counts.users, self.habits, config

    def pulse(self) -> str:
        """Another text when something has changed that a page's widgets or its header were drawn from."""
        status = self.status
        said = (status.message, status.lines[-1:]) if status.phase != "ready" else None
        heard = self.hub.read(lambda state: (state.epoch, at_work(state) > 0, state.capabilities))
        return f"{zlib.crc32(repr((self.fixed(), said, heard)).encode()):08x}"

    def extras(self) -> Extras:
        """What the live WebSocket tells beside the events."""
        return Extras(self.phases.message, self.fleet_message, self.telemetry.renew, self.pulse, self.inferred)

    def inferred(self, request: int) -> list[int] | None:
        """Cells of the map that a request of ours must hold, by its tokens; None of an engine that tells its tables."""
        source = self.source
        return source.table_of(request) if source.kind == ATTACHED else None

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

    # ---- another server than our own engine ----------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        return self.source.kind == ATTACHED

    @property
    def where(self) -> str:
        """Host and port of the engine."""
        try:
            return urlsplit(self.client.url).netloc
        except EngineError:
            return "an unknown address"

    def probe(self, config: TargetConfig) -> Found:
        """What answers there, within seconds. Raises Unreachable."""
        return self.source.background.run(probe(config)).result(PROBE_S)

    def attach(self, config: TargetConfig, *, stop_own: bool = False) -> None:
        """All pages of all tabs turn to the server at `config.url`. `stop_own`: our own engine leaves it the cores.

        Raises SourceError while an experiment runs, which would go on elsewhere than it began.
        """
        self._turn(lambda: AttachedSource(config))
        if stop_own and self.own is not None and self.own.engine is not None:
            self.own.engine.stop()

    def detach(self) -> None:
        """Back to our own engine, which is started if it does not run. Raises SourceError or OSError."""
        if not self.attached:
            return
        self._turn(lambda: self.own or _open_own())
        self.own = self.source
        if self.own.engine is not None:
            self.own_options = self.own_options or dict(self.own.engine.options)
            self.own.engine.start()

    def _turn(self, open_other: Callable[[], Source]) -> None:
        with self._turning:
            if running := self.lab.running:
                raise SourceError(f"'{running.name}' is running here: stop it or wait for its end")
            other, before = open_other(), self.source
            self.users.stop()
            self._follow(other)
            if before is not self.own:
                before.close()

    # ---- several of them -----------------------------------------------------------------------------------------

    def watch(self, endpoints: Sequence[Endpoint]) -> None:
        """Watches these servers instead of those before."""
        self.unwatch()
        self.fleet = Fleet(endpoints)

    def unwatch(self) -> None:
        fleet, self.fleet = self.fleet, None
        if fleet is not None:
            fleet.close()

    def fleet_message(self, chosen: str) -> str:
        """What the fleet's picture shows, encoded; "" without one. The same for a second, as its numbers are."""
        fleet, now = self.fleet, time.monotonic()
        if fleet is None:
            return ""
        said = self._fleet_said.get(chosen)
        if said is None or said[0] is not fleet or now - said[1] >= FLEET_S:
            if len(self._fleet_said) >= MAX_CHOSEN:
                self._fleet_said.clear()
            said = self._fleet_said[chosen] = fleet, now, fleet_view.message(fleet, chosen)
        return said[2]

    def close(self) -> None:
        self.lab.close()
        self.unwatch()
        self.source.close()
        if self.own is not None:
            self.own.close()


def at_work(state: State) -> int:
    """Requests in the engine; of an attached one also those of others, as its gauge has them."""
    running = state.scrape.values.get("running") if state.scrape else None
    return max(state.in_flight, int(running.value or 0) if running else 0)


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
            _service = Service(_open(os.environ))
        return _service


def _open(environ: Mapping[str, str]) -> Source:
    flags = shlex.split(environ.get(FLAGS, ""))
    options = {"model": environ.get(MODEL) or None}
    if "--num-blocks" not in flags:
        options["num_blocks"] = NUM_BLOCKS
    return open_source(options, environ=environ, command=(*COMMAND, *flags))


def _open_own() -> Source:
    """What this process would have started if it had not been attached from its start."""
    return _open({name: value for name, value in os.environ.items() if name != ATTACH_URL})


def close() -> None:
    """Ends the engine's process with everything else. Harmless when nothing runs."""
    global _service
    with _lock:
        if _service is not None:
            _service.close()
            _service = None
