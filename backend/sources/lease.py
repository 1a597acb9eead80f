"""Keeping the engine's sensors awake while somebody looks at them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection

from backend.sources.background import Background
from backend.sources.remote import EngineClient, EngineError

RENEW_S = 3.0  # an engine stops sampling when nobody has asked for 10 s


class TelemetryLease:
    """`renew` from any thread and as often as one likes: it returns at once, and asks the engine every RENEW_S.

    An engine that does not answer, or knows no sensors, is asked again like any other: pages show what events say.
    """

    def __init__(self, client: EngineClient, background: Background, clock: Callable[[], float] = time.monotonic):
        self._client, self._background, self._clock = client, background, clock
        self._lock = threading.Lock()
        self._panels: dict[str, float] = {}  # panel -> when somebody wanted it last
        self._asking, self._not_before = False, 0.0

    def renew(self, panels: Collection[str]) -> None:
        """`panels`: those that are open and cost something, such as "pcie"."""
        with self._lock:
            now = self._clock()
            fresh = not self._panels.keys() >= set(panels)  # a panel was opened: it need not wait
            self._panels |= dict.fromkeys(panels, now)
            if self._asking or (now < self._not_before and not fresh):
                return
            self._asking, self._not_before = True, now + RENEW_S
            self._panels = {panel: t for panel, t in self._panels.items() if now - t < 2 * RENEW_S}
            wanted = sorted(self._panels)
        try:
            self._background.run(self._ask(wanted))
        except RuntimeError:  # everything is being closed
            self._asking = False

    async def _ask(self, panels: list[str]) -> None:
        try:
            await asyncio.to_thread(self._client.watch_telemetry, panels)
        except EngineError:
            pass
        finally:
            self._asking = False
