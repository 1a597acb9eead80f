"""The benchmarks that reach into the engine, as it is today, in small."""

from __future__ import annotations

import random

import pytest

from backend.events import Fault, Step
from benchmarks import engine_curves
from benchmarks.modelled_against_engine import Uncomputed, run
from tests.engine.tiny import LLAMA, load_tiny, tiny_engine


@pytest.mark.parametrize("block_size", [1, 16])
def test_prompts_that_are_not_computed_leave_an_engine_that_decodes(block_size):
    loaded, events = load_tiny(LLAMA | {"vocab_size": 1024}), []  # what is said unasked is token 1000
    loaded.config = loaded.model.config
    engine = tiny_engine(loaded, events, block_size=block_size)
    with Uncomputed(engine.runner):
        steps = run(engine, events, batch=3, prompt=40, answer=5, rng=random.Random(0))
    assert not [event for event in events if isinstance(event, Fault)]
    prompts = [step for step in steps if step.prefill]
    assert all(step.forward_s == 0 for step in prompts)
    decodes = [step for step in steps if step not in prompts]
    assert len(decodes) >= 4 and all(step.forward_s > 0 for step in decodes)


def test_what_a_step_costs_beside_its_forward_pass_is_counted():
    found = engine_curves.overhead(batch=3, answer=8)
    parts = sum(found[name] for name in ("schedule_s", "build_s", "sample_s", "events_s"))
    assert 0 < found["around_forward_low_s"] <= found["around_forward_s"] and parts > 0


def test_a_soak_ends_with_ten_tenths():
    found = engine_curves.soak(requests=40, at_once=4)
    assert len(found["per_cpu_s_by_tenth"]) == len(found["rss_bytes_by_tenth"]) == 10


def test_steps_of_a_batch_are_those_in_which_all_decode():
    loaded, events = load_tiny(), []
    engine = tiny_engine(loaded, events)
    engine_curves.fill(engine, random.Random(0), batch=3, context=20, answer=6, vocabulary=512)
    steps = engine_curves.decode_steps(engine, events, batch=3)
    assert len(steps) == 5 and all(step["step_s"] >= step["forward_s"] > 0 for step in steps)
    assert not [event for event in events if isinstance(event, Step) and event.prefill]
