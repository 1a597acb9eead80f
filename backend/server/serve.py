"""Running the server: a bound socket first, a prompt end last."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from fastapi import FastAPI

from backend.server.app import create_app
from backend.server.host import Boot, Emit, EngineHost, Say
from backend.server.listen import BACKLOG

if TYPE_CHECKING:
    from backend.engine.loop import EngineLoop
    from backend.engine.modelled.build import ModelledModel
    from backend.models.loader import LoadedModel
    from backend.server.kv_publish import KvPublisher

GRACE_S = 3  # for what is still open when the server is told to end
KEEP_ALIVE_S = 75  # long enough that no client meets a connection that is just being closed


@dataclass
class Wanted:
    """What to load, and how the engine shall start. `switches`: fields of EngineConfig that are not left to it."""

    model: str
    weights: str = "real"
    dtype: str | None = None
    device: str | None = None
    threads: int = 1
    attention: str = "auto"
    linear: str = "auto"
    fusion: str = "auto"
    cuda_graphs: bool = True
    on: str = ""  # an accelerator of the catalogue: nothing is loaded, the engine is modelled
    modelled: dict[str, Any] = field(default_factory=dict)  # tp, efficiency, speed, seed
    switches: dict[str, Any] = field(default_factory=dict)

    def boot(self, emit: Emit, say: Say) -> tuple[EngineLoop, LoadedModel]:
        """Minutes, perhaps. Raises ModelError or ConfigError."""
        import torch

        from backend.engine.build import build
        from backend.engine.kernels import Kernels
        from backend.engine.loop import EngineLoop
        from backend.models.loader import load

        if self.on:
            return self._boot_modelled(emit, say)
        torch.set_num_threads(self.threads)
        loaded = load(self.model, weights=self.weights, dtype=self.dtype, device=self.device, say=say)
        say(f"Checking {loaded.name} …")
        kernels = Kernels(self.attention, self.linear, self.fusion, self.cuda_graphs)
        return EngineLoop(build(loaded, self.switches, emit, kernels)), loaded

    def _boot_modelled(self, emit: Emit, say: Say) -> tuple[EngineLoop, ModelledModel]:
        from backend.engine.loop import EngineLoop
        from backend.engine.modelled.build import Wanted as Modelled
        from backend.engine.modelled.build import build
        from backend.models.loader import any_tokenizer

        wanted = Modelled(model=self.model, gpu=self.on, weights=self.dtype or "bf16", **self.modelled)
        wanted.machine()  # what is misspelt is said before anything else is done
        engine, model = build(wanted, self.switches, emit, any_tokenizer(say))
        return EngineLoop(engine), model


class Server(uvicorn.Server):
    """Ends promptly and with exit code 0: streams are told to end as soon as the signal comes."""

    def __init__(self, app: FastAPI):
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._host: EngineHost = app.state.host
        self._aio: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._aio = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.end()

    def end(self) -> None:
        """From any thread."""
        self.should_exit = True
        if self._aio is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._aio.call_soon_threadsafe(self._host.closing.set)


def end_with_parent(server: Server) -> None:
    """Ends `server` when stdin closes: a parent that holds its other end and dies, however, closes it."""

    def wait() -> None:
        with contextlib.suppress(OSError):  # closed from the start
            while os.read(0, 4096):
                pass
        server.end()

    threading.Thread(target=wait, name="parent", daemon=True).start()


def uncollected(boot: Boot) -> Boot:
    """`boot` without the garbage collector, which would walk what torch, transformers and the model are made of again
    and again: a tenth of the start. Nor will it later, in the middle of an answer, for a quarter of a second.
    """

    def booted(emit: Emit, say: Say) -> tuple[EngineLoop, LoadedModel]:
        gc.disable()
        try:
            return boot(emit, say)
        finally:
            gc.collect()
            gc.freeze()
            gc.enable()

    return booted


def run(
    listening: socket.socket,
    wanted: Wanted,
    *,
    api_key: str | None,
    loopback: bool,
    die_with_parent: bool,
    kv: KvPublisher | None = None,
) -> NoReturn:
    """Serves until a signal comes (or stdin closes), then ends the process."""

    async def serve() -> None:
        host = EngineHost(uncollected(wanted.boot), names=(wanted.model,), kv=kv)
        server = Server(create_app(host, api_key=api_key, loopback=loopback))
        if die_with_parent:
            end_with_parent(server)
        await server.serve([listening])
        # Not through the interpreter's own end: it would wait for a step, a download or a model that is being loaded.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if server.started else 1)

    asyncio.run(serve())
    raise AssertionError("unreachable")
