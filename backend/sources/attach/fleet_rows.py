"""A fleet in numbers: a row a replica, and what may be said of all of them together.

Requests and tokens are summed; shares never are: KV usage is weighted by blocks, the hit rate is hits over queries, and
of quantiles there is only the middle and the worst replica's, because quantiles cannot be added.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from backend.events import EngineRow, Value
from backend.sources.attach.node_gpus import NodeGpu

STATES = ("live", "probing", "stale", "down")
SUMMED = (
    "running",
    "waiting",
    "waiting_capacity",
    "waiting_deferred",
    "used_blocks",
    "num_blocks",
    "preemptions",
    "prompt_tokens_per_s",
    "prompt_tokens_computed_per_s",
    "output_tokens_per_s",
    "prefix_queries_per_s",
    "prefix_hits_per_s",
)
SPREAD = (
    "running",
    "waiting",
    "kv_usage",
    "hit_rate",
    "output_tokens_per_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "tpot_p50_s",
    "tpot_p95_s",
    "itl_p95_s",
    "queue_p95_s",
)
BALANCED = ("running", "kv_usage")


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: an address, or one rank of several behind an address."""

    key: str  # stays the same while the replica is in the list
    name: str
    url: str
    host: str
    rank: str = ""  # of data parallelism; "" where the address is one engine
    kind: str = ""  # vllm, sglang, …
    model: str = ""
    state: str = "probing"  # live | probing | stale | down
    message: str = ""  # why it is not live
    age_s: float | None = None  # of the values; None: there are none yet
    scrape_s: float | None = None  # that the last reading took
    restarts: int = 0
    values: Mapping[str, Value] = {}  # by canonical name
    gpus: Sequence[NodeGpu] = ()  # of its host
    gpus_message: str = ""  # why there are none

    def value(self, name: str) -> float | None:
        found = self.values.get(name)
        return found.value if found is not None and found.value is not None and math.isfinite(found.value) else None


class Total(msgspec.Struct, frozen=True, kw_only=True):
    value: float
    of: int  # replicas that told it


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Over the live replicas that tell it. `lowest`, `highest`: keys of rows."""

    low: float
    median: float
    high: float
    lowest: str
    highest: str
    of: int


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    replicas: int
    states: dict[str, int]
    totals: dict[str, Total]
    kv_usage: Total | None  # weighted by blocks; by replicas where one does not tell its blocks
    hit_rate: Total | None  # tokens found over tokens asked for
    spread: dict[str, Spread]
    imbalance: dict[str, float]  # the fullest over the mean: 1 is even


def by_rank(row: ReplicaRow, engines: Sequence[EngineRow]) -> list[ReplicaRow]:
    """The ranks behind one address as replicas; what the address tells for all together belongs to none of them."""
    if len(engines) < 2:
        return [row]
    rows = []
    for number, engine in enumerate(engines):
        rank = engine.labels.get("engine") or engine.labels.get("dp_rank") or str(number)
        own = {"running": engine.running, "waiting": engine.waiting, "kv_usage": engine.kv_usage}
        values = {
            name: Value(value=own[name], name=told.name, quality=told.quality)
            if own.get(name) is not None
            else Value(name=told.name, quality="absent", note="told for all ranks of this address together")
            for name, told in row.values.items()
        }
        name, key = f"{row.name} rank {rank}", f"{row.key}#{rank}"
        rows.append(msgspec.structs.replace(row, key=key, name=name, rank=rank, values=values))
    return rows


def sums(addresses: Sequence[ReplicaRow], rows: Sequence[ReplicaRow]) -> Sums:
    """`addresses`: a row an address, from which is summed; `rows`: a row a rank, which are compared. Only those that
    are live count: an old number is no part of now."""
    told = [row for row in addresses if row.state == "live"]
    live = [row for row in rows if row.state == "live"]
    states = Counter(row.state for row in rows)
    spread = {name: found for name in SPREAD if (found := _spread(name, live))}
    return Sums(
        replicas=len(rows),
        states={state: states.get(state, 0) for state in STATES},
        totals={name: found for name in SUMMED if (found := _total(name, told))},
        kv_usage=_usage(told),
        hit_rate=_hit_rate(told),
        spread=spread,
        imbalance={name: found for name in BALANCED if (found := _imbalance(name, live)) is not None},
    )


def _total(name: str, rows: Sequence[ReplicaRow]) -> Total | None:
    values = [value for row in rows if (value := row.value(name)) is not None]
    return Total(value=sum(values), of=len(values)) if values else None


def _usage(rows: Sequence[ReplicaRow]) -> Total | None:
    told = [(value, row.value("num_blocks")) for row in rows if (value := row.value("kv_usage")) is not None]
    if not told:
        return None
    known = all(blocks for _, blocks in told)
    weights = [blocks if known else 1.0 for _, blocks in told]
    return Total(value=sum(v * w for (v, _), w in zip(told, weights, strict=True)) / sum(weights), of=len(told))


def _hit_rate(rows: Sequence[ReplicaRow]) -> Total | None:
    pairs = [(row.value("prefix_hits_per_s"), row.value("prefix_queries_per_s")) for row in rows]
    pairs = [(hits, queries) for hits, queries in pairs if hits is not None and queries]
    return Total(value=sum(h for h, _ in pairs) / sum(q for _, q in pairs), of=len(pairs)) if pairs else None


def _spread(name: str, rows: Sequence[ReplicaRow]) -> Spread | None:
    told = [(value, row.key) for row in rows if (value := row.value(name)) is not None]
    if not told:
        return None
    (low, lowest), (high, highest) = min(told), max(told)
    middle = statistics.median(value for value, _ in told)
    return Spread(low=low, median=middle, high=high, lowest=lowest, highest=highest, of=len(told))


def _imbalance(name: str, rows: Sequence[ReplicaRow]) -> float | None:
    """None for fewer than two replicas, or when all of them are idle."""
    values = [value for row in rows if (value := row.value(name)) is not None]
    mean = statistics.fmean(values) if len(values) > 1 else 0.0
    return max(values) / mean if mean > 0 else None
