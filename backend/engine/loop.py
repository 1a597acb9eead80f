"""The engine's own thread, and the bridge to asyncio. The server talks to this and to nothing behind it.

Between two steps the thread runs what was asked of it (submit, abort, configure, any `call`), so nothing ever changes
under a step. What a step said goes to the event loop in one hop, whatever the number of requests.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from backend.engine.engine import Engine
from backend.engine.request import Delta, SamplingParams
from backend.events import Fault

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Stream:
    """Deltas of one request, ending with the one that has a finish reason."""

    def __init__(self, loop: EngineLoop, number: int):
        self.request = number
        self._loop = loop
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._ended = False

    def push(self, delta: Delta) -> None:
        self._deltas.put_nowait(delta)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while not self._ended:
            delta = await self._deltas.get()
            self._ended = delta.finish_reason is not None
            yield delta

    def abort(self) -> None:
        """Whoever stops listening early calls this. Harmless at any time, any number of times."""
        if not self._ended:
            self._loop.post(lambda _: self._loop.abort_one(self.request))


class Hold:
    """Steps that do not begin: for `seconds`, counted from when step number `at_step` was made."""

    def __init__(self, seconds: float, at_step: int):
        self.seconds, self.at_step = seconds, at_step
        self._until = None if at_step else time.monotonic() + seconds

    def left_s(self, steps: int) -> float:
        if steps < self.at_step:
            return 0.0
        if self._until is None:
            self._until = time.monotonic() + self.seconds
        return max(0.0, self._until - time.monotonic())

    @property
    def over(self) -> bool:
        return self._until is not None and time.monotonic() >= self._until


class EngineLoop:
    def __init__(self, engine: Engine):
        self.engine = engine
        self.failure: str | None = None  # set when the thread has died; nothing is served any more
        self._commands: queue.SimpleQueue[tuple[Future, Callable[[Engine], Any]] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()  # nothing is put behind the last command that is answered
        self._streams: dict[int, Stream] = {}
        self._hold: Hold | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._asyncio: asyncio.AbstractEventLoop | None = None

    def start(self, asyncio_loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio = asyncio_loop
        self._thread.start()

    async def stop(self) -> None:
        """Ends after the step at hand; open streams end with "abort"."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # ---- what the server asks ------------------------------------------------------------------------------------

    async def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        id: str,
        user: str = "",
        n: int = 1,
        salt: str = "",
        priority: int = 0,
    ) -> list[Stream]:
        """Raises Refused or Busy. A caller that is cancelled while waiting leaves no request behind."""
        arrived = self.engine.now()
        if self.engine.front_wait_s:
            await asyncio.sleep(self.engine.front_wait_s)

        def enter(engine: Engine) -> list[Stream]:
            requests = engine.submit(
                tokens, params, id=id, user=user, n=n, salt=salt.encode(), priority=priority, arrived=arrived
            )
            streams = [Stream(self, r.number) for r in requests]
            self._streams.update((s.request, s) for s in streams)
            return streams

        future = self.post(enter)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_abort_all)
            raise

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """`function(engine)`, run in the engine's thread between two steps."""
        return await asyncio.wrap_future(self.post(function))

    async def configure(self, changes: dict) -> Any:
        """Raises ConfigError or NotIdle."""
        return await self.call(lambda engine: engine.configure(changes))

    async def reset_prefix_cache(self) -> None:
        """Raises NotIdle."""
        await self.call(lambda engine: engine.reset_prefix_cache())

    async def abort(self, request_id: str) -> int:
        """Ends every request with this API id; 0 when there is none (any more), which is fine."""
        return await self.call(lambda engine: sum(self.abort_one(number) for number in engine.find(request_id)))

    async def hold(self, seconds: float, at_step: int = 0) -> int:
        """No step begins for `seconds`, or until the next hold; with `at_step`, once so many steps have been made.

        So that what is sent meanwhile enters the same step, and the same schedule comes out every time. 0 goes on at
        once. Returns the steps made so far.
        """

        def set_hold(engine: Engine) -> int:
            self._hold = Hold(seconds, at_step) if seconds else None
            return engine.steps

        return await self.call(set_hold)

    def post(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Like `call`, for those who do not wait."""
        future: Future = Future()
        with self._gate:
            if self.failure:
                future.set_exception(RuntimeError(self.failure))
            else:
                self._commands.put((future, function))
        return future

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                self._hand_over(self.engine.step())
            self._end("abort", "the engine was stopped")
        except Exception as error:  # a broken invariant: stop rather than serve from a broken pool
            log.exception("the engine's thread died")
            message = f"the engine stopped: {type(error).__name__}: {error}"
            self.engine.report(Fault(message=message, fatal=True))
            self._end("error", message)

    def _obey(self) -> bool:
        """Runs the commands that have come; waits for one while there is no work. False: stop."""
        while True:
            try:
                wait_s = self._wait_s()
                command = self._commands.get(block=wait_s != 0, timeout=wait_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            future, function = command
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(self.engine))
            except Exception as error:  # belongs to whoever asked
                future.set_exception(error)

    def _wait_s(self) -> float | None:
        """How long a command is waited for before the next step: 0 not at all, None for ever."""
        if self.engine.idle:
            return None
        left_s = self._hold.left_s(self.engine.steps) if self._hold else 0
        if not left_s and self._hold and self._hold.over:
            self._hold = None
        return left_s

    def abort_one(self, number: int) -> bool:
        """In the engine's thread: ends a request and lets its listener hear the last word."""
        delta = self.engine.abort(number)
        if delta:
            self._hand_over([delta])
        return delta is not None

    def _hand_over(self, deltas: list[Delta]) -> None:
        if deltas:
            self._asyncio.call_soon_threadsafe(self._deliver, deltas)

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request)
            if stream is None:
                continue
            stream.push(delta)
            if delta.finish_reason:
                del self._streams[delta.request]

    def _end(self, reason: str, message: str) -> None:
        """Nobody waits for ever: open streams end, commands that came too late fail."""
        with self._gate:
            self.failure = message
        self._hand_over([Delta(request=n, finish_reason=reason, message=message) for n in list(self._streams)])
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is not None and command[0].set_running_or_notify_cancel():
                command[0].set_exception(RuntimeError(self.failure))


def _abort_all(future: Future) -> None:
    if not future.cancelled() and future.exception() is None:
        for stream in future.result():
            stream.abort()
