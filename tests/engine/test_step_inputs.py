"""Inputs of a step that follow from the step before are those that its requests say."""

from __future__ import annotations

import random

import numpy as np
import pytest

from backend.engine.runner import TorchRunner
from tests.engine.stub import greedy, prompt
from tests.engine.tiny import load_tiny, tiny_engine


@pytest.fixture(scope="module")
def loaded():
    return load_tiny()


@pytest.fixture
def compared(monkeypatch) -> list[int]:
    """How many requests each step had whose inputs followed; they are gathered anew beside it and compared."""
    sizes: list[int] = []
    following = TorchRunner._following

    def both(self, plan):
        found = following(self, plan)
        if found:
            gathered, wanted = self._gathered(plan)
            singles, columns = found.singles, found.columns
            assert set(singles) == set(gathered) and len(singles) == len(gathered)
            for name, given, right in zip(columns._fields, columns, wanted, strict=True):
                np.testing.assert_array_equal(np.sort(given), np.sort(right), err_msg=name)
            order = [request.row for request in singles]
            assert columns.rows.tolist() == order
            assert columns.positions.tolist() == [request.computed for request in singles]
            assert columns.ids.tolist() == [request.tokens[-1] for request in singles]
            assert (np.diff(columns.lengths) >= 0).all()
            sizes.append(len(singles))
        return found

    monkeypatch.setattr(TorchRunner, "_following", both)
    return sizes


@pytest.mark.parametrize(
    "config",
    [
        {"num_blocks": 200},
        {"num_blocks": 24, "block_size": 4},  # preempts
        {"num_blocks": 24, "block_size": 4, "preemption": "swap"},
        {"num_blocks": 200, "policy": "static"},
    ],
)
def test_whatever_came_between(loaded, compared, config):
    rng, steps = random.Random(1), 300
    engine = tiny_engine(loaded, max_running=5, chunk_size=8, max_model_len=96, **config)
    live: list[int] = []
    for number in range(steps):
        if rng.random() < 0.12 and len(live) < 12:
            tokens = prompt(rng.randrange(1, 30), seed=rng.randrange(4))
            live += [
                r.number
                for r in engine.submit(tokens, greedy(rng.randrange(1, 30)), id=f"r{number}", n=rng.choice([1, 1, 2]))
            ]
        if live and rng.random() < 0.03:
            engine.abort(rng.choice(live))
        for delta in engine.step():
            if delta.finish_reason and delta.request in live:
                live.remove(delta.request)
    assert len(compared) > 20 and max(compared) > 2
