"""A thread with an event loop of its own: sources and synthetic users live there, whoever runs the page."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Background:
    def __init__(self, name: str = "kvscope-sources"):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Starts `work` from any thread; cancelling the future cancels it. Raises RuntimeError once closed."""
        if self.loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise RuntimeError("the background loop is closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancels everything and ends the thread. Harmless when closed already."""
        if self.loop.is_closed():
            return
        if self._thread.is_alive():
            ended = asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop)
            try:
                ended.result(timeout_s)
            except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                pass  # a task that does not let itself be cancelled dies with the thread's process
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
