"""An engine for measuring the page: scripted events at a steady pace, over the engine's own HTTP, no model behind.

python -m benchmarks.scripted_server --port 8123 --blocks 4096 --running 64 --steps-per-s 50
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from backend.events import Hello
from backend.hub import Hub
from tests.scripted_engine import ScriptedEngine


def app(blocks: int, running: int, steps_per_s: float) -> Starlette:
    hub = Hub()
    started = time.time()

    def emit(event) -> None:
        if isinstance(event, Hello):
            event.wall_time = started  # so that a page can tell how old an event is when it is painted
        hub.publish(event)

    # Long answers, and prompts that fill half of the pool.
    longest = max(64, blocks * 16 // (2 * running))
    engine = ScriptedEngine(
        emit,
        blocks=blocks,
        running=running,
        chunk=512,
        prompt=(longest // 2, longest),
        output=(200, 800),
        shared_tokens=256,
        abort_share=0,
        fork_share=0,
        steps_per_s=steps_per_s,
        epoch=f"scripted-{started}",
        clock=lambda: time.time() - started,
    )

    async def run() -> None:
        engine.hello()
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            engine.top_up(running)
            engine.step()
            due += 1 / steps_per_s
            await asyncio.sleep(max(0.0, due - loop.time()))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        hub.attach()
        task = asyncio.create_task(run())
        yield
        task.cancel()

    async def events(request: Request) -> Response:
        since = request.query_params.get("since")
        follow = hub.follow(None if since is None else int(since), request.query_params.get("epoch", ""))

        async def lines() -> AsyncIterator[bytes]:
            async for batch in follow:
                yield b"".join(line + b"\n" for line in batch)

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def health(_: Request) -> Response:
        return Response()

    return Starlette(routes=[Route("/engine/events", events), Route("/health", health)], lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps-per-s", type=float, default=50)
    arguments = parser.parse_args()
    served = app(arguments.blocks, arguments.running, arguments.steps_per_s)
    uvicorn.run(served, port=arguments.port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
