"""An engine whose model is arithmetic: scheduling, blocks, events and text without a forward pass."""

from __future__ import annotations

import time
from types import SimpleNamespace

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request, SamplingParams
from backend.engine.runner import StepResult
from backend.planner.shape import ModelShape

VOCABULARY = 128


def next_token(request: Request) -> int:
    """Depends on everything said so far, as a model's answer does: lost or doubled tokens change all that follows."""
    return (sum((i + 1) * t for i, t in enumerate(request.tokens[-40:])) + len(request.tokens)) % (VOCABULARY - 32) + 32


def _said(complete: list[Request]) -> StepResult:
    return StepResult(complete, [next_token(request) for request in complete], None, 0.0, 0.0, 0.0)


class StubRunner:
    """Checks that K and V would be right: each scheduled position must follow on what was computed, in blocks that
    only this request may write."""

    def __init__(self):
        self.slots: dict[int, tuple] = {}
        self.fail_next: Exception | None = None
        self.fail_move: Exception | None = None
        self.step_s = 0.0  # how long a forward pass pretends to take

    def configure(self, config: EngineConfig) -> None:
        self.block_size, self.kv_cache = config.block_size, config.kv_cache
        self.slots.clear()

    def move(self, plan) -> None:
        if self.fail_move:
            error, self.fail_move = self.fail_move, None
            raise error
        for request, blocks in plan.swap_outs:
            request.saved = [self._block(block) for block in blocks]
        for request, blocks in plan.swap_ins:
            for block, content in zip(blocks, request.saved[-len(blocks) :] if blocks else [], strict=True):
                self._write(block, content)
            request.saved = None
        for old, new in plan.copies:
            self._write(new, self._block(old))

    def _block(self, block: int) -> list:
        return [self.slots.get(block * self.block_size + offset) for offset in range(self.block_size)]

    def _write(self, block: int, content: list) -> None:
        for offset, slot in enumerate(content):
            self.slots[block * self.block_size + offset] = slot

    def execute(self, plan) -> StepResult:
        if self.fail_next:
            error, self.fail_next = self.fail_next, None
            raise error
        if self.step_s:
            time.sleep(self.step_s)
        if not self.kv_cache:
            assert all(request.computed == 0 and not request.table for request in plan.work)
            return _said([r for r, n in plan.work.items() if n == r.known])
        for request, count in plan.work.items():
            for position in range(request.computed, request.computed + count):
                self.slots[self._slot(request, position)] = (position, request.tokens[position])
        for request, count in plan.work.items():
            for position in range(request.computed + count):
                expected = (position, request.tokens[position])
                assert self.slots.get(self._slot(request, position)) == expected, (
                    f"request {request.number} would attend to a wrong token at position {position}"
                )
        return _said([r for r, n in plan.work.items() if r.computed + n == r.known])

    def _slot(self, request: Request, position: int) -> int:
        return request.table[position // self.block_size] * self.block_size + position % self.block_size


SHAPE = ModelShape.from_config(
    {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": VOCABULARY,
    },
    dtype_bytes=4,
)  # fmt: skip
TEXT = SimpleNamespace(
    decode=lambda ids: bytes(ids).decode(errors="replace"), piece=lambda token: bytes([token]).decode(errors="replace")
)


def stub_engine(stop_ids=(), **config) -> tuple[Engine, list]:
    """(engine, the list that its events go to)."""
    events: list = []
    return Engine(StubRunner(), TEXT, SHAPE, EngineConfig(**config), events.append, stop_ids), events


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed * 13 + i * i) % 96 + 32 for i in range(length)]


def alone(tokens: list[int], count: int) -> list[int]:
    """What a request says when nobody disturbs it."""
    request = SimpleNamespace(tokens=list(tokens))
    for _ in range(count):
        request.tokens.append(next_token(request))
    return request.tokens[len(tokens) :]


def greedy(max_tokens: int = 8, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)


def run(engine: Engine, limit: int = 100_000) -> dict[int, list]:
    """Steps until idle; deltas by request."""
    said: dict[int, list] = {}
    for _ in range(limit):
        if engine.idle:
            return said
        for delta in engine.step():
            said.setdefault(delta.request, []).append(delta)
    raise AssertionError(f"still busy after {limit} steps")


def ids(deltas: list) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
