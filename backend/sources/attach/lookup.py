"""Look-ups in one scrape by the names of a profile: gauges and growth of each engine under one address."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from backend.sources.attach.exposition import Exposition, Labels
from backend.sources.attach.profiles import Candidate, Profile
from backend.sources.attach.windows import Grown

ENGINE_LABELS = ("engine", "dp_rank", "worker_id", "WorkerId", "ReplicaId", "dynamo_component")

Engine = tuple[tuple[str, str], ...]  # labels that tell engines under one address apart


class Scrape:
    """`grown`: what counters grew in the last `window_s`; None: no second reading yet."""

    def __init__(self, profile: Profile, told: Exposition, grown: Grown | None, window_s: float):
        self._profile, self.told, self.grown, self.window_s = profile, told, grown, window_s
        self.config: dict[str, str] = {}

    def gauge(self, name: str) -> tuple[Candidate, dict[Engine, float]] | None:
        """What each engine says, of the first candidate that is there."""
        for candidate in self._profile.metrics.get(name, ()):
            series = self.told.series.get(candidate.name)
            if not series or candidate.read not in ("gauge", "label"):
                continue
            if candidate.read == "label":
                found = self._label(candidate, series)
            else:
                found = self._by_engine(candidate, series.items())
            if found:
                return candidate, found
        return None

    def counter(self, name: str) -> tuple[Candidate, dict[Engine, float] | None] | None:
        """What it grew at each engine; None inside: no second reading yet."""
        for candidate in self._profile.metrics.get(name, ()):
            if candidate.read != "counter" or not self._matching(candidate, self.told.series.get(candidate.name)):
                continue
            if self.grown is None:
                return candidate, None
            return candidate, self._by_engine(candidate, self.grown.get(candidate.name, {}).items())
        return None

    def histogram(self, name: str) -> tuple[Candidate, dict[float, float] | None] | None:
        """Growth of each bucket, over all engines: bound -> how many are at most that."""
        for candidate in self._profile.metrics.get(name, ()):
            bucket = f"{candidate.name}_bucket"
            if candidate.read != "histogram" or not self.told.series.get(bucket):
                continue
            if self.grown is None:
                return candidate, None
            growth: dict[float, float] = {}
            for labels, grown in self.one_rank(self.grown.get(bucket, {}).items()):
                bound = _bound(labels)
                if bound is not None:
                    growth[bound] = growth.get(bound, 0.0) + grown
            return candidate, growth
        return None

    def _label(self, candidate: Candidate, series: dict[Labels, float]) -> dict[Engine, float]:
        found = {}
        for labels, _ in self.one_rank(series.items()):
            told = dict(labels)
            self.config = told
            try:
                value = float(told.get(candidate.label, ""))
            except ValueError:  # "None", or no such label
                continue
            if math.isfinite(value) and value > 0:
                found[_engine(told)] = value
        return found

    def _by_engine(self, candidate: Candidate, series: Iterable[tuple[Labels, float]]) -> dict[Engine, float]:
        found: dict[Engine, float] = {}
        for labels, value in self.one_rank(series):
            told = dict(labels)
            if math.isfinite(value) and _fits(candidate, told):
                engine = _engine(told)
                found[engine] = found.get(engine, 0.0) + value
        return found

    def _matching(self, candidate: Candidate, series: dict[Labels, float] | None) -> bool:
        return bool(series) and (not candidate.where or any(_fits(candidate, dict(labels)) for labels in series))

    def one_rank(self, series: Iterable[tuple[Labels, float]]) -> Iterable[tuple[Labels, float]]:
        """Of ranks that share the work of one engine (tensor, pipeline), the first: all tell the same."""
        ranks = self._profile.one_rank
        if not ranks:
            return series
        series = list(series)
        for rank in ranks:
            told = {dict(labels).get(rank) for labels, _ in series} - {None}
            if len(told) > 1:
                first = min(told, key=lambda text: (len(text), text))
                series = [item for item in series if dict(item[0]).get(rank, first) == first]
        return series


def _fits(candidate: Candidate, labels: dict[str, str]) -> bool:
    return all(labels.get(label) in values for label, values in candidate.where.items())


def _engine(labels: dict[str, str]) -> Engine:
    return tuple((name, labels[name]) for name in ENGINE_LABELS if name in labels)


@lru_cache(maxsize=1 << 14)  # the same labels come at every scrape
def _bound(labels: Labels) -> float | None:
    try:
        return float(next(value for name, value in labels if name == "le"))
    except (StopIteration, ValueError):
        return None
