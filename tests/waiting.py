"""Waiting for things that other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 20.0
Result = TypeVar("Result")


def eventually(condition: Callable[[], Result], what: str = "") -> Result:
    """Waits until `condition()` holds and returns what it gave."""
    end = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < end, f"did not come true: {what or condition}"
        time.sleep(0.01)
    return result
