"""Ids to text, for the engine."""

from __future__ import annotations


class Text:
    """`tokenizer` is a transformers tokenizer, or anything with its `decode(ids, skip_special_tokens=…)`."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def piece(self, token: int) -> str:
        """One token as it is shown in a block: special tokens by name, parts of characters as the replacement sign."""
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode(
                [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return self._pieces[token]
