"""Ctrl-C as a wish to end, heard between two reports: an exception in the middle of anything may be swallowed there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard() -> Iterator[threading.Event]:
    """An event that the first SIGINT sets; a second one is a KeyboardInterrupt, as ever. Outside of the main thread,
    where signals do not arrive, nobody sets it."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def first(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, first)  # a shell may have started us in the background, deaf to it
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
