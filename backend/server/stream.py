"""Answers that take time: they end early when the client goes away or the server does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


class Disconnected(Exception):
    """The client is gone; nobody reads what would be said."""


class Closing(Exception):
    """The server is about to end."""


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Receive, closing: asyncio.Event) -> Result:
    """The result of `work`. Cancels it and raises Disconnected or Closing when nobody waits for it any more."""
    tasks = [
        asyncio.ensure_future(work),
        asyncio.ensure_future(_disconnect(receive)),
        asyncio.ensure_future(closing.wait()),
    ]
    job, gone, _ = tasks
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise Disconnected if gone.done() else Closing
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Stream(Response):
    """Sends each chunk as it comes. `end` runs once, however it ended; `farewell` is said when the server closes."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        closing: asyncio.Event,
        end: Callable[[], None],
        media_type: str,
        farewell: bytes = b"",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(None, headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # asks proxies not to hold chunks back
        self._chunks, self._closing, self._end, self._farewell = chunks, closing, end, farewell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await unless_gone(self._send_all(say), receive, self._closing)
            except Disconnected:
                return
            except Closing:
                await say(self._farewell)
            await say(b"", more=False)
        finally:
            self._end()

    async def _send_all(self, say: Callable[[bytes], Awaitable[None]]) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                await say(chunk)


async def merged(sources: list[AsyncIterator[Result]]) -> AsyncIterator[tuple[int, Result]]:
    """(index of the source, item) in the order in which they come. An error in one source ends all."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Result] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, source: AsyncIterator[Result]) -> None:
        try:
            async for item in source:
                queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(i, source)) for i, source in enumerate(sources)]
    try:
        open_sources = len(sources)
        while open_sources:
            got = await queue.get()
            if got is None:
                open_sources -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
