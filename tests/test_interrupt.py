"""Ctrl-C of a command that has something to keep."""

from __future__ import annotations

import signal
import threading

import pytest

from backend.interrupt import heard


class Swallows:
    """What is raised in here reaches nobody, as in many a library's callback."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_it_is_heard_where_an_exception_would_be_swallowed():
    before = signal.getsignal(signal.SIGINT)
    with heard() as asked:
        assert not asked.is_set()
        Swallows()
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):  # somebody who cannot wait
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_it_is_harmless_in_other_threads():
    said = []

    def command() -> None:
        with heard() as asked:
            said.append(asked.is_set())

    thread = threading.Thread(target=command)
    thread.start()
    thread.join(10)
    assert said == [False]
