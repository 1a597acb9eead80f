"""What every engine is asked: fixed random token ids, so that all of them do the same work."""

from __future__ import annotations

import random

LOWEST_ID = 256  # below it stand special tokens and single bytes in most vocabularies


def requests(rng: random.Random, count: int, input_tokens: int, output_tokens: int, vocab: int) -> list[dict]:
    """`count` prompts that share no prefix."""
    lowest = min(LOWEST_ID, vocab // 2)
    return [
        {"tokens": [rng.randrange(lowest, vocab) for _ in range(input_tokens)], "output_tokens": output_tokens}
        for _ in range(count)
    ]


def jobs(concurrency: list[int], input_tokens: int, output_tokens: int, vocab: int, seed: int = 1) -> list[dict]:
    """A warm-up, whose figures are thrown away, then one job for each number of requests at once.

    No prompt occurs twice: a prefix cache must not answer for an engine.
    """
    rng = random.Random(seed)
    warm_up = {"name": "warm-up", "requests": requests(rng, max(concurrency), input_tokens, 4, vocab)}
    return [warm_up] + [
        {"name": str(n), "requests": requests(rng, n, input_tokens, output_tokens, vocab)} for n in concurrency
    ]
