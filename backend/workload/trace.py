"""Trace files: when requests arrived and how long they were, as CSV or as one JSON object a line.

Names of columns that are understood, of which one each is needed:

    time     time_s | arrived_at (seconds); timestamp_ms, or timestamp of whole numbers (milliseconds, as Mooncake
             writes); TIMESTAMP (a date, as in Azure's traces)
    prompt   input_tokens | input_length | num_prefill_tokens | ContextTokens
    answer   output_tokens | output_length | num_decode_tokens | GeneratedTokens
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from backend.workload.arrivals import MAX_REQUESTS, LoadError
from backend.workload.lengths import MAX_TOKENS, check_work

MAX_BYTES = 32 << 20
MAX_LINE = 1 << 16  # characters
MAX_S = 7 * 24 * 3600.0  # between the first arrival and the last

TIMES = ("time_s", "arrived_at", "timestamp_ms", "timestamp", "TIMESTAMP")
INPUTS = ("input_tokens", "input_length", "num_prefill_tokens", "ContextTokens")
OUTPUTS = ("output_tokens", "output_length", "num_decode_tokens", "GeneratedTokens")


def parse(data: bytes, *, speed: float = 1.0) -> list[tuple[float, int, int]]:
    """[(seconds since the first arrival, prompt tokens, answer tokens)] in the order of arrival.

    `speed` 2 plays the trace twice as fast. Raises LoadError, which names the line.
    """
    if not (math.isfinite(speed) and 0.001 <= speed <= 1000):
        raise LoadError(f"a trace cannot be played at speed {speed:g}: give 0.001 to 1000")
    if len(data) > MAX_BYTES:
        raise LoadError(f"the trace has more than {MAX_BYTES >> 20} MiB: cut it to the part you want to play")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LoadError(f"the trace is not UTF-8 text (byte {error.start:,}): save it as UTF-8") from None
    if "\0" in text:
        raise LoadError("the trace is no text file: it holds null bytes")
    rows: list[tuple[float, int, int]] = []
    for number, row in _rows(text):
        if len(rows) == MAX_REQUESTS:
            raise LoadError(f"the trace has more than {MAX_REQUESTS:,} requests: cut it to the part you want to play")
        rows.append(_request(row, number))
    if not rows:
        raise LoadError("the trace holds no request")
    rows.sort(key=lambda row: row[0])
    first, last = rows[0][0], rows[-1][0]
    if (last - first) / speed > MAX_S:
        raise LoadError(f"the trace lasts {(last - first) / speed / 3600:,.0f} hours; play it faster or cut it")
    check_work([(i, o) for _, i, o in rows])
    return [((at - first) / speed, input_tokens, output_tokens) for at, input_tokens, output_tokens in rows]


def read(path: Path, *, speed: float = 1.0) -> list[tuple[float, int, int]]:
    """As `parse`, of a file, of which no more than MAX_BYTES are ever held."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise LoadError(f"the trace {path} cannot be read: {error.strerror or error}") from None
    return parse(data, speed=speed)


def _rows(text: str) -> Iterator[tuple[int, dict]]:
    """(line number, columns)."""
    lines = io.StringIO(text, newline=None)
    if text.lstrip().startswith("{"):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _object(line, number)
        return
    reader = csv.reader(_bounded(lines))
    try:
        names = [name.strip() for name in next(reader, [])]
        if not names:
            return
        for wanted in (TIMES, INPUTS, OUTPUTS):
            _find(wanted, dict.fromkeys(names), 1)
        for cells in reader:
            if cells and any(cell.strip() for cell in cells):
                if len(cells) != len(names):
                    raise LoadError(f"line {reader.line_num} has {len(cells)} columns, the first line {len(names)}")
                yield reader.line_num, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise LoadError(f"line {reader.line_num} is no CSV: {error}") from None


def _bounded(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE:
            raise LoadError(f"line {number} has {len(line):,} characters: this is no trace")
        yield line


def _object(line: str, number: int) -> dict:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        raise LoadError(f"line {number} is no JSON object") from None
    if not isinstance(row, dict):
        raise LoadError(f"line {number} is no JSON object")
    return row


def _request(row: dict, number: int) -> tuple[float, int, int]:
    name = _find(TIMES, row, number)
    at = _time(name, row[name], number)
    return at, _tokens(row, INPUTS, number), _tokens(row, OUTPUTS, number)


def _find(wanted: tuple[str, ...], row: dict, number: int) -> str:
    for name in wanted:
        if name in row:
            return name
    known = ", ".join(str(name)[:30] for name in list(row)[:8]) or "none"
    raise LoadError(f"line {number} has no column {' or '.join(wanted)}; its columns: {known}")


def _time(name: str, value: object, number: int) -> float:
    if name == "TIMESTAMP" and isinstance(value, str) and "-" in value.strip()[1:]:
        try:
            # Python reads at most six digits of a second, Azure's traces have seven.
            whole, _, part = value.strip().partition(".")
            return datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp() + float(f"0.{part or 0}")
        except ValueError:
            raise LoadError(f"line {number}: TIMESTAMP '{value[:40]}' is no date") from None
    at = _number(name, value, number)
    return at / 1000 if name in ("timestamp_ms", "timestamp") else at


def _tokens(row: dict, wanted: tuple[str, ...], number: int) -> int:
    name = _find(wanted, row, number)
    value = _number(name, row[name], number)
    if value != int(value) or not 1 <= value <= MAX_TOKENS:
        raise LoadError(f"line {number}: {name} must be a whole number from 1 to {MAX_TOKENS:,}, not {value:g}")
    return int(value)


def _number(name: str, value: object, number: int) -> float:
    try:
        found = float("nan") if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise LoadError(f"line {number}: {name} '{str(value)[:40]}' is no number") from None
    if not math.isfinite(found):
        raise LoadError(f"line {number}: {name} is {found:g}: every request needs a number there")
    return found
