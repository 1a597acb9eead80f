"""A foreign engine as a source: its metrics become events, and so do requests that we send to it.

Two threads: one scrapes, the background's loop has our own requests. Both stamp and publish through one lock, so that
numbers of events rise as they are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from backend import events
from backend.hub import Hub
from backend.sources.attach import greeting
from backend.sources.attach.capabilities import with_kv
from backend.sources.attach.client import AttachedClient
from backend.sources.attach.detect import Found
from backend.sources.attach.journal import Journal, Own
from backend.sources.attach.kv_sources import BadEndpoint, Endpoint, typed
from backend.sources.attach.meter import Reading
from backend.sources.attach.scraper import Scraper
from backend.sources.attach.target import TargetConfig
from backend.sources.background import Background
from backend.sources.status import Status

log = logging.getLogger("kvscope.sources")

CLOSE_S = 3.0
KNOWN_UNKNOWN = 200  # names that are listed
KEPT_CONTENTS = 64  # requests of our own whose tokens are kept, to find their blocks on the map


class AttachedSource:
    """What `Source` is for engines of our own. `found`: what is there, None before it was ever reached."""

    kind = "attached"
    can_restart = False
    engine = None

    def __init__(self, config: TargetConfig, hub: Hub | None = None):
        self.config = config
        self.hub = hub or Hub()
        self.background = Background()
        self._began, self._wall = time.monotonic(), time.time()
        self._lock = threading.RLock()
        self._seq = 0
        self._greeted: tuple | None = None  # what the last Hello said
        self._able: list[events.View] = []  # what the last Capabilities said
        self._contents: OrderedDict[int, list[int]] = OrderedDict()  # token ids of our last requests, by number
        self._error = ""
        self.kv: Any = None  # `kv_events.KvEvents` while it is followed
        self.kv_problem = ""
        self.scraper = Scraper(config, clock=self._now)
        self._journal = Journal(self._publish, self._now)
        self.client = AttachedClient(config, self.background, self._journal, lambda: self.scraper.found, self._heard)
        self._scraping = Background("kvscope-attach")
        self._task = self._scraping.run(self._scrape_for_ever())

    @property
    def found(self) -> Found | None:
        return self.scraper.found

    @property
    def reading(self) -> Reading | None:
        return self.scraper.reading

    @property
    def unknown(self) -> dict[str, int]:
        """Series that no mapping knows, by name: listed, not lost."""
        reading = self.scraper.reading
        return dict(sorted(reading.unknown.items())[:KNOWN_UNKNOWN]) if reading else {}

    @property
    def status(self) -> Status:
        scraper = self.scraper
        if self._error:
            return Status(phase="dead", message=self._error)
        if scraper.state == "probing" and not scraper.failures:
            return Status(phase="starting", message=f"asking what is at {self.config.label}")
        if scraper.state in ("probing", "down"):
            return Status(phase="dead", message=scraper.message)
        if scraper.state == "stale":
            return Status(phase="ready", message=f"no answer for {scraper.age_s or 0:.0f} s: {scraper.message}")
        return Status(phase="ready")

    def restart(self, options: Mapping[str, Any] | None = None) -> None:
        """Raises SourceError: it is not ours."""
        from backend.sources import SourceError  # late: it names this source

        raise SourceError("this engine runs elsewhere: restart it where it runs")

    def close(self) -> None:
        """Ends everything that was begun here; the engine itself goes on. Harmless when closed already."""
        self.client.close()
        self._stop_kv()
        if not self._scraping.loop.is_closed():
            self._task.cancel()
            try:
                self._scraping.run(self.scraper.close()).result(CLOSE_S)
            except Exception as error:
                log.debug("closing the connection failed: %s", error)
        self._scraping.close()
        self.background.close()

    # ---- the scraping thread -------------------------------------------------------------------------------------

    async def _scrape_for_ever(self) -> None:
        while True:
            try:
                pause = await self.scraper.attempt()
                if self.scraper.state == "live":
                    self._tell(self.scraper.found, self.scraper.reading)
                self._error = ""
            except Exception as error:  # a mistake of ours must not end the picture for good
                log.exception("scraping failed")
                self._error, pause = f"internal error: {type(error).__name__}: {error}", 2.0
            await asyncio.sleep(pause)

    def _tell(self, found: Found, reading: Reading) -> None:
        said = (found.kind, found.version, found.model, reading.cells, reading.block_size)
        new = said != self._greeted or reading.restarted
        if new:
            self._greeted = said
            hello = greeting.hello(found, reading, label=self.config.label, wall_time=self._wall)
            self._publish(hello)
            with contextlib.suppress(RuntimeError):  # the loop is closed: so is this
                self.background.loop.call_soon_threadsafe(self._retell)
        self._follow_kv(found, reading, new)
        able = with_kv(found.capabilities, self.kv)
        if new or able != self._able:
            self._able = able
            self._publish(events.Capabilities(kind=found.kind, version=found.version, views=able))
        self._publish(
            events.Scrape(
                t=reading.t,
                values=greeting.values(found, reading, list(self._journal.live.values())) | greeting.cached(self.kv),
                window_s=0.0 if reading.restarted else reading.window_s,
                scrape_s=reading.scrape_s,
                restarts=reading.restarts,
                unknown=sum(reading.unknown.values()),
                by_engine=reading.by_engine,
            )
        )

    def _retell(self) -> None:
        """In the loop of our requests: those in flight, for an epoch that has not heard of them."""
        self._journal.retell(self.hub.read(lambda state: set(state.requests)))

    # ---- KV events -----------------------------------------------------------------------------------------------

    def _follow_kv(self, found: Found, reading: Reading, new: bool) -> None:
        """Starts to listen once it is known where, tells all again after a Hello."""
        endpoints = self._kv_endpoints(found)
        if self.kv is not None and endpoints and endpoints != self.kv.endpoints:
            self._stop_kv()  # it was started anew and publishes elsewhere
        if self.kv is not None:
            if new:
                self.kv.resize(reading.cells // greeting.per_cell(reading))
                self.kv.announce()
            return
        if not endpoints or self.kv_problem:
            return
        try:
            from backend.sources.attach.kv_events import KvEvents  # late: it needs pyzmq
        except ImportError as error:
            self.kv_problem = f"KV events cannot be followed: {error}"
            return
        able = found.kind in ("vllm", "sglang", "kvscope")
        self.kv = KvEvents(
            endpoints,
            num_blocks=reading.cells // greeting.per_cell(reading),
            detokenize=self.client.detokenize if able else None,
        )
        self.kv.start(self._publish)

    def _kv_endpoints(self, found: Found) -> list[Endpoint]:
        if self.config.kv_events == "off":
            return []
        if self.config.kv_events == "auto":
            return found.kv_endpoints
        try:
            return [typed(self.config.kv_events)]
        except BadEndpoint as error:
            self.kv_problem = str(error)
            return []

    def table_of(self, request: int) -> list[int]:
        """Cells of a request of our own, of its full blocks, inferred from its tokens. [] where those are not told."""
        own = self._journal.live.get(request)
        kv, tokens = self.kv, list(own.token_ids) if own is not None else self._contents.get(request)
        return kv.table_of(tokens) if kv is not None and tokens else []

    def _heard(self, own: Own) -> None:
        if own.token_ids:
            self._contents[own.request] = own.token_ids
            while len(self._contents) > KEPT_CONTENTS:
                self._contents.popitem(last=False)

    def _stop_kv(self) -> None:
        if self.kv is not None:
            kv, self.kv = self.kv, None
            kv.close()

    # ---- events --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _publish(self, event: events.Event) -> None:
        """From any thread. An event without a time happens now."""
        with self._lock:
            self._seq += 1
            event.seq = self._seq
            event.t = event.t or self._now()
            self.hub.publish(event)
