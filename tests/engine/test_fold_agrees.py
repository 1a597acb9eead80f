"""What viewers fold from the events is what the engine has: tables, counters, fill, sharing, after every step."""

import random

import msgspec
import pytest

from backend import fold
from backend.engine.request import SamplingParams
from backend.events import DeviceInfo, Hello, ModelInfo, decode, encode
from tests.engine.stub import greedy, prompt, stub_engine

CONFIGS = {
    "continuous": {},
    "continuous, no prefix cache": {"prefix_cache": False},
    "static": {"policy": "static"},
    "swap": {"preemption": "swap"},
    "swap, no prefix cache": {"preemption": "swap", "prefix_cache": False, "policy": "static"},
    "first fit": {"allocator": "first-fit", "prefix_cache": False, "num_blocks": 40},
    "reserve": {"allocator": "reserve", "prefix_cache": False, "num_blocks": 50},
    "no KV cache": {"kv_cache": False, "prefix_cache": False, "token_budget": 96},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_after_every_step(name):
    """Also what is wasted: counted block by block and request by request, it is what the counters say."""
    rng = random.Random(5)
    config = {"num_blocks": 24, "block_size": 4, "max_running": 6, "token_budget": 24, "chunk_size": 7, **CONFIGS[name]}
    engine, events = stub_engine(max_model_len=80, **config)
    engine.report(
        Hello(
            epoch="e", model=ModelInfo(name="stub"), device=DeviceInfo(), block_size=4, num_blocks=config["num_blocks"],
            config=msgspec.structs.asdict(engine.config),
        )
    )  # fmt: skip
    state = fold.State()
    for _ in range(1000):
        if rng.random() < 0.3 and len(engine.scheduler.waiting) < 8:
            tokens = prompt(rng.choice([0, 8, 16])) + prompt(rng.randrange(1, 16), rng.randrange(999))
            engine.submit(tokens, greedy(rng.randrange(1, 20)), id="x", n=rng.choice([1, 1, 2]))
        if engine._requests and rng.random() < 0.05:
            engine.abort(rng.choice(list(engine._requests)))
        if rng.random() < 0.03:
            engine.runner.fail_next = MemoryError("no room for activations")
        if rng.random() < 0.01:
            engine.runner.fail_move = MemoryError("no room in host memory")
        engine.step()
        for event in events:
            fold.apply(state, decode(encode(event)))
        events.clear()
        truth = engine.state()
        assert state.gaps == 0
        assert state.pool.used_blocks == truth["blocks"]["used"]
        assert state.pool.cached_blocks == truth["blocks"]["cached"]
        live = {n: r for n, r in state.requests.items() if r.state != "finished"}
        assert live.keys() == {r["request"] for r in truth["requests"]}
        for request in truth["requests"]:
            mine = live[request["request"]]
            assert mine.table == request["blocks"]
            assert mine.computed == request["computed_tokens"]
            assert mine.swapped == request["swapped_tokens"]
            assert mine.output_tokens == request["output_tokens"]
            assert mine.preemptions == request["preemptions"]
            words = {"waiting": ("queued", "preempted"), "prefill": ("prefill",), "decode": ("decode",)}
            assert mine.state in words[request["state"]]
        for block, owners in enumerate(state.blocks.owners):
            assert len(owners) == engine.pool.refs[block]
            assert bool(state.blocks.sealed[block]) == (engine.pool.hash_of[block] is not None)
        recount(engine, state)
    assert (state.totals.preemptions > 0) == (engine.pool.can_share and engine.config.kv_cache)


def recount(engine, state):
    """Waste by brute force: which slots of which block does some request's computed token stand in?"""
    size = engine.config.block_size
    filled = {
        (request.table[position // size], position % size)
        for request in engine.scheduler.running
        for position in range(request.computed)
    }
    used = {block for request in engine.scheduler.running for block in request.table}
    shared_full = {(block, slot) for block in used if engine.pool.hash_of[block] for slot in range(size)}
    assert state.pool.filled_slots == len(filled | shared_full)
    assert state.pool.wasted_slots == len(used) * size - len(filled | shared_full)
    runs = "".join("." if count == 0 else "x" for count in engine.pool.refs).split("x")
    assert engine.pool.largest_hole == max(map(len, runs))
    engine.pool.check([request.table for request in engine.scheduler.running])


def test_seeded_requests_say_the_same_again():
    texts = []
    for _ in range(2):
        engine, events = stub_engine()
        engine.submit(prompt(9), SamplingParams(max_tokens=5, temperature=0.0, seed=1), id="a")
        while not engine.idle:
            engine.step()
        texts.append([encode(e) for e in events if type(e).__name__ == "Tokens" and setattr(e, "t", 0) is None])
    assert texts[0] == texts[1]
