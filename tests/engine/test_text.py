"""Ids to text: what transformers says, told faster."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from backend.engine.text import Text
from backend.models.loader import load


@pytest.fixture(scope="module")
def tokenizer():
    return load("smollm2-135m").tokenizer


def as_transformers_does(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@settings(deadline=None)
@given(data=st.data())
def test_the_text_is_the_one_that_transformers_decodes(tokenizer, data):
    text, ids = Text(tokenizer), data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    assert text.decode(ids) == as_transformers_does(tokenizer, ids)
    for token in ids + tokenizer.all_special_ids:  # alone, and once more from what was kept
        assert text.decode([token]) == text.decode([token]) == as_transformers_does(tokenizer, [token])


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked(tokenizer):
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    own = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    ids = own("hello there")["input_ids"]
    assert Text(own).decode(ids) == "HELLO THERE"
    assert Text(own).decode(ids[:1]) == "HELLO"
