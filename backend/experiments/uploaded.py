"""Output lengths out of a file that somebody uploads: one number a line, or a trace with columns."""

from __future__ import annotations

from backend.experiments import ExperimentError
from backend.experiments.waves import MOST_REQUESTS, MOST_TOKENS
from backend.workload import trace
from backend.workload.arrivals import LoadError

MAX_BYTES = 1 << 20


def lengths(data: bytes) -> tuple[int, ...]:
    """Raises ExperimentError that names the line and what is wrong with it."""
    if len(data) > MAX_BYTES:
        raise ExperimentError(f"the file has {len(data):,} bytes; at most {MAX_BYTES:,} are read here")
    try:
        lines = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise ExperimentError(f"the file is not UTF-8 text (byte {error.start})") from None
    if not any(lines):
        raise ExperimentError("the file is empty")
    first = next(line for line in lines if line)
    if not first.lstrip("-+").isdecimal():
        try:
            found = [answer for _, _, answer in trace.parse(data)]
        except LoadError as error:
            raise ExperimentError(f"{error} (or write one number of output tokens a line)") from None
    else:
        found = [_length(line, number) for number, line in enumerate(lines, 1) if line]
    if len(found) > MOST_REQUESTS:
        raise ExperimentError(f"the file has {len(found):,} lengths; at most {MOST_REQUESTS:,} are run here")
    return tuple(found)


def _length(line: str, number: int) -> int:
    if not (line.isascii() and line.isdecimal() and 1 <= int(line[:9]) <= MOST_TOKENS and len(line) < 9):
        raise ExperimentError(f"line {number}: '{line[:30]}' is no number of tokens between 1 and {MOST_TOKENS:,}")
    return int(line)
