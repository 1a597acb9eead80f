"""Experiments on a running engine: generators that the page, the command line and a test run alike.

    def sweep(client, settings) -> Experiment: yields Progress and Partial, ends with a Result

Whoever runs one may close it at any moment: it puts the engine back as it found it, and the last `Partial` is what was
kept. `backend.experiments.job.Lab` runs one at a time in a thread.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Partial:
    """The result so far."""

    result: Result


Experiment = Generator[Progress | Partial, None, Result]
