"""The event loop that the load client waits in."""

from __future__ import annotations

import asyncio
import itertools
import selectors
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from backend.workload import punctual


def test_timers_come_in_order_and_never_early():
    came = []

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        begin, done = loop.time(), loop.create_future()
        for due in (0.004, 0.0, 0.0301, 0.0013):
            loop.call_at(begin + due, lambda due=due: came.append((due, loop.time() - begin)))
        loop.call_at(begin + 0.031, done.set_result, None)
        await done

    with asyncio.Runner(loop_factory=punctual.loop) as runner:
        runner.run(wait())
    assert [due for due, _ in came] == [0.0, 0.0013, 0.004, 0.0301]
    assert all(at >= due - 1e-6 for due, at in came)


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
def test_a_wait_between_two_milliseconds_is_not_put_off_to_the_next():
    """The best of many: a busy machine makes all waits late, epoll's milliseconds make every wait late."""

    def waits(selector: selectors.BaseSelector) -> Iterator[float]:
        with selector:
            for _ in range(1000):
                begin = time.monotonic()
                selector.select(0.0012)
                yield time.monotonic() - begin

    assert min(itertools.islice(waits(selectors.EpollSelector()), 20)) > 0.0019  # 2 ms
    assert any(0.0012 <= took < 0.0017 for took in waits(punctual.Punctual()))


def test_what_comes_before_a_timer_is_heard_at_once():
    async def hear() -> bool:
        loop = asyncio.get_running_loop()
        near, far = socket.socketpair()
        heard, timer = loop.create_future(), loop.create_future()
        loop.add_reader(near, lambda: heard.done() or heard.set_result(None))
        ring = loop.call_later(60.0, timer.set_result, None)
        far.send(b"x")
        await asyncio.wait((heard, timer), return_when=asyncio.FIRST_COMPLETED)
        ring.cancel()
        loop.remove_reader(near)
        near.close()
        far.close()
        return heard.done() and not timer.done()

    with asyncio.Runner(loop_factory=punctual.loop) as runner:
        assert runner.run(hear())
