"""What one rate of a load sweep brought, and all rates together as a result."""

from __future__ import annotations

import math
import os
import platform
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from backend.experiments import Number, Result, latency, little, saturation
from backend.experiments.percentiles import RULE
from backend.workload.job import Answer, Target, Tick

NAME = "load"
SOURCE = "this client"
REFUSED = 0.2  # of the last WINDOW requests
WINDOW = 50
TABLES = ("requests", "queue", "gaps", "little")


@dataclass
class Run:
    """One rate. Until `end`, what comes is put into `answers` and `ticks`; after it, only tables are held."""

    rate: float
    planned: Sequence[tuple[float, int, int]]
    answers: list[Answer] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    stopped: str = ""  # why it was ended early, and when: what was in flight then has not left by itself
    stopped_s: float = math.inf
    _ended: tuple[dict[str, Any], dict[str, pd.DataFrame]] | None = None

    @property
    def until_s(self) -> float:
        """The last arrival, the moment of stopping, or now."""
        now = self.ticks[-1].t if self.ticks else 0.0
        return min(self.planned[-1][0], now, self.stopped_s)

    def end(self) -> None:
        self._ended = self.found()
        self.answers, self.ticks = [], []

    def found(self) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
        """(row of the sweep, tables)."""
        return self._ended or (self._row(), self._tables())

    def verdict(self) -> saturation.Verdict:
        for state, verdict in (("failed", "failing"), ("refused", "over-saturated")):
            such = [answer for answer in self.answers if answer.state == state]
            if len(such) > REFUSED * max(WINDOW, len(self.answers)):
                why = f"{len(such)} of {len(self.answers)} {state}: {such[-1].message}"
                return saturation.Verdict(verdict, why)
        return saturation.judge(self.ticks, self.until_s)

    def _row(self) -> dict[str, Any]:
        found = self.verdict()
        points = little.series(self.ticks, self.answers, self.until_s)
        state, why = little.verdict(points, found.state)
        last = points[-1] if points else None
        return latency.summary(self.rate, self.answers, self.ticks, SOURCE) | {
            "l_mean": last and last.l,
            "left_per_s": last and last.rate_per_s,
            "w_mean_s": last and last.w_s,
            "little_residual": last and last.residual,
            "little": state,
            "little_why": why,
            "verdict": found.state,
            "verdict_why": found.why,
            "stopped": self.stopped,
            "message": next((answer.message for answer in self.answers if answer.state in ("failed", "refused")), ""),
        }

    def _tables(self) -> dict[str, pd.DataFrame]:
        good = [answer for answer in self.answers if answer.state == "ok"]
        tables = {
            "requests": latency.requests_table(latency.request_row(self.rate, answer) for answer in self.answers),
            "queue": pd.DataFrame(
                [(t.t, t.in_flight, t.arrived, t.left, t.running, t.waiting) for t in self.ticks],
                columns=["t_s", "in_flight", "arrived", "left", "server_running", "server_waiting"],
            ),
            "gaps": pd.DataFrame({"itl_s": pd.Series(latency.gaps(good), dtype="float32")}),
            "little": pd.DataFrame(
                [
                    (p.t, p.l, p.rate_per_s, p.w_s, p.rate_times_w, p.l - p.rate_times_w, p.residual, p.left)
                    for p in little.series(self.ticks, self.answers, self.until_s)
                ],
                columns=["t_s", "l", "left_per_s", "w_s", "rate_times_w", "residual", "residual_share", "left"],
            ),
        }
        return {name: table.assign(offered_rate_per_s=self.rate) for name, table in tables.items()}


@dataclass
class Kept:
    """The runs so far."""

    target: Target
    settings: dict[str, Any]
    modelled: str = ""  # in words, of an engine that is
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # No prompt twice, in this sweep or the one before it: a prefix cache would answer for the engine.
    salt: str = field(default_factory=lambda: secrets.token_hex(8))

    def _cut(self, table: pd.DataFrame) -> list[str]:
        cut = int(table["cut"].sum()) if len(table) else 0
        return [f"{cut} requests were cut off: how long they would have taken is not in any percentile."] if cut else []

    def result(self, running: Run | None = None, *, complete: bool = False) -> Result:
        runs = [*self.runs, running] if running is not None and running.answers else self.runs
        found = [run.found() for run in runs]
        table = pd.DataFrame([row for row, _ in found])
        rules = [RULE, saturation.KNEE_RULE, saturation.RULE, little.RULE]
        rules += [f"{name.upper()}: {rule}." for name, rule in latency.RULES.items()]
        return Result(
            name=NAME,
            table=table,
            numbers=numbers(table),
            notes=[*self.notes, *self._cut(table), *self.target.notes, *rules],
            tables={name: _joined([tables[name] for _, tables in found]) for name in TABLES},
            settings=self.settings,
            machine={
                "url": self.target.url,
                "model": self.target.model,
                "endpoint": self.target.path,
                "client": f"{platform.machine()}, {os.cpu_count()} CPUs, load average {_load_average()}",
            }
            | ({"modelled": self.modelled} if self.modelled else {}),
            complete=complete,
        )


def numbers(table: pd.DataFrame) -> list[Number]:
    """The answers that stand above the picture."""
    if table.empty:
        return []
    best = table.loc[table["output_tokens_per_s"].idxmax()]
    at = knee_of(table)
    over = table[table["verdict"] == "over-saturated"]
    short = table[table["verdict"] == "too short"]
    unseen = "not reached by this sweep"
    if len(short):
        unseen = f"{unseen} as far as it can tell; at {short['offered_rate_per_s'].iloc[-1]:g} requests/s "
        unseen += short["verdict_why"].iloc[-1]
    missing = "not reached: offer more" if len(table) > 2 else "it takes three rates to see a knee"
    return [
        Number(
            "Knee",
            None if at is None else float(table["achieved_rate_per_s"].iloc[at]),
            "req/s",
            source=missing if at is None else saturation.KNEE_RULE,
        ),
        Number(
            "p99 TTFT at the knee",
            None if at is None else table["ttft_p99_s"].iloc[at],
            "s",
            source=missing if at is None else RULE,
        ),
        Number(
            "Most output",
            float(best["output_tokens_per_s"]),
            "tok/s",
            source=f"output tokens over the time to the last answer, at {best['offered_rate_per_s']:g} requests/s",
        ),
        Number(
            "Over-saturated at",
            None if over.empty else float(over["offered_rate_per_s"].iloc[0]),
            "req/s",
            source=unseen if over.empty else over["verdict_why"].iloc[0],
            beside="too short to tell" if over.empty and len(short) else "",
        ),
    ]


def knee_of(table: pd.DataFrame) -> int | None:
    """Place of the knee's row; None when there is none in sight."""
    return saturation.knee(list(zip(table["achieved_rate_per_s"], table["e2e_mean_s"].fillna(0.0), strict=True)))


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    full = [table for table in tables if len(table)]
    return pd.concat(full, ignore_index=True) if full else (tables[0] if tables else pd.DataFrame())


def _load_average() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "not known"
