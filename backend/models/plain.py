"""A stand-in tokenizer for random weights of a model whose tokenizer is not at hand."""

from __future__ import annotations

import re
from collections.abc import Iterable

_CONSONANTS = "bdfghjklmnprstvz"
_SYLLABLES = [c + v for c in _CONSONANTS for v in "aeiou"]
_RANK = {syllable: rank for rank, syllable in enumerate(_SYLLABLES)}
_BYTES = 256
_WORD = re.compile(r" (?:[bdfghjklmnprstvz][aeiou])+(?![a-z])")


class PlainTokenizer:
    """Ids 0-255 are bytes, the others are pronounceable words (" ba", " be" … " baba"): any text goes in and comes
    back unchanged, any id comes out readable. Means nothing, and says so in the notes of the loaded model."""

    is_fast = False
    chat_template = None
    eos_token_id = None
    bos_token_id = None
    pad_token_id = None
    all_special_ids: list[int] = []

    def __init__(self, vocab: int):
        self.vocab_size = vocab

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens  # there are none
        ids: list[int] = []
        at = 0
        for match in _WORD.finditer(text):
            number = _number(match.group()[1:])
            if number < self.vocab_size:
                ids += self._raw(text[at : match.start()])
                ids.append(number)
                at = match.end()
        return ids + self._raw(text[at:])

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False, **_: object) -> str:
        del skip_special_tokens
        if isinstance(ids, int):
            ids = [ids]
        parts = (bytes([i]) if i < _BYTES else b" " + _word(i).encode() for i in ids)
        return b"".join(parts).decode(errors="replace")

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str]:
        return self.decode(ids) if isinstance(ids, int) else [self.decode(i) for i in ids]

    def get_vocab(self) -> dict[str, int]:
        parts = {f"<0x{i:02X}>": i for i in range(min(_BYTES, self.vocab_size))}
        return parts | {" " + _word(i): i for i in range(_BYTES, self.vocab_size)}

    def _raw(self, text: str) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode(errors="replace")]


def _word(number: int) -> str:
    """Bijective base 80: 256 is "ba", 335 "zu", 336 "baba"."""
    number -= _BYTES - 1
    word = ""
    while number:
        number, rank = divmod(number - 1, len(_SYLLABLES))
        word = _SYLLABLES[rank] + word
    return word


def _number(word: str) -> int:
    number = 0
    for i in range(0, len(word), 2):
        number = number * len(_SYLLABLES) + _RANK[word[i : i + 2]] + 1
    return number + _BYTES - 1
