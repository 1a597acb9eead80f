"""Experiments on a running engine: generators that the page, the command line and a test run alike.

    def sweep(client, settings) -> Experiment: yields Progress and Partial, ends with a Result

Whoever runs one may close it at any moment: it puts the engine back as it found it, and the last `Partial` is what was
kept. `backend.experiments.job.Lab` runs one at a time in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pandas as pd


class ExperimentError(Exception):
    """It cannot be run as asked, or could not go on; plain words that name the thing and the fix."""


@dataclass(frozen=True)
class Progress:
    """`done` of `of` in whatever the experiment counts; `left_s` is None while nobody can tell."""

    done: float
    of: float
    left_s: float | None = None
    note: str = ""

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.of) if self.of else 0.0


@dataclass(frozen=True)
class Number:
    """One of the big numbers above a picture. `value` None: `source` says why there is none."""

    name: str
    value: float | None
    unit: str = ""
    evidence: str = "measured"  # measured | computed | modelled | simulated | data sheet
    source: str = ""  # what was measured or computed, and how, in words
    beside: str = ""  # what else it is to be held against, in a few words

    @property
    def conditions(self) -> str:
        return f"{self.evidence}; {self.beside}" if self.beside else self.evidence


@dataclass
class Result:
    name: str  # which experiment
    table: pd.DataFrame  # tidy: one row an observation, units in the columns' names
    numbers: list[Number] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # rules and conditions, in words
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)  # more of them, by name
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)  # model and device, as the engine names them
    complete: bool = True  # False: stopped or failed on the way, this is what was kept

    def __post_init__(self) -> None:
        if self.modelled:
            self.numbers = [
                replace(number, evidence="modelled") if number.evidence == "measured" else number
                for number in self.numbers
            ]

    @property
    def modelled(self) -> str:
        """Of an engine whose steps are modelled: what they are, in words. "": all was measured."""
        return self.machine.get("modelled", "")

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it; tables as lists of rows, the first one under the result's own name."""
        tables = {self.name: self.table, **self.tables}
        return {
            "name": self.name,
            "complete": self.complete,
            "settings": self.settings,
            "machine": self.machine,
            "numbers": [asdict(number) for number in self.numbers],
            "notes": self.notes,
            "tables": {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()},
        }


@dataclass(frozen=True)
class Partial:
    """The result so far."""

    result: Result


Experiment = Generator[Progress | Partial, None, Result]
