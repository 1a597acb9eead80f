"""What every process that is started here needs: its words as clean lines, and an end when this process ends."""

from __future__ import annotations

import atexit
import re
import weakref
from collections.abc import Iterator
from typing import IO, Any

MAX_LINE = 400  # characters
READ_BYTES = 65536

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def clean(line: bytes) -> str:
    """Without colours and other control characters, and not endless; "" when nothing is left."""
    return _CONTROL.sub("", line.decode("utf-8", "replace")).strip()[:MAX_LINE]


def lines(pipe: IO[bytes]) -> Iterator[str]:
    """What is said, until the pipe ends. A progress bar's returns end lines too."""
    rest = b""
    while chunk := pipe.read1(READ_BYTES):
        *whole, rest = re.split(rb"[\r\n]+", rest[-MAX_LINE:] + chunk)
        yield from filter(None, map(clean, whole))
    if text := clean(rest):
        yield text


def stop_at_exit(owner: Any) -> None:
    """Calls `owner.stop()` at the end of this process, if there is an owner by then."""
    atexit.register(_stop, weakref.ref(owner))


def _stop(reference: weakref.ref[Any]) -> None:
    owner = reference()
    if owner is not None:
        owner.stop()
