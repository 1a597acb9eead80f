"""A fleet as the browser gets it: a card a replica with the numbers that are compared, and one of them whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import pandas as pd

from backend.events import Value
from backend.sources.attach.fleet_rows import ReplicaRow, Sums
from backend.sources.attach.node_gpus import NodeGpu
from backend.sources.attach.profiles import profiles

COMPARED = (
    "running",
    "waiting",
    "kv_usage",
    "used_blocks",
    "num_blocks",
    "ttft_p50_s",
    "ttft_p95_s",
    "tpot_p50_s",
    "output_tokens_per_s",
    "hit_rate",
    "preemptions",
)


class Fleet(Protocol):
    """What is shown of `backend.sources.attach.fleet.Fleet`."""

    def rows(self) -> Sequence[ReplicaRow]: ...

    def sums(self) -> Sums: ...


class Card(msgspec.Struct, kw_only=True, omit_defaults=True):
    key: str
    name: str
    url: str
    state: str
    host: str = ""
    rank: str = ""
    kind: str = ""
    model: str = ""
    message: str = ""
    age_s: float | None = None
    restarts: int = 0
    numbers: dict[str, float] = {}  # only those that it tells


class Detail(msgspec.Struct, kw_only=True):
    """The replica that a person chose: every value with its source, absent ones with the reason."""

    key: str
    values: Mapping[str, Value]
    gpus: Sequence[NodeGpu] = ()
    gpus_message: str = ""


class FleetMessage(msgspec.Struct, tag="fleet", tag_field="type", kw_only=True):
    sums: Sums
    cards: list[Card]
    detail: Detail | None = None


_encode = msgspec.json.Encoder().encode


def message(fleet: Fleet, chosen: str = "") -> str:
    """JSON; `chosen`: key of the replica whose details are wanted."""
    rows = fleet.rows()
    detail = next((detail_of(row) for row in rows if row.key == chosen), None)
    return _encode(FleetMessage(sums=fleet.sums(), cards=[card(row) for row in rows], detail=detail)).decode()


def card(row: ReplicaRow) -> Card:
    numbers = {name: float(f"{value:.4g}") for name in COMPARED if (value := row.value(name)) is not None}
    return Card(
        key=row.key,
        name=row.name,
        url=row.url,
        host=row.host,
        rank=row.rank,
        kind=known.title if (known := profiles().get(row.kind)) else row.kind,
        model=row.model,
        state=row.state,
        message=row.message,
        age_s=None if row.age_s is None else round(row.age_s, 1),
        restarts=row.restarts,
        numbers=numbers,
    )


def detail_of(row: ReplicaRow) -> Detail:
    return Detail(
        key=row.key,
        values={name: value for name, value in row.values.items() if value.value is None or math.isfinite(value.value)},
        gpus=row.gpus,
        gpus_message=row.gpus_message,
    )


def table(rows: Sequence[ReplicaRow]) -> pd.DataFrame:
    """One row a replica; what it does not tell is empty."""
    return pd.DataFrame(
        [
            {
                "replica": row.name,
                "address": row.url,
                "rank": row.rank,
                "state": row.state,
                "why": row.message,
                "model": row.model,
                "age (s)": None if row.age_s is None else round(row.age_s, 1),
                "restarts": row.restarts,
                **{name: row.value(name) for name in COMPARED},
            }
            for row in rows
        ]
    )
