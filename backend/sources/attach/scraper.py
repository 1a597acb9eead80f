"""Reads one server's metrics again and again. Knows nothing of hubs and threads: a fleet runs many in one loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from backend.sources.attach import detect, profiles
from backend.sources.attach.detect import Found
from backend.sources.attach.exposition import Reader
from backend.sources.attach.meter import Meter, Reading
from backend.sources.attach.target import MIN_INTERVAL_S, TargetConfig, Unreachable
from backend.sources.attach.web import Web

STALE_INTERVALS = 3
BACKOFF_S = (0.5, 30.0)  # first and longest pause after a failure


class Scraper:
    """state: probing (never reached) | live | stale (no answer, numbers are old) | down (no answer for long).

    `message` says why it is not live. Use it within one event loop.
    """

    def __init__(self, config: TargetConfig, *, clock: Callable[[], float] = time.monotonic):
        self.config = config
        self.clock = clock
        self.interval_s = max(MIN_INTERVAL_S, config.interval_s)
        self.state, self.message = "probing", "asking what is there"
        self.found: Found | None = None
        self.reading: Reading | None = None  # the last
        self.failures = 0  # in a row
        self._web: Web | None = None
        self._meter: Meter | None = None
        self._reader: Reader | None = None
        self._live_at: float | None = None  # of the last answer

    @property
    def age_s(self) -> float | None:
        """Of the last answer; None when there never was one."""
        return None if self._live_at is None else self.clock() - self._live_at

    async def attempt(self) -> float:
        """Finds out what is there, or scrapes once. Never raises Unreachable; how long to wait until the next."""
        began = self.clock()
        try:
            if self.found is None or self.failures:  # after a failure: it may be another server
                await self.probe()
            await self.scrape()
        except Unreachable as error:
            return self._failed(str(error))
        self.failures, self.state, self.message, self._live_at = 0, "live", "", self.clock()
        return max(0.0, self.interval_s - (self.clock() - began))

    async def probe(self) -> Found:
        """Raises Unreachable."""
        found = await self._examine()
        if self._meter is None or self.found is None or found.kind != self.found.kind:
            known = profiles.profiles().get(found.kind) if found.metrics_url else None
            self._meter = Meter(known or profiles.nothing(found.kind, found.title))
            self._reader = Reader(self._meter.samples)
        self.found = found
        return found

    async def scrape(self) -> Reading:
        """One answer, understood; the same connection is used again. Raises Unreachable."""
        if self.found is None:
            await self.probe()
        t, web = self.clock(), self._connection()
        if not self.found.metrics_url:
            answer = await web.get("/v1/models")  # is it there at all?
            if answer.status >= 500:
                raise Unreachable(f"{web.where} answers HTTP {answer.status}")
            body = b""
        else:
            answer = await web.get(self.found.metrics_url)
            if answer.status in (401, 403):
                raise Unreachable(f"{web.where} does not let us read its metrics any more (HTTP {answer.status})")
            if not answer.ok or answer.is_page:
                what = "a web page" if answer.is_page else f"HTTP {answer.status}"
                raise Unreachable(f"{web.where} answers with {what} instead of metrics")
            body = answer.body
        took = self.clock() - t
        reading = self._meter.take(self._reader.read(body), t)
        reading.scrape_s, reading.bytes = took, len(body)
        self.reading = reading
        return reading

    async def close(self) -> None:
        if self._web is not None:
            web, self._web = self._web, None
            await web.close()

    def _connection(self) -> Web:
        if self._web is None:
            self._web = Web(self.config)
        return self._web

    async def _examine(self) -> Found:
        web = self._connection()
        try:
            async with asyncio.timeout(detect.PROBE_S):
                return await detect.examine(web)
        except TimeoutError:
            raise Unreachable(f"{web.where} answers too slowly to find out what it is") from None

    def _failed(self, why: str) -> float:
        self.failures += 1
        self.message = why
        age = self.age_s
        if age is not None:
            self.state = "stale" if age <= STALE_INTERVALS * self.interval_s else "down"
        elif self.failures > 1:
            self.state = "down"
        shortest, longest = BACKOFF_S
        pause = min(longest, shortest * 2 ** min(self.failures - 1, 10))
        return pause * random.uniform(0.75, 1.25)
