"""Many servers at once: one thread, one event loop, a task for each, so that one that hangs holds up nobody.

Scrapes are spread over the interval, and there is at most one on its way to each server. What is kept is the last
reading of each: memory does not grow with time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from backend.sources.attach import endpoints as listed
from backend.sources.attach import node_gpus
from backend.sources.attach.endpoints import Endpoint
from backend.sources.attach.fleet_rows import ReplicaRow, Sums, by_rank, sums
from backend.sources.attach.node_gpus import NodeGpu
from backend.sources.attach.scraper import STALE_INTERVALS, Scraper
from backend.sources.attach.target import TargetConfig, Unreachable
from backend.sources.attach.web import Web
from backend.sources.background import Background

log = logging.getLogger("kvscope.sources")

RESOLVE_EVERY_S = 30.0
GPUS_EVERY_S = 2.0  # an exporter collects every second at best, every 30 s by default
SPREAD_S = 1.0  # the first scrapes of a fleet
AGAIN_S = 10.0  # after our own code stumbled over an answer
NO_EXPORTER = "no DCGM exporter is named for this host (dcgm=http://host:9400/metrics in the list)"


class Fleet:
    """Follows `servers` until it is closed. `rows` and `sums` may be called from any thread, as often as wanted."""

    def __init__(self, servers: Iterable[Endpoint | TargetConfig], *, resolve_every_s: float = RESOLVE_EVERY_S):
        self._servers = [s if isinstance(s, Endpoint) else Endpoint(config=s) for s in servers][: listed.MAX_ENDPOINTS]
        self._resolve_every_s = resolve_every_s
        self._replicas: tuple[_Replica, ...] = ()  # replaced, never changed: other threads read it
        self._nameless: dict[str, str] = {}  # address with a DNS name that has no address -> why; replaced as well
        self._gpus: dict[str, _Exporter] = {}  # by address; replaced as well
        self._background = Background("kvscope-fleet")
        named = [(server, server) for server in self._servers if not server.dns]
        self._background.run(self._set(named)).result()
        self._background.run(self._follow_names())

    def rows(self) -> list[ReplicaRow]:
        """A row a replica, in the order of the list; ranks of one address stand together."""
        return self._rows()[1]

    def sums(self) -> Sums:
        return sums(*self._rows())

    def config(self, key: str) -> TargetConfig | None:
        """How the replica of this row is reached; for a rank, its address. None when it is no longer there."""
        url = key.partition("#")[0]
        return next((one.endpoint.config for one in self._replicas if one.endpoint.config.url == url), None)

    def close(self) -> None:
        """Harmless when closed already."""
        self._background.close()

    def _rows(self) -> tuple[list[ReplicaRow], list[ReplicaRow]]:
        """(a row an address, a row a rank)."""
        addresses: list[ReplicaRow] = []
        ranks: list[ReplicaRow] = []
        for replica in self._replicas:
            row = replica.row(self._gpus.get(replica.dcgm))
            reading = replica.scraper.reading
            addresses.append(row)
            ranks += by_rank(row, reading.by_engine if reading else ())
        for url, why in self._nameless.items():
            row = ReplicaRow(key=url, name=url, url=url, host=urlsplit(url).hostname or url, state="down", message=why)
            addresses.append(row)
            ranks.append(row)
        return addresses, ranks

    # ---- in the loop ---------------------------------------------------------------------------------------------

    async def _follow_names(self) -> None:
        while any(server.dns for server in self._servers):
            found = await asyncio.gather(*(self._addresses(server) for server in self._servers))
            await self._set([(one, server) for server, some in zip(self._servers, found, strict=True) for one in some])
            await asyncio.sleep(self._resolve_every_s)

    async def _addresses(self, server: Endpoint) -> list[Endpoint]:
        """Those that are known already, when the name cannot be resolved now."""
        if not server.dns:
            return [server]
        url = server.config.url
        others = {other: why for other, why in self._nameless.items() if other != url}
        try:
            found = await listed.resolve(server)
        except (OSError, TimeoutError) as error:
            found = [replica.endpoint for replica in self._replicas if replica.listed is server]
            if not found:
                why = getattr(error, "strerror", None) or f"no answer within {listed.RESOLVE_S:.0f} s"
                others[url] = f"{server.host} has no address: {why}"
        self._nameless = others
        return found

    async def _set(self, wanted: Sequence[tuple[Endpoint, Endpoint]]) -> None:
        """(server, its line in the list). Who is there already goes on undisturbed."""
        by_url = {one.config.url: (one, line) for one, line in wanted[: listed.MAX_ENDPOINTS]}
        before = {replica.endpoint.config.url: replica for replica in self._replicas}
        exporters = {one.host: one.dcgm for one, _ in by_url.values() if one.dcgm}
        for url in self._gpus.keys() - set(exporters.values()):
            self._gpus[url].stop()
        self._gpus = {url: self._gpus.get(url) or _Exporter(url) for url in exporters.values()}
        new = [url for url in by_url if url not in before]
        replicas = []
        for url, (one, line) in by_url.items():
            replica = before.pop(url, None)
            if replica is None:
                replica = _Replica(one, line, one.dcgm or exporters.get(one.host, ""))
                replica.start(SPREAD_S * new.index(url) / len(new))
            replicas.append(replica)
        self._replicas = tuple(replicas)
        for replica in before.values():
            await replica.stop()


class _Replica:
    """One server, scraped in a task of its own."""

    def __init__(self, endpoint: Endpoint, line: Endpoint, dcgm: str):
        self.endpoint, self.listed, self.dcgm = endpoint, line, dcgm
        self.scraper = Scraper(endpoint.config)
        self._fault = ""
        self._task: asyncio.Task[None] | None = None

    def start(self, delay_s: float) -> None:
        self._task = asyncio.get_running_loop().create_task(self._follow(delay_s))

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def row(self, exporter: _Exporter | None) -> ReplicaRow:
        """As it is now. From any thread."""
        scraper, config = self.scraper, self.endpoint.config
        found, reading, age = scraper.found, scraper.reading, scraper.age_s
        state, message = scraper.state, scraper.message
        if state == "live" and age is not None and age > STALE_INTERVALS * scraper.interval_s:
            state, message = "stale", f"no answer for {age:.0f} s"
        if self._fault:
            state, message = "down", self._fault
        return ReplicaRow(
            key=config.url,
            name=config.label,
            url=config.url,
            host=self.endpoint.host,
            kind=found.kind if found else "",
            model=found.model if found else "",
            state=state,
            message=message,
            age_s=age,
            scrape_s=reading.scrape_s if reading else None,
            restarts=reading.restarts if reading else 0,
            values=reading.values if reading else {},
            gpus=exporter.gpus if exporter else (),
            gpus_message=exporter.message if exporter else NO_EXPORTER,
        )

    async def _follow(self, delay_s: float) -> None:
        clock, scraper = asyncio.get_running_loop().time, self.scraper
        due = clock() + delay_s
        try:
            while True:
                await asyncio.sleep(max(0.0, due - clock()))
                try:
                    pause, self._fault = await scraper.attempt(), ""
                except Exception as error:  # a mistake of ours must not pass for a server that is silent
                    log.exception("scraping %s failed", self.endpoint.config.label)
                    pause, self._fault = AGAIN_S, f"internal error: {type(error).__name__}: {error}"
                now = clock()
                on_time = scraper.state == "live" and not self._fault and now < due + 2 * scraper.interval_s
                due = due + scraper.interval_s if on_time else now + pause  # a grid, so that lateness does not add up
        finally:
            await self.scraper.close()


class _Exporter:
    """A DCGM exporter, read in a task of its own."""

    def __init__(self, url: str):
        self.gpus: Sequence[NodeGpu] = ()
        self.message = "the DCGM exporter has not answered yet"
        self._url, self._reader = url, node_gpus.reader()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def stop(self) -> None:
        self._task.cancel()

    async def _follow(self) -> None:
        parts = urlsplit(self._url)
        try:
            web = Web(TargetConfig(url=parts._replace(path="", query="", fragment="").geturl()))
        except Unreachable as error:
            self.message = f"no GPU readings: {error}"
            return
        try:
            while True:
                await self._read(web, parts.path or "/metrics")
                await asyncio.sleep(GPUS_EVERY_S)
        finally:
            await web.close()

    async def _read(self, web: Web, path: str) -> None:
        try:
            answer = await web.get(path)
        except Unreachable as error:
            self.gpus, self.message = (), f"no GPU readings: {error}"
            return
        if not answer.ok:
            self.gpus, self.message = (), f"no GPU readings: the exporter answers HTTP {answer.status}"
            return
        self.gpus = node_gpus.gpus(self._reader, answer.body)
        self.message = "" if self.gpus else "the exporter tells of no GPU"
