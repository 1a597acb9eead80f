"""An event loop whose timers are punctual: where epoll is used, asyncio's own are up to a millisecond late."""

from __future__ import annotations

import asyncio
import select
import selectors
import time

COARSE_S = 0.002  # until so long before a timer, epoll's milliseconds do
AWAKE_S = 0.0003  # the last of it: a virtual machine takes as long to wake a process up

if hasattr(selectors, "EpollSelector"):

    class Punctual(selectors.EpollSelector):
        """Ends its waits on the microsecond, and hears what comes meanwhile."""

        def select(self, timeout: float | None = None):
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            if timeout > COARSE_S:  # the loop looks again, and waits for the rest
                return super().select(timeout - COARSE_S)
            due = time.monotonic() + timeout
            if timeout > AWAKE_S:
                select.select((self.fileno(),), (), (), timeout - AWAKE_S)
            while not (ready := super().select(0)) and time.monotonic() < due:
                pass
            return ready


def loop() -> asyncio.AbstractEventLoop:
    """kqueue is punctual by itself."""
    if hasattr(selectors, "EpollSelector"):
        return asyncio.SelectorEventLoop(Punctual())
    return asyncio.new_event_loop()
