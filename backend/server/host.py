"""The engine as the server sees it: loading, ready or failed. The server answers before the model is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from backend.engine.config import ConfigError
from backend.events import Event
from backend.hub import Hub
from backend.models.errors import ModelError
from backend.server.codec import Codec
from backend.server.errors import unavailable
from backend.server.metrics import Metrics
from backend.telemetry.sampler import Sampler
from backend.telemetry.torch_device import used

if TYPE_CHECKING:
    from backend.engine.loop import EngineLoop
    from backend.models.loader import LoadedModel
    from backend.server.kv_publish import KvPublisher

log = logging.getLogger("kvscope.server")

LOADING = "loading the model"  # how every reason begins that patience cures
STOP_S = 2.0
Emit = Callable[[Event], None]
Say = Callable[[str], None]
Boot = Callable[[Emit, Say], "tuple[EngineLoop, LoadedModel]"]


class EngineHost:
    """Runs `boot` (minutes, perhaps) in a thread, then serves what it returned.

    `boot` is given where the engine shall say its events, and where to say in words how far it is. /health states the
    words while it runs, and what it raises from then on.
    `names`: what clients may call the model beside its own name, a path for instance.
    `sensors`: read the hardware also when nobody looks, while requests run.
    `kv`: tells others what becomes of the prefix cache.
    """

    def __init__(
        self,
        boot: Boot,
        *,
        hub: Hub | None = None,
        names: tuple[str, ...] = (),
        sensors: bool = True,
        kv: KvPublisher | None = None,
    ):
        self.hub = hub or Hub()
        self.metrics = Metrics(self.hub)
        self.kv = kv
        self.closing = asyncio.Event()  # set when the server is about to end: open streams end with it
        self._boot = boot
        self._names = names
        self._reason: str | None = LOADING
        self._loop: EngineLoop | None = None
        self._loaded: LoadedModel | None = None
        self._codec: Codec | None = None
        self._counting: asyncio.Task | None = None
        self._sensors = sensors
        self._sampler: Sampler | None = None
        self.measuring: dict | None = None  # how far a measurement of the ceilings is, while one runs

    @property
    def problem(self) -> str | None:
        """Why there is no engine to use; None when there is one."""
        if self._loop is not None and self._loop.failure:
            return self._loop.failure
        return self._reason

    @property
    def loop(self) -> EngineLoop:
        """Raises ApiError (503) with the reason while there is none; so do the other properties of a running engine."""
        problem = self.problem
        if problem is not None:
            raise unavailable(problem)
        return self._loop

    @property
    def loaded(self) -> LoadedModel:
        self.require()
        return self._loaded

    @property
    def codec(self) -> Codec:
        self.require()
        return self._codec

    @property
    def sampler(self) -> Sampler:
        self.require()
        return self._sampler

    def progress(self, share: float, text: str) -> None:
        """Of a measurement of the ceilings; from any thread."""
        self.measuring = {"measuring": True, "share": share, "text": text}

    def require(self) -> None:
        """Raises ApiError (503) with the reason while no engine runs."""
        _ = self.loop

    def serves(self, model: str | None) -> bool:
        """Whether `model` is a name of what runs here; None asks for whatever runs."""
        return model is None or model == self.loaded.name or model in self._names

    def emit(self, event: Event) -> None:
        """Takes an event from the engine's thread."""
        self.metrics.take(event)
        if self.kv is not None:
            self.kv.take(event)
        self.hub.publish(event)

    async def start(self) -> None:
        aio = asyncio.get_running_loop()
        self.hub.attach(aio)
        self._counting = asyncio.create_task(self.metrics.run())
        threading.Thread(target=self._load, args=(aio,), name="boot", daemon=True).start()

    async def stop(self) -> None:
        self.closing.set()
        if self._counting is not None:
            self._counting.cancel()
        if self._codec is not None:
            self._codec.close()
        if self._sampler is not None:
            await asyncio.to_thread(self._sampler.close)
        if self._loop is not None:
            with contextlib.suppress(TimeoutError):  # a long step is not waited for: the process ends under it
                async with asyncio.timeout(STOP_S):
                    await self._loop.stop()
        if self.kv is not None:
            await asyncio.to_thread(self.kv.close)

    def _load(self, aio: asyncio.AbstractEventLoop) -> None:
        """In its own thread."""
        try:
            loop, loaded = self._boot(self.emit, self._say)
        except Exception as error:  # whatever went wrong, the server stays up and says so
            explained = isinstance(error, ModelError | ConfigError)
            log.error("the engine did not start: %s", error, exc_info=not explained)
            call, given = self._fail, (str(error) or type(error).__name__,)
        else:
            call, given = self._ready, (loop, loaded, Codec(loaded, lambda: loop.engine.config.max_model_len))
        try:
            aio.call_soon_threadsafe(call, *given)
        except RuntimeError:
            log.info("the server ended before the engine was ready")

    def _say(self, progress: str) -> None:
        """From the boot's thread."""
        log.info("%s", progress)
        self._reason = f"{LOADING}: {progress}"

    def _ready(self, loop: EngineLoop, loaded: LoadedModel, codec: Codec) -> None:
        if self.closing.is_set():
            return
        self._loop, self._loaded, self._codec = loop, loaded, codec
        if self.kv is not None:
            self.kv.start(loop.engine.content)
        loop.start(asyncio.get_running_loop())
        self._sampler = self._read_hardware(loop, loaded)
        self._reason = None
        log.info("ready: %s", loaded.name)

    def _read_hardware(self, loop: EngineLoop, loaded: LoadedModel) -> Sampler:
        """Readings become events of the engine, between two steps and with the time at which they were made."""
        engine = loop.engine
        sampler = Sampler(
            lambda event, t: loop.post(lambda engine: engine.report(event, t)),
            clock=engine.now,
            busy=(lambda: not engine.idle) if self._sensors else (lambda: False),
            used=used(loaded.device),
        )
        sampler.start()
        return sampler

    def _fail(self, reason: str) -> None:
        self._reason = reason
