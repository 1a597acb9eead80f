"""What the planner answers with: a number, its unit, what kind of statement it is, and the working behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

# exact: counted; bound: no machine with these rates does better; estimate: a bound times measured experience;
# measured: by a clock or a sensor. An estimate never wears a bound's name.
Kind = Literal["exact", "bound", "estimate", "measured"]


class Term(NamedTuple):
    """One addend (or factor) of a result, with the formula as text, its values filled in."""

    name: str
    value: float
    unit: str
    formula: str = ""


@dataclass(frozen=True)
class Result:
    """`value` is None where there is no answer; `note` then says why."""

    value: float | None
    unit: str
    kind: Kind
    terms: tuple[Term, ...] = ()
    formula: str = ""
    note: str = ""
    low: float | None = None  # of an estimate: where 8 of 10 measured machines lay
    high: float | None = None

    def as_dict(self) -> dict:
        found = {"value": self.value, "unit": self.unit, "kind": self.kind, "formula": self.formula}
        if self.terms:
            found["terms"] = [term._asdict() for term in self.terms]
        if self.note:
            found["note"] = self.note
        if self.low is not None:
            found |= {"low": self.low, "high": self.high}
        return found


def total(unit: str, kind: Kind, terms: list[Term], note: str = "") -> Result:
    """The sum of its terms."""
    formula = " + ".join(term.name for term in terms)
    return Result(sum(term.value for term in terms), unit, kind, tuple(terms), formula, note)


def count(value: float) -> str:
    """A number inside a formula: 4,096; 8.03e9 once it is long."""
    if abs(value) < 1e7 and value == int(value):
        return f"{int(value):,}"
    return f"{value:.4g}"
