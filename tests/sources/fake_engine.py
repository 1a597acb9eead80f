"""A stand-in for the engine's process: the same announcement, the same endpoints, scripted events, no model.

    python tests/sources/fake_engine.py --port 0 --die-with-parent [--model HOW]

HOW: good (default) | slow (loads for a while) | refused | crash (after it announced itself) | silent (ends before) |
deaf (does not end when asked)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from backend.hub import Hub
from tests.scripted_engine import ScriptedEngine


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "t", "param": None, "code": None}}, status)


class FakeEngine:
    """The endpoints over a hub. Attributes may be changed while it serves."""

    def __init__(self, hub: Hub | None = None, key: str | None = None):
        self.hub = hub or Hub()
        self.key = key
        self.problem = ""  # with it: 503
        self.answer_s = 0.05  # a request takes
        self.full = False  # 429 to everybody
        self.idle = True
        self.seen: Counter[str] = Counter()  # follow, snapshot, begun, ended, gone
        self.bodies: list[dict] = []
        self.ids: list[str] = []
        self.cut = asyncio.Event()  # set: open event streams end
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/engine/events", self.events),
                Route("/engine/state", self.state),
                Route("/engine/config", self.config, methods=["PATCH"]),
                Route("/engine/reset", self.reset, methods=["POST"]),
                Route("/engine/abort/{id}", self.abort, methods=["POST"]),
                Route("/v1/chat/completions", self.generate, methods=["POST"]),
                Route("/v1/completions", self.generate, methods=["POST"]),
            ]
        )

    def refusal(self, request: Request) -> Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return error(401, "the API key is missing or wrong")
        return error(503, self.problem) if self.problem else None

    async def health(self, request: Request) -> Response:
        return error(503, self.problem) if self.problem else Response()

    async def models(self, request: Request) -> Response:
        return self.refusal(request) or JSONResponse({"data": [{"id": "fake"}]})

    async def events(self, request: Request) -> Response:
        if refusal := self.refusal(request):
            return refusal
        since, epoch = request.query_params.get("since"), request.query_params.get("epoch", "")
        self.seen["follow"] += 1
        self.seen["snapshot"] += since is None

        async def lines():
            batches = self.hub.follow(None if since is None else int(since), epoch)
            cut = asyncio.ensure_future(self.cut.wait())
            try:
                while not cut.done():
                    batch = asyncio.ensure_future(anext(batches))
                    await asyncio.wait((cut, batch), return_when=asyncio.FIRST_COMPLETED)
                    if not batch.done():
                        batch.cancel()
                        break
                    yield b"".join(line + b"\n" for line in batch.result())
            finally:
                cut.cancel()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def state(self, request: Request) -> Response:
        return self.refusal(request) or JSONResponse({"config": {"block_size": 16}})

    async def config(self, request: Request) -> Response:
        changes = await request.json()
        if "colour" in changes:
            return error(422, "unknown switch 'colour'; known: block_size")
        return (
            JSONResponse({"block_size": 16, **changes})
            if self.idle
            else error(409, "block_size: 3 requests are in the engine")
        )

    async def reset(self, request: Request) -> Response:
        return JSONResponse({}) if self.idle else error(409, "the prefix cache is emptied when idle")

    async def abort(self, request: Request) -> Response:
        return JSONResponse({"aborted": int(request.path_params["id"] in self.ids)})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if refusal := self.refusal(request):
            return refusal
        if self.full:
            return error(429, "the queue is full")
        if not (body.get("messages") or body.get("prompt")):
            return error(400, "the prompt is empty")
        self.bodies.append(body)
        self.ids.append(("chatcmpl-" if "messages" in body else "cmpl-") + request.headers.get("x-request-id", ""))
        self.seen["begun"] += 1
        if body.get("stream"):
            return StreamingResponse(self.chunks(), media_type="text/event-stream")
        end = time.monotonic() + self.answer_s
        while time.monotonic() < end:
            if await request.is_disconnected():
                self.seen["gone"] += 1
                return Response(status_code=499)
            await asyncio.sleep(0.01)
        self.seen["ended"] += 1
        return JSONResponse({"choices": [{"message": {"content": "yes"}}]})

    async def chunks(self):
        try:
            end = time.monotonic() + self.answer_s
            while time.monotonic() < end:
                yield b"data: {}\n\n" * 100
                await asyncio.sleep(0.01)
            self.seen["ended"] += 1
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.seen["gone"] += 1
            raise


class Serving:
    """The app in a uvicorn server in a thread; `with Serving(engine) as url`."""

    def __init__(self, engine: FakeEngine, port: int = 0):
        self.engine = engine
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(engine.app, log_level="error", timeout_graceful_shutdown=1))
        self._running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._running.set()
        await self._server.serve([self._socket])

    def cut(self) -> None:
        """Ends the open event streams; new ones may be opened."""

        def now() -> None:
            self.engine.cut.set()
            self.engine.cut = asyncio.Event()

        self.loop.call_soon_threadsafe(now)

    def __enter__(self) -> str:
        self._thread.start()
        self._running.wait()
        return self.url

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self.loop.call_soon_threadsafe(self.engine.cut.set)
        self._thread.join(10)
        self._socket.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--die-with-parent", action="store_true")
    parser.add_argument("--model", default="good")
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--threads", type=int)
    how = parser.parse_args()
    environment = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    print(json.dumps({"flags": sys.argv[1:], **environment}), file=sys.stderr)
    if how.model == "silent":
        print("error: cannot listen", file=sys.stderr)
        raise SystemExit(2)
    listening = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"kvscope": "listening", "port": listening.getsockname()[1], "pid": os.getpid()}), flush=True)
    print("loading \x1b[1mshards\x1b[0m 1/2\rloading shards 2/2", file=sys.stderr, flush=True)
    engine = FakeEngine()
    script = ScriptedEngine(engine.hub.publish, blocks=how.num_blocks, running=4, epoch=f"process {os.getpid()}")

    def work() -> None:
        if how.model == "slow":
            time.sleep(1.0)
        engine.problem = "the model is not one that we can serve" if how.model == "refused" else ""
        script.hello()
        if how.model == "crash":
            print("something broke", file=sys.stderr, flush=True)
            os._exit(3)
        while True:
            script.top_up(5)
            script.step()
            time.sleep(0.02)

    def watch_parent() -> None:
        while os.read(0, 100):
            pass
        if how.model != "deaf":
            os._exit(0)

    engine.problem = "loading the model"
    if how.model == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for target in (work, watch_parent):
        threading.Thread(target=target, daemon=True).start()
    server = uvicorn.Server(uvicorn.Config(engine.app, log_level="error"))
    server.capture_signals = contextlib.nullcontext  # signals do what they do by default, or nothing
    asyncio.run(server.serve([listening]))


if __name__ == "__main__":
    main()
