"""Sends requests of our own to a foreign engine and follows their answers, in the background's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from backend.sources.attach.capabilities import TELLS_IDS
from backend.sources.attach.detect import Found
from backend.sources.attach.journal import Journal, Own
from backend.sources.attach.stream import Broken, hear, pieces
from backend.sources.attach.target import Unreachable
from backend.sources.attach.web import Web
from backend.sources.follow import reason
from backend.sources.remote import EngineError

CONTINUOUS = ("vllm", "sglang", "kvscope")  # tell usage in each piece of a stream
EXTRAS = (b"stream_options", b"continuous_usage_stats", b"return_token_ids")  # that a server may not know
MAX_CHOICES = 256
WAITS_S = 1.0  # a server that has said nothing by then (llama.cpp, while no slot is free) has the request in its queue


class Sender:
    """`connection()`: the server's. `found()`: what is known of it now. `heard(own)` is called when one has ended."""

    def __init__(
        self,
        connection: Callable[[], Web],
        journal: Journal,
        found: Callable[[], Found | None],
        heard: Callable[[Own], None],
    ):
        self._connection, self._journal, self._found, self._heard = connection, journal, found, heard

    async def send(self, path: str, body: dict[str, Any], id: str, taken: Callable[[], None]) -> None:
        """Sends, and tells what is heard until the answer ends. Raises EngineError when it was not taken or broke."""
        journal, t_sent, owns = self._journal, self._journal.clock(), []
        message = ""

        def begin() -> None:
            if not owns:
                owns.extend(self._begin(body, id, t_sent))
                taken()

        waits = asyncio.get_running_loop().call_later(WAITS_S, begin)
        try:
            async with self._ask(path, body) as response:
                waits.cancel()
                begin()
                for own in owns:
                    journal.taken(own)
                async for piece in pieces(response.aiter_raw() if not _packed(response) else response.aiter_bytes()):
                    hear(piece, owns, journal)
            if not all(own.reason for own in owns):
                message = "the server ended the stream before the answer was finished"
        except EngineError as error:  # refused, after a while perhaps
            message = str(error)
            raise
        except (Unreachable, Broken) as error:
            message = str(error)
            if not owns:
                raise EngineError(message) from None
        except asyncio.CancelledError:
            for own in owns:
                journal.end(own, "abort")
            raise
        finally:
            waits.cancel()
            for own in owns:
                failed = message and not own.reason
                journal.end(own, "error" if failed else _reason(own.reason), message if failed else "")
                self._heard(own)
        if message:
            raise EngineError(message)

    @asynccontextmanager
    async def _ask(self, path: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """The answer's stream; asked once more without our extras when the server does not know them."""
        for asked in (self._full(body), {**named(self._found()), **body, "stream": True}):
            async with self._connection().stream("POST", path, asked) as response:
                if 200 <= response.status_code < 300:
                    yield response
                    return
                content = (await response.aread())[: 1 << 16]
                error = EngineError(reason(response.status_code, content), response.status_code)
                if response.status_code not in (400, 422) or not any(extra in content for extra in EXTRAS):
                    raise error
        raise error

    def _begin(self, body: dict[str, Any], id: str, t_sent: float) -> list[Own]:
        """One for each answer that will come."""
        prompts = body.get("prompt")
        many = prompts if isinstance(prompts, list) and prompts and isinstance(prompts[0], list | str) else [prompts]
        answers = body.get("n") if isinstance(body.get("n"), int) else 1
        longest = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        said = _words(body)
        return [
            self._journal.begin(
                id, said or (prompt if isinstance(prompt, str) else ""), t_sent=t_sent, user=str(body.get("user", "")),
                max_tokens=int(longest),
            )
            for prompt in many[:MAX_CHOICES]
            for _ in range(max(1, answers))
        ]  # fmt: skip

    def _full(self, body: dict[str, Any]) -> dict[str, Any]:
        """With what makes a stream tell as much as this engine can."""
        found = self._found()
        kind = found.kind if found else ""
        options: dict[str, Any] = {"include_usage": True}
        if kind in CONTINUOUS:
            options["continuous_usage_stats"] = True
        extra = {"return_token_ids": True} if kind in TELLS_IDS else {}
        return {**named(self._found()), **extra, **body, "stream": True, "stream_options": options}


def named(found: Found | None) -> dict[str, str]:
    """The model, as a part of a body: servers want it named."""
    return {"model": found.model} if found and found.model else {}


def _packed(response: Any) -> bool:
    return bool(response.headers.get("content-encoding"))


def _reason(told: str) -> str:
    """As the fold knows ends."""
    return told if told in ("stop", "length", "abort") else "stop" if told else "error"


def _words(body: dict[str, Any]) -> str:
    """Of a chat, as people read it."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return ""
    lines = [f"{m.get('role', '')}: {m.get('content', '')}" for m in messages if isinstance(m, dict)]
    return "\n".join(lines)
