"""The engine in its thread, seen from asyncio."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest

from backend.engine.config import ConfigError
from backend.engine.engine import NotIdle, Refused
from backend.engine.loop import EngineLoop
from backend.events import Fault, Step
from tests.engine.stub import alone, greedy, prompt, stub_engine


@asynccontextmanager
async def serving(**config):
    engine, events = stub_engine(**config)
    engine.runner.step_s = 0.002  # like a model: 5,000 tokens are not over before the test has looked
    loop = EngineLoop(engine)
    loop.events = events
    loop.start(asyncio.get_running_loop())
    try:
        yield loop
    finally:
        await loop.stop()


async def collect(stream):
    return [delta async for delta in stream]


async def idle(loop):
    async with asyncio.timeout(10):
        while not await loop.call(lambda engine: engine.idle):
            await asyncio.sleep(0)


async def test_many_streams_at_once():
    async with serving(max_running=8) as loop:
        streams = [(await loop.submit(prompt(10, i), greedy(6), id=str(i)))[0] for i in range(20)]
        for i, deltas in enumerate(await asyncio.gather(*(collect(s) for s in streams))):
            assert [t for d in deltas for t in d.token_ids] == alone(prompt(10, i), 6)
            assert deltas[-1].finish_reason == "length" and deltas[-1].usage.ttft_s > 0


async def test_a_refusal_reaches_the_caller():
    async with serving() as loop:
        with pytest.raises(Refused):
            await loop.submit([], greedy(1), id="x")
        with pytest.raises(ConfigError):
            await loop.configure({"nonsense": 1})


async def test_abort_ends_the_stream_and_gives_the_blocks_back():
    async with serving() as loop:
        (stream,) = await loop.submit(prompt(10), greedy(5000), id="long")
        async for _ in stream:
            break
        with pytest.raises(NotIdle):
            await loop.configure({"block_size": 8})
        assert await loop.abort("long") == 1
        assert await loop.abort("long") == 0
        assert (await collect(stream))[-1].finish_reason == "abort"
        stream.abort()
        await idle(loop)
        assert loop.engine.pool.used_count == 0 and not loop._streams


async def test_leaving_early_leaves_nothing_behind():
    async with serving() as loop:
        (stream,) = await loop.submit(prompt(10), greedy(5000), id="x")
        stream.abort()
        await idle(loop)
        assert loop.engine.pool.used_count == 0


async def test_a_caller_cancelled_while_submitting_leaves_nothing_behind():
    async with serving() as loop:
        for _ in range(30):
            task = asyncio.create_task(loop.submit(prompt(10), greedy(5000), id="x"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await idle(loop)


async def test_all_siblings_of_a_group_are_aborted_by_its_id():
    async with serving() as loop:
        streams = await loop.submit(prompt(10), greedy(5000), id="group", n=3)
        assert await loop.abort("group") == 3
        assert {(await collect(s))[-1].finish_reason for s in streams} == {"abort"}


async def test_a_broken_invariant_ends_every_stream_with_the_reason():
    async with serving() as loop:
        await loop.call(lambda engine: setattr(engine, "step", lambda: 1 / 0))  # idle: nothing steps yet
        (stream,) = await loop.submit(prompt(10), greedy(5000), id="x")
        last = (await collect(stream))[-1]
        assert last.finish_reason == "error" and "ZeroDivisionError" in last.message
        assert "ZeroDivisionError" in loop.failure
        with pytest.raises(RuntimeError, match="the engine stopped"):
            await loop.submit(prompt(3), greedy(1), id="y")
        assert any(isinstance(e, Fault) and e.fatal for e in loop.events)


async def test_stopping_ends_open_streams():
    async with serving() as loop:
        (stream,) = await loop.submit(prompt(10), greedy(5000), id="x")
        task = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
    assert (await task)[-1].finish_reason == "abort"


async def test_what_is_sent_while_steps_are_held_starts_together():
    async with serving(max_running=8) as loop:
        assert await loop.hold(30.0) == 0
        streams = [(await loop.submit(prompt(10, i), greedy(6), id=str(i)))[0] for i in range(5)]
        assert await loop.call(lambda engine: engine.steps) == 0
        await loop.hold(0)
        for i, stream in enumerate(streams):
            deltas = await collect(stream)
            assert [t for d in deltas for t in d.token_ids] == alone(prompt(10, i), 6)
        steps = [event for event in loop.events if isinstance(event, Step)]
        assert len(steps[0].prefill) == 5 and len(steps) == 6


async def test_a_hold_can_begin_later_and_ends_by_itself():
    async with serving() as loop:
        await loop.hold(0.2, at_step=4)
        (stream,) = await loop.submit(prompt(10), greedy(8), id="a")
        await loop.submit(prompt(10), greedy(8), id="b")
        await collect(stream)
        steps = [event for event in loop.events if isinstance(event, Step)]
        pauses = [b.t - b.step_s - a.t for a, b in itertools.pairwise(steps)]
        assert pauses[3] >= 0.15 and sum(pauses) - pauses[3] < 0.15
