"""Prompts of a wanted length that no two requests share, for any tokenizer."""

from __future__ import annotations

import random
import re

from backend.workload.prompts import QUESTIONS, SYSTEM

# Everyday words are one token each in most vocabularies: 358 of these 396 in SmolLM2's. What a word really costs is
# measured on the server at hand (`target.find`).
WORDS = tuple(sorted(set(re.findall(r"[a-z]{3,8}", f"{SYSTEM} {' '.join(QUESTIONS)}".lower()))))


def text(seed: str, words: int) -> str:
    """`words` random words, the same for the same seed. Prompts of different seeds share no prefix worth caching."""
    return " ".join(random.Random(f"{seed} words").choices(WORDS, k=max(1, words)))


def words_for(tokens: int, tokens_per_word: float, overhead_tokens: int) -> int:
    return max(1, round((tokens - overhead_tokens) / tokens_per_word))
