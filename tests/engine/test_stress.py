"""Random life for many steps: the invariants that no history may break."""

import random

import pytest

from backend.events import Step
from tests.engine.stub import alone, greedy, ids, prompt, stub_engine


def live(engine, events, steps, seed):
    """Submits, forks, aborts and steps at random; checks the pool, the budget and what each request says."""
    rng = random.Random(seed)
    said: dict[int, list[int]] = {}
    asked: dict[int, tuple[list[int], int]] = {}
    aborted = set()
    done = 0
    while done < steps:
        if rng.random() < 0.25 and len(engine.scheduler.waiting) < 20:
            shared = prompt(rng.choice([0, 8, 16, 24]), seed=rng.randrange(3))
            tokens = shared + prompt(rng.randrange(1, 20), seed=rng.randrange(1000))
            count = rng.randrange(1, 20)
            salt = rng.choice([b"", b"", b"tenant"])
            for request in engine.submit(
                tokens,
                greedy(count),
                id=f"r{done}",
                n=rng.choice([1, 1, 1, 2, 3]),
                salt=salt,
                priority=rng.choice([0, 0, 1]),
            ):
                asked[request.number] = (tokens, count)
        if asked and rng.random() < 0.05:
            number = rng.choice(list(asked))
            if engine.abort(number):
                aborted.add(number)
        before = len(events)
        deltas = engine.step()
        done += 1
        for delta in deltas:
            said.setdefault(delta.request, []).extend(delta.token_ids)
            if delta.finish_reason:
                tokens, count = asked.pop(delta.request)
                assert said.pop(delta.request) == alone(tokens, count)
        for number in aborted:
            asked.pop(number, None), said.pop(number, None)
        aborted.clear()
        for event in events[before:]:
            if isinstance(event, Step):
                decodes = event.decode if event.decode is not None else []
                scheduled = [r for r, *_ in event.prefill] + list(decodes)
                assert len(set(scheduled)) == len(scheduled)
                assert sum(n for _, n, _ in event.prefill) + len(decodes) <= engine.config.token_budget
        running = engine.scheduler.running
        assert len(running) <= engine.config.max_running
        if done % 50 == 0:
            engine.pool.check([r.table for r in running])
        events.clear()
    for number in list(engine._requests):
        engine.abort(number)
    engine.pool.check([])
    assert engine.idle and engine.pool.used_count == 0 and not engine.scheduler.waiting and not engine.scheduler.wave


@pytest.mark.parametrize(
    "seed, steps, config",
    [
        (1, 10_000, {"num_blocks": 24, "block_size": 4, "max_running": 6, "token_budget": 24, "chunk_size": 7}),
        (2, 3_000, {"num_blocks": 24, "block_size": 4, "max_running": 6, "token_budget": 24, "prefix_cache": False}),
        (3, 3_000, {"num_blocks": 80, "block_size": 1, "max_running": 4, "token_budget": 9, "chunk_size": 3}),
        (4, 3_000, {"num_blocks": 24, "block_size": 4, "max_running": 6, "chunk_size": 7, "preemption": "swap"}),
        (
            5,
            2_000,
            {
                "num_blocks": 24,
                "block_size": 4,
                "max_running": 6,
                "chunk_size": 7,
                "preemption": "swap",
                "prefix_cache": False,
                "policy": "static",
            },
        ),
        (
            6,
            2_000,
            {"num_blocks": 40, "block_size": 4, "chunk_size": 7, "prefix_cache": False, "allocator": "first-fit"},
        ),
        (7, 2_000, {"num_blocks": 50, "block_size": 4, "chunk_size": 7, "prefix_cache": False, "allocator": "reserve"}),
        (8, 2_000, {"max_running": 6, "token_budget": 90, "prefix_cache": False, "kv_cache": False}),
    ],
)
def test_a_small_pool_under_random_life(seed, steps, config):
    engine, events = stub_engine(max_model_len=80, **config)
    live(engine, events, steps, seed)


def test_the_preemptions_of_a_stress_are_real():
    """The stress above means something only if its pool is really too small."""
    engine, events = stub_engine(num_blocks=24, block_size=4, max_running=6, token_budget=24, chunk_size=7)
    for i in range(40):
        engine.submit(prompt(16, i), greedy(16), id=str(i))
    while not engine.idle:
        engine.step()
    assert sum(op[0] == "preempt" for e in events if isinstance(e, Step) for op in e.ops) > 10


def test_static_batches_under_random_life():
    engine, events = stub_engine(
        policy="static", num_blocks=24, block_size=4, max_running=5, token_budget=24, chunk_size=7, max_model_len=80
    )
    live(engine, events, 2_000, 4)


def test_many_short_requests_leave_nothing_behind():
    engine, _ = stub_engine(num_blocks=64, block_size=4)
    for i in range(200):
        engine.submit(prompt(6, i), greedy(3), id=str(i))
        while not engine.idle:
            deltas = engine.step()
        assert ids(deltas)
    assert not engine._requests and not engine._outputs and engine.pool.used_count == 0
    assert len(engine.pool._block_of) <= 64
