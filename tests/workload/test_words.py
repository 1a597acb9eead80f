"""Prompts of a wanted length."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from backend.models import find
from backend.workload.words import text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(find.path("smollm2-135m") / "tokenizer.json"))


@pytest.mark.parametrize("words", [1, 16, 64, 500])
def test_a_word_is_a_token_of_the_bundled_model(tokenizer, words):
    """The first may cost one more: vocabularies know words with a space before them better."""
    for seed in range(40):
        prompt = text(f"seed {seed}", words)
        assert words <= len(tokenizer.encode(prompt, add_special_tokens=False).ids) <= words + 2
        assert prompt == text(f"seed {seed}", words)


def test_prompts_share_no_prefix_worth_caching():
    prompts = [text(str(seed), 64).split() for seed in range(200)]
    assert len({tuple(words[:4]) for words in prompts}) == 200
