"""Ids to text, for the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


class Text:
    """`tokenizer` is a transformers tokenizer, or anything with its `decode(ids, skip_special_tokens=…)`."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._decode = _unwrapped(tokenizer) or partial(
            tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._alone: dict[int, str] = {}  # what each token is when it is decoded by itself
        self._pieces: dict[int, str] = {}

    def decode(self, ids: list[int]) -> str:
        if len(ids) != 1:
            return self._decode(ids)
        text = self._alone.get(ids[0])
        if text is None:
            text = self._alone[ids[0]] = self._decode(ids)
        return text

    def piece(self, token: int) -> str:
        """One token as it is shown in a block: special tokens by name, parts of characters as the replacement sign."""
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode(
                [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return self._pieces[token]


def _unwrapped(tokenizer) -> Callable[[list[int]], str] | None:
    """Of a transformers tokenizer what its `decode` calls in the end: for two tokens, four fifths of the time go into
    what stands around it. None where a class decodes in a way of its own."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from transformers import PreTrainedTokenizerFast as Fast  # where there is such a tokenizer, it is imported already

    kind = type(tokenizer)
    same = isinstance(tokenizer, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode)
    return partial(backend.decode, skip_special_tokens=True) if same else None
