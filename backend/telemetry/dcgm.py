"""A DCGM exporter beside the engine: the only source of DRAM activity on Volta to Ada. `KVSCOPE_DCGM_URL` names it.

DCGM needs privileges that the engine does not have, so another process reads and this one asks for its metrics page. An
exporter collects every second at best, every 30 s by default, and its clock is not trusted: values count from arrival.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from backend.telemetry.readings import ReadError

URL = "KVSCOPE_DCGM_URL"  # http://127.0.0.1:9400/metrics
DRAM_ACTIVE = "DCGM_FI_PROF_DRAM_ACTIVE"
TIMEOUT_S, KEPT_S = 0.5, 1.0
MOST_BYTES = 4 * 2**20


def parse(text: str) -> dict[str, float]:
    """UUID -> share of time that the DRAM interface was active, 0 to 1. Slices are left out, and blank values dropped.

    DCGM marks "no value" by 2^47 and other huge numbers; whatever lies outside 0 … 1 is no share.
    """
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name != DRAM_ACTIVE:
            continue
        for sample in family.samples:
            if "UUID" in sample.labels and not sample.labels.get("GPU_I_ID") and 0 <= sample.value <= 1:
                found[sample.labels["UUID"]] = sample.value
    return found


class Exporter:
    """Asked at most once a second, whatever the number of GPUs. Not thread-safe."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic):
        self._url, self._clock = url, clock
        self._until = 0.0
        self._shares: dict[str, float] = {}
        self._problem = ""

    @classmethod
    def from_environment(cls) -> Exporter | None:
        url = os.environ.get(URL, "").strip()
        return cls(url) if url else None

    def dram_active_percent(self, uuid: str) -> float:
        """Raises ReadError."""
        now = self._clock()
        if now >= self._until:
            self._until = now + KEPT_S
            self._fetch()
        if self._problem:
            raise ReadError(self._problem)
        if uuid not in self._shares:
            raise ReadError(f"the DCGM exporter tells no {DRAM_ACTIVE} of this GPU (its dcp-metrics-included.csv does)")
        return 100 * self._shares[uuid]

    def _fetch(self) -> None:
        self._shares, self._problem = {}, ""
        if not self._url.startswith(("http://", "https://")):
            self._problem = f"{URL}={self._url[:100]} is no http address"
            return
        try:
            with urllib.request.urlopen(self._url, timeout=TIMEOUT_S) as answer:  # noqa: S310  only http, see above
                self._shares = parse(answer.read(MOST_BYTES).decode("utf-8", "replace"))
        except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError) as error:
            self._problem = f"the DCGM exporter at {self._url[:100]} does not answer: {getattr(error, 'reason', error)}"
