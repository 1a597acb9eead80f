"""A small real load of one shape: `batch` prompts of the same length that then decode together."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec

STEPS = 24  # decode steps of a run: enough for a mean, few enough to wait for


class Shape(msgspec.Struct, frozen=True):
    batch: int
    context: int  # tokens that the last decode step attends

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.context - STEPS)

    @property
    def output_tokens(self) -> int:
        return STEPS if self.context > STEPS else max(2, self.context - 1)


def obstacle(shape: Shape, config: dict[str, Any], num_blocks: int, block_size: int) -> str:
    """Why the engine could not decode this shape at once, in words; "" when it can."""
    tokens = shape.prompt_tokens + shape.output_tokens
    needed = shape.batch * math.ceil(tokens / block_size)
    if needed > num_blocks:
        return f"{shape.batch} × {tokens:,} tokens need {needed:,} blocks, the pool has {num_blocks:,}"
    running = config.get("max_running")
    if running is not None and shape.batch > running:
        return f"the engine runs at most {running} requests at once (max_running)"
    longest = config.get("max_model_len")
    if longest is not None and tokens > longest:
        return f"{tokens:,} tokens are more than the context of {longest:,}"
    return ""


def body(shape: Shape, vocab: int, seed: int | None = None) -> dict[str, Any]:
    """For /v1/completions. Prompts of random tokens, so that no prefix cache answers for them; nothing ends early."""
    dice = random.Random(seed)
    low, high = vocab // 10, max(vocab // 10 + 1, vocab // 2)  # away from both ends, where special tokens live
    return {
        "prompt": [[dice.randrange(low, high) for _ in range(shape.prompt_tokens)] for _ in range(shape.batch)],
        "max_tokens": shape.output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "user": "run it",
    }
