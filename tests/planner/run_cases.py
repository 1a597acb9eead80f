"""Checks of the planner against published numbers, one row a check: `python tests/planner/run_cases.py FILE.csv`.

Columns: id, kind, inputs_json (quantities, units in their names), expected, unit, tolerance (relative; 0: exact), op
(approx; calc_le: the planner's bound must not exceed this measured latency; calc_ge: its ceiling must not fall below
this measured throughput; raises: the input gives this error; info), source, origin. Prints a line for each failing row
and exits 1 when there is one. Every kind is answered by the planner's public functions (`tests/planner/answers.py`).
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from backend.planner.errors import PlannerError
from backend.planner.units import to_si
from tests.planner.answers import ANSWERS

EXACT = 1e-9  # what float arithmetic may differ by where a row says 0


def check(row: dict[str, str]) -> str | None:
    """What is wrong with this row, None when it holds."""
    kind, op = row["kind"], row["op"]
    if op == "info":
        return None
    answer = ANSWERS.get(kind)
    if answer is None:
        return f"no answer to the kind '{kind}'"
    inputs = json.loads(row["inputs_json"])
    if op == "raises":
        return _raises(answer, inputs, row["expected"])
    try:
        found = answer(inputs)
    except PlannerError as error:
        return f"{type(error).__name__}: {error}"
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return f"inputs not understood: {error!r}"
    if isinstance(found, str | bool) or found is None:
        return None if str(found) == row["expected"] else f"expected {row['expected']}, found {found}"
    expected = to_si(float(row["expected"]), re.split(r"[ (]", row["unit"])[0])
    tolerance = float(row["tolerance"] or 0)
    if op == "approx":
        good = math.isclose(found, expected, rel_tol=tolerance or EXACT, abs_tol=1e-12)
    elif op == "calc_le":
        good = found <= expected * (1 + tolerance)
    elif op == "calc_ge":
        good = found >= expected * (1 - tolerance)
    else:
        return f"unknown op '{op}'"
    return None if good else f"{op}: expected {row['expected']} {row['unit']} (= {expected:.6g}), found {found:.6g}"


def _raises(answer, inputs: dict, expected: str) -> str | None:
    try:
        found = answer(inputs)
    except PlannerError as error:
        if type(error).__name__ == expected and str(error):
            return None
        return f"expected {expected}, found {type(error).__name__}: {error}"
    return f"expected {expected}, found {found}"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main(path: Path) -> int:
    rows = read(path)
    failures = 0
    for row in rows:
        wrong = check(row)
        if wrong:
            failures += 1
            print(f"{row['id']} {row['kind']}: {wrong}   [{row['source']}]")
    print(f"{len(rows) - failures} of {len(rows)} rows hold")
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/planner/run_cases.py FILE.csv")
    sys.exit(main(Path(sys.argv[1])))
