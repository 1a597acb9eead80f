"""From the series of one server to the numbers that we have names for, each with where it is from."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from backend.events import EngineRow, Value
from backend.sources.attach.canonical import LATENCIES, NAMES, QUANTILES
from backend.sources.attach.exposition import Exposition
from backend.sources.attach.lookup import Engine, Scrape
from backend.sources.attach.profiles import Candidate, Profile
from backend.sources.attach.windows import PROCESS_START, Counters, Recent, quantile

QUANTILE_S = 30.0  # quantiles and the hit rate are of this long: in one second too few requests end
SUMS = ("running", "waiting", "waiting_capacity", "waiting_deferred")
RATES = {
    "prefix_queries": "prefix_queries_per_s",
    "prefix_hits": "prefix_hits_per_s",
    "prompt_tokens": "prompt_tokens_per_s",
    "prompt_tokens_computed": "prompt_tokens_computed_per_s",
    "output_tokens": "output_tokens_per_s",
}
WORK = {"flops": "flops_per_s", "read_bytes": "read_bytes_per_s", "write_bytes": "write_bytes_per_s"}


@dataclass(slots=True, kw_only=True)
class Reading:
    """One scrape, understood. `t`: seconds of the clock that the meter was given, when the question was sent."""

    t: float
    values: dict[str, Value]
    window_s: float = 0.0
    scrape_s: float = 0.0
    restarted: bool = False  # the engine is another process than at the scrape before
    restarts: int = 0
    by_engine: list[EngineRow] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)  # sample name -> series, of those that no mapping knows
    problems: list[str] = field(default_factory=list)
    bytes: int = 0
    block_size: int = 0  # 0: not told
    cells: int = 0  # blocks that can be given out; 0: not told
    config: dict[str, str] = field(default_factory=dict)  # what the engine tells of its cache's settings


class Meter:
    def __init__(self, profile: Profile):
        self.profile = profile
        self._counters = Counters((*profile.counters,))
        self._recent = {name: Recent(QUANTILE_S) for name in LATENCIES}
        self._lookups: deque[tuple[float, float, float]] = deque()  # end of the window, queries, hits
        self._preempted = 0.0
        self._t: float | None = None

    @property
    def samples(self) -> frozenset[str]:
        """Names of all samples that it can use."""
        return self.profile.samples | {PROCESS_START}

    def take(self, told: Exposition, t: float) -> Reading:
        window = max(0.0, t - self._t) if self._t is not None else 0.0
        before = self._counters.restarts
        grown = self._counters.take(told)
        if window <= 0:  # no time has passed: nothing has a rate
            grown = None
        self._t = t
        restarted = self._counters.restarts > before
        if restarted:
            self._lookups.clear()
            for recent in self._recent.values():
                recent.clear()
        scrape = Scrape(self.profile, told, grown, window)
        values: dict[str, Value] = {}
        reading = Reading(t=t, values=values, window_s=window, restarted=restarted, restarts=self._counters.restarts)
        self._gauges(scrape, reading)
        self._rates(scrape, reading, t)
        for name in LATENCIES:
            self._latency(scrape, values, name, t)
        self._tokens_per_step(scrape, values)
        reading.values = {name: values.get(name) or self._absent(scrape, name, name) for name in NAMES}
        reading.unknown, reading.problems = dict(told.unknown), list(told.problems)
        if self._counters.turns:
            reading.problems.append("answers come from several processes in turn: counters mean little behind a "
                                    "load balancer; name each server by itself")  # fmt: skip
        return reading

    def _absent(self, scrape: Scrape, name: str, source: str, why: str = "") -> Value:
        """No number, and why. `source`: the name in the profile."""
        source = source.removesuffix("_per_s")
        candidates = self.profile.metrics.get(source, [])
        for candidate in candidates:
            if any(sample in scrape.told.series and not scrape.told.series[sample] for sample in candidate.samples):
                return Value(quality="absent", name=candidate.name, note=f"{candidate.name} is NaN")
        for ending in ("_p50_s", "_p95_s"):
            source = source.removesuffix(ending)
        why = why or self.profile.absent.get(source, "")
        if not why:
            looked = ", ".join(c.name for c in candidates[:2])
            why = f"{self.profile.title} does not export it" + (f" (looked for {looked})" if looked else "")
        return Value(quality="absent", note=why)

    def _gauges(self, scrape: Scrape, reading: Reading) -> None:
        values = reading.values
        for name in SUMS:
            if found := scrape.gauge(name):
                candidate, by_engine = found
                values[name] = _value(candidate, sum(by_engine.values()))
        sizes, blocks = scrape.gauge("block_size"), scrape.gauge("num_blocks")
        size = max(sizes[1].values()) if sizes else 0.0
        if sizes and size > 0:
            reading.block_size = int(size)
            values["block_size"] = _value(sizes[0], size)
        tokens = scrape.gauge("cache_tokens")
        count: dict[Engine, float] = {}
        if blocks:
            count = blocks[1]
            values["num_blocks"] = _value(blocks[0], sum(count.values()))
        elif tokens and size > 0:
            count = {engine: total // size for engine, total in tokens[1].items()}
            note = "its tokens ÷ its block size"
            values["num_blocks"] = _value(tokens[0], sum(count.values()), quality="derived", note=note)
        null = self.profile.null_blocks if blocks else 0
        usable = {engine: max(0.0, blocks - null) for engine, blocks in count.items()}
        reading.cells = int(sum(usable.values()))
        usage = scrape.gauge("kv_usage")
        if usage:
            self._usage(reading, usage[0], usage[1], usable)
        self._used(scrape, reading, usage, usable, size)
        reading.config = scrape.config
        rows = {name: found[1] for name in ("running", "waiting", "kv_usage") if (found := scrape.gauge(name))}
        engines = sorted({engine for found in rows.values() for engine in found})
        if len(engines) > 1:
            reading.by_engine = [
                EngineRow(labels=dict(engine), **{name: found.get(engine) for name, found in rows.items()})
                for engine in engines
            ]

    def _usage(
        self, reading: Reading, candidate: Candidate, usage: dict[Engine, float], usable: dict[Engine, float]
    ) -> None:
        """Mean over engines, weighted by their blocks. Never a sum: two half full caches are half full."""
        weights = {engine: _of(usable, engine) for engine in usage}
        if not all(weights.values()):
            weights = dict.fromkeys(usage, 1.0)
        mean = sum(usage[engine] * weight for engine, weight in weights.items()) / sum(weights.values())
        several = len(usage) > 1
        note = f"mean of {len(usage)} engines" if several else ""
        reading.values["kv_usage"] = _value(candidate, mean, quality="derived" if several else "", note=note)
        if several:
            reading.values["kv_usage_max"] = _value(candidate, max(usage.values()))
        else:
            reading.values["kv_usage_max"] = Value(quality="absent", note="there is only one engine")

    def _used(self, scrape: Scrape, reading: Reading, usage, usable: dict[Engine, float], size: float) -> None:
        values = reading.values
        if told := scrape.gauge("used_blocks"):
            values["used_blocks"] = _value(told[0], sum(told[1].values()))
        elif (tokens := scrape.gauge("used_tokens")) and size > 0:
            used = sum(math.ceil(total / size) for total in tokens[1].values())
            values["used_blocks"] = _value(tokens[0], used, quality="derived", note="its tokens ÷ its block size")
        elif usage and usable:
            used = sum(round(share * (_of(usable, engine) or 0.0)) for engine, share in usage[1].items())
            null = self.profile.null_blocks
            note = f"usage × (blocks − {null}), rounded" if null else "usage × blocks, rounded"
            values["used_blocks"] = _value(usage[0], used, quality="derived", note=note)
        elif usage:
            why = "the engine does not tell how many blocks it has"
            values["used_blocks"] = self._absent(scrape, "used_blocks", "used_blocks", why)

    def _rates(self, scrape: Scrape, reading: Reading, t: float) -> None:
        values, window = reading.values, reading.window_s
        totals: dict[str, float] = {}
        for source, name in (RATES | WORK).items():
            found = scrape.counter(source)
            if found is None:
                continue
            candidate, by_engine = found
            if by_engine is None:
                values[name] = _value(candidate, None, quality="absent", note="one reading so far")
                continue
            total = totals[source] = sum(by_engine.values())
            rate = total / window / (max(1, len(by_engine)) if source in WORK else 1)
            of = "estimated by the engine, of one accelerator" if source in WORK else ""
            values[name] = _value(candidate, rate, note=of)
        found = scrape.counter("preemptions")
        if found:
            self._preempted += sum((found[1] or {}).values())
            values["preemptions"] = _value(found[0], self._preempted)
        self._hit_rate(scrape, values, totals, t)

    def _hit_rate(self, scrape: Scrape, values: dict[str, Value], totals: dict[str, float], t: float) -> None:
        if "prefix_queries" in totals and "prefix_hits" in totals:
            self._lookups.append((t, totals["prefix_queries"], totals["prefix_hits"]))
            while self._lookups[0][0] <= t - QUANTILE_S:
                self._lookups.popleft()
            queries, hits = (sum(row[i] for row in self._lookups) for i in (1, 2))
            hit_name = scrape.counter("prefix_hits")[0].name
            if queries > 0:
                note = f"hits ÷ queries, in tokens, over the last {QUANTILE_S:.0f} s"
                values["hit_rate"] = Value(value=min(1.0, hits / queries), name=hit_name, quality="derived", note=note)
            else:
                why = f"no prompt was looked up in the last {QUANTILE_S:.0f} s"
                values["hit_rate"] = Value(quality="absent", name=hit_name, note=why)
        elif gauge := scrape.gauge("hit_rate"):
            candidate, by_engine = gauge
            values["hit_rate"] = _value(candidate, sum(by_engine.values()) / len(by_engine))

    def _latency(self, scrape: Scrape, values: dict[str, Value], name: str, t: float) -> None:
        found = scrape.histogram(name)
        if found is None:
            return
        candidate, growth = found
        recent = self._recent[name]
        if growth is not None:
            recent.add(t - scrape.window_s, t, growth)
        buckets = recent.buckets()
        for short, share in QUANTILES.items():
            key, said = f"{name}_{short}_s", quantile(buckets, share)
            if said is None:
                why = f"nothing was observed in the last {QUANTILE_S:.0f} s"
                values[key] = Value(quality="absent", name=candidate.name, note=why)
                continue
            how = "above the last bucket's bound: at least this" if said.high is None else "interpolated in its bucket"
            note = f"of {buckets[-1][1]:.0f} in the last {QUANTILE_S:.0f} s, {how}"
            values[key] = _value(candidate, said.value, quality="derived", note=note, low=said.low, high=said.high)

    def _tokens_per_step(self, scrape: Scrape, values: dict[str, Value]) -> None:
        """Mean of the window: from the histogram's sum and count, or all tokens ÷ all steps where steps are counted."""
        name = "tokens_per_step"
        if scrape.grown is None:
            return
        for candidate in self.profile.metrics.get(name, ()):
            if f"{candidate.name}_count" not in scrape.told.series:
                continue
            total, steps = (
                sum(growth for _, growth in scrape.one_rank(scrape.grown.get(f"{candidate.name}_{part}", {}).items()))
                for part in ("sum", "count")
            )
            if steps > 0:
                note = f"mean of {steps:.0f} steps"
                values[name] = _value(candidate, total / steps, quality="derived", note=note)
            else:
                values[name] = Value(quality="absent", name=candidate.name, note="no step in this window")
            return
        counted = scrape.counter("steps")
        if counted and (steps := sum((counted[1] or {}).values())) > 0:
            found = [scrape.counter(source) for source in ("prompt_tokens_computed", "output_tokens")]
            total = sum(sum((by_engine or {}).values()) for _, by_engine in filter(None, found))
            note = f"computed prompt and output tokens ÷ {steps:.0f} steps"
            values[name] = _value(counted[0], total / steps, quality="derived", note=note)


def _of(blocks: dict[Engine, float], engine: Engine) -> float | None:
    """Blocks of an engine, by the labels that both have; the only one there is, if there is one."""
    if engine in blocks:
        return blocks[engine]
    if len(blocks) == 1:
        return next(iter(blocks.values()))
    mine = dict(engine)
    fitting = [n for other, n in blocks.items() if all(mine.get(k, v) == v for k, v in other)]
    return fitting[0] if len(fitting) == 1 else None


def _value(candidate: Candidate, value: float | None, *, quality: str = "", note: str = "", **bounds) -> Value:
    notes = "; ".join(filter(None, [note, candidate.note]))
    return Value(value=value, name=candidate.name, quality=quality or candidate.quality, note=notes, **bounds)
