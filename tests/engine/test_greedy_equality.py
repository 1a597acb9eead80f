"""Greedy float32 output equals transformers.generate, whatever batching, chunking, sharing or preemption did."""

import random

import pytest

from backend.engine.request import SamplingParams
from backend.events import Finished, Step
from tests.engine.stub import ids, run
from tests.engine.tiny import assert_same, load_tiny, prompts, reference, tiny_engine

COUNT, NEW = 64, 16


@pytest.fixture(scope="module")
def case():
    """64 prompts of mixed length, half of them with a shared prefix, and the reference's answers."""
    loaded = load_tiny()
    texts = prompts(COUNT, 90, 512, shared=70)
    return loaded, texts, [reference(loaded, text, NEW) for text in texts]


CONFIGS = {
    "one at a time": {"max_running": 1},
    "four at once": {"max_running": 4},
    "all at once": {"max_running": 32},
    "chunks of 16": {"chunk_size": 16, "token_budget": 64},
    "chunks of 64": {"chunk_size": 64, "token_budget": 256},
    "whole prompts": {"chunk_size": 4096, "token_budget": 4096},
    "no prefix cache": {"prefix_cache": False},
    "small pool": {"num_blocks": 40, "block_size": 8, "chunk_size": 32, "prefix_cache": False},
    "small pool, prefix cache": {"num_blocks": 40, "block_size": 8, "chunk_size": 32},
    "static batches": {"policy": "static", "max_running": 8},
    "blocks of one token": {"block_size": 1, "num_blocks": 8192},
    "small pool, swap": {"num_blocks": 40, "block_size": 8, "chunk_size": 32, "preemption": "swap"},
    "small pool, swap, no prefix cache": {
        "num_blocks": 40,
        "block_size": 8,
        "chunk_size": 32,
        "preemption": "swap",
        "prefix_cache": False,
    },
    "first fit": {"allocator": "first-fit", "num_blocks": 60, "block_size": 8, "prefix_cache": False},
    "reserve": {
        "allocator": "reserve",
        "num_blocks": 120,
        "block_size": 8,
        "max_model_len": 200,
        "prefix_cache": False,
    },
    "no KV cache": {"kv_cache": False, "prefix_cache": False, "token_budget": 512, "max_running": 4},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_all_together(case, name):
    loaded, texts, want = case
    events: list = []
    engine = tiny_engine(loaded, events, **CONFIGS[name])
    requests = [
        engine.submit(text, SamplingParams(max_tokens=NEW, temperature=0.0), id=str(i))[0]
        for i, text in enumerate(texts)
    ]
    said = run(engine)
    for i, request in enumerate(requests):
        got = ids(said[request.number])
        assert len(got) == NEW
        assert_same(got, want[i], f"{name}, prompt {i}")
    preemptions = sum(e.preemptions for e in events if isinstance(e, Finished))
    assert (preemptions > 0) == name.startswith("small pool")
    hits = sum(e.cached_tokens for e in events if isinstance(e, Finished))
    assert (hits > 0) == CONFIGS[name].get("prefix_cache", True)
    swaps = [op for e in events if isinstance(e, Step) for op in e.ops if op[0] in ("swap_out", "swap_in")]
    assert bool(swaps) == ("swap" in name)


def test_random_arrival_and_aborts_of_a_third(case):
    loaded, texts, want = case
    rng = random.Random(3)
    engine = tiny_engine(loaded, max_running=8, chunk_size=32, token_budget=96, num_blocks=160)
    pending = list(enumerate(texts))
    doomed = set(rng.sample(range(COUNT), COUNT // 3))
    live: dict[int, int] = {}
    said: dict[int, list[int]] = {i: [] for i in range(COUNT)}
    ended: dict[int, str] = {}
    while pending or not engine.idle:
        while pending and (engine.idle or rng.random() < 0.4):
            i, text = pending.pop(0)
            (request,) = engine.submit(text, SamplingParams(max_tokens=NEW, temperature=0.0), id=str(i))
            live[request.number] = i
        for number, i in list(live.items()):
            if i in doomed and rng.random() < 0.15 and engine.abort(number):
                ended[i] = "abort"
                del live[number]
        for delta in engine.step():
            i = live[delta.request]
            said[i] += delta.token_ids
            if delta.finish_reason:
                ended[i] = delta.finish_reason
                del live[delta.request]
    assert len(ended) == COUNT and "abort" in ended.values()
    for i in range(COUNT):
        assert ended[i] == "abort" or len(said[i]) == NEW
        assert_same(said[i], want[i], f"prompt {i} ({ended[i]})")
    engine.pool.check([])


def test_cold_and_warm_answers_are_the_same(case):
    loaded, texts, want = case
    engine = tiny_engine(loaded, block_size=8)
    params = SamplingParams(max_tokens=NEW, temperature=0.0)
    for _ in range(2):
        for i in (1, 3, 5):
            (request,) = engine.submit(texts[i], params, id=str(i))
            assert_same(ids(run(engine)[request.number]), want[i], f"prompt {i}")
    assert request.cached_tokens >= 64


def test_n_answers_from_one_prompt(case):
    loaded, texts, want = case
    events: list = []
    engine = tiny_engine(loaded, events, prefix_cache=False)
    group = engine.submit(texts[1], SamplingParams(max_tokens=NEW, temperature=0.0), id="g", n=3)
    said = run(engine)
    for request in group:
        assert_same(ids(said[request.number]), want[1], "a sibling")
    assert any(op[0] == "copy" for e in events if isinstance(e, Step) for op in e.ops)
