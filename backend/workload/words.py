"""Prompts of a wanted length that no two requests share, for any tokenizer."""

from __future__ import annotations

import random
import re

from backend.workload.prompts import QUESTIONS, SYSTEM

# Everyday words are one token each in most vocabularies, all of these in SmolLM2's, so that a prompt is as long as it
# is meant to be. What a word really costs is measured on the server at hand (`target.find`).
RARE = set(
    "bobbin citric descaled dynamo hums pancake saturday skips squeals stretchy thursday toaster truing tuesday "
    "tyres".split()
)
WORDS = tuple(sorted(set(re.findall(r"\b[a-z]{3,8}\b", f"{SYSTEM} {' '.join(QUESTIONS)}".lower())) - RARE))


def text(seed: str, words: int) -> str:
    """`words` random words, the same for the same seed. Prompts of different seeds share no prefix worth caching."""
    return " ".join(random.Random(f"{seed} words").choices(WORDS, k=max(1, words)))


def words_for(tokens: int, tokens_per_word: float, overhead_tokens: int) -> int:
    return max(1, round((tokens - overhead_tokens) / tokens_per_word))
