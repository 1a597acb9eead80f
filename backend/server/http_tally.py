"""HTTP requests, counted as vLLM's server counts them, so that dashboards made for it find them: names, labels, bucket
bounds and what is left out are those of prometheus-fastapi-instrumentator 8 with the settings that vLLM 0.32 gives it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.server.tally import Histogram

LEFT_OUT = frozenset({"/metrics", "/health", "/version"})  # what watchers ask for, all the time
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"  # any word may stand for a method: what a stranger sends makes no series of its own
NO_ROUTE = "none"  # handler of an unknown path, and of what the guard has refused
FEW_S = (0.1, 0.5, 1.0)
MANY_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0),
)


class HttpTally:
    """Requests that have ended, also those that were refused. Of the event loop."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()  # handler, method, class of the status
        self.duration_s = Histogram(MANY_S)
        self.by_handler_s: dict[tuple[str, str], Histogram] = {}  # handler, method

    def count(self, handler: str, method: str, status: int, duration_s: float) -> None:
        if handler in LEFT_OUT:
            return
        method = method if method in METHODS else OTHER
        self.counts[handler, method, f"{status // 100}xx"] += 1
        self.duration_s.observe(duration_s)
        self.by_handler_s.setdefault((handler, method), Histogram(FEW_S)).observe(duration_s)

    def families(self) -> Iterator[Metric]:
        total = CounterMetricFamily(
            "http_requests",
            "Total number of requests by method, status and handler.",
            labels=["handler", "method", "status"],
        )
        for labels, count in self.counts.items():
            total.add_metric(labels, count)
        highr = HistogramMetricFamily(
            "http_request_duration_highr_seconds", "From a request's first byte to its answer's last, many buckets."
        )
        highr.add_metric([], self.duration_s.cumulative(), self.duration_s.sum)
        lowr = HistogramMetricFamily(
            "http_request_duration_seconds", "The same by handler, few buckets.", labels=["handler", "method"]
        )
        for labels, seconds in self.by_handler_s.items():
            lowr.add_metric(labels, seconds.cumulative(), seconds.sum)
        yield from (total, highr, lowr)


class Counted:
    """Outermost, and pure ASGI: it sees what the guard refuses, and a stream's time is that of all of it."""

    def __init__(self, app: ASGIApp, *, tally: HttpTally):
        self.app, self.tally = app, tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            handler = getattr(scope.get("route"), "path", NO_ROUTE)  # the router has put it there
            self.tally.count(handler, scope["method"], status, time.perf_counter() - begin)
