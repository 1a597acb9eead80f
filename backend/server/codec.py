"""Text to tokens and back, with bounds, and off the event loop where it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from backend.models.errors import ModelError
from backend.server.errors import bad_request

if TYPE_CHECKING:
    from backend.models.loader import LoadedModel

OFFLOAD_CHARS = 8192  # a few milliseconds of tokenizing
OFFLOAD_TOKENS = 16384
Result = TypeVar("Result")


class Codec:
    """The model's tokenizer as the server uses it. All methods raise ApiError (400) for what cannot be encoded."""

    def __init__(self, loaded: LoadedModel, max_model_len: Callable[[], int]):
        self._loaded = loaded
        self._tokenizer = loaded.tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self.vocab = loaded.config.vocab_size
        # More characters than this cannot fit, whatever they say: no need to tokenize megabytes to find out.
        self._longest_piece = max(map(len, self._tokenizer.get_vocab()))
        self._max_model_len = max_model_len

    async def encode(self, texts: list[str], where: list[str], special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text; `where` names them."""
        for text, name in zip(texts, where, strict=True):
            self._bound(len(text), name)
        chars = sum(map(len, texts))
        found = await self._run(chars > OFFLOAD_CHARS, lambda: [self._encode(text, special_tokens) for text in texts])
        for ids, name in zip(found, where, strict=True):
            if not ids:
                raise bad_request(f"{name} is empty", name)
        return found

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        chars = sum(len(message["content"]) for message in messages)
        self._bound(chars, "messages")
        try:
            return await self._run(chars > OFFLOAD_CHARS, lambda: self._loaded.encode_chat(messages))
        except ModelError as error:
            raise bad_request(str(error), "messages") from None

    async def decode(self, ids: list[int]) -> str:
        """The text of checked ids."""
        return await self._run(len(ids) > OFFLOAD_TOKENS, lambda: self._tokenizer.decode(ids))

    def pieces(self, ids: list[int]) -> list[str]:
        return self._tokenizer.convert_ids_to_tokens(ids)

    def check_ids(self, ids: list[int], where: str) -> None:
        for i, token in enumerate(ids):
            if not 0 <= token < self.vocab:
                raise bad_request(f"{where}[{i}] is {token}; token ids go from 0 to {self.vocab - 1}", f"{where}[{i}]")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special_tokens)

    def _bound(self, chars: int, where: str) -> None:
        tokens = self._max_model_len()
        if chars > tokens * self._longest_piece:
            raise bad_request(
                f"{where} has {chars} characters; the context of {tokens} tokens holds "
                f"{tokens * self._longest_piece} at the very most",
                where,
                "context_length_exceeded",
            )

    async def _run(self, offload: bool, work: Callable[[], Result]) -> Result:
        if offload:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return work()
