"""A streamed answer of an OpenAI-compatible server, read as it comes.

What servers do differently (each was seen): the first piece of a chat has a role and no text; a piece may hold several
tokens; `usage` comes in a piece without choices (vLLM), in the last one with choices (llama.cpp) or in each; an error
may come in the middle of the stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from backend.sources.attach.journal import Journal, Own

MAX_LINE = 4 * 2**20  # bytes; a piece with token ids of a long prompt is large
MAX_IDS = 200_000
TEXTS = ("reasoning_content", "reasoning", "content", "text")  # where a piece may have its words

_decode = msgspec.json.Decoder().decode


class Broken(Exception):
    """The server broke off, or said that it failed; plain words."""


async def pieces(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, until [DONE] or its end. Raises Broken."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MAX_LINE:
            raise Broken("the server sent a line without end")
        for line in lines:
            line = line.strip()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                piece = _decode(data)
            except msgspec.DecodeError:
                raise Broken("the server sent a piece that is no JSON") from None
            if isinstance(piece, dict):
                yield piece


def hear(piece: dict[str, Any], owns: list[Own], journal: Journal) -> None:
    """One piece of a stream of `owns`, one for each choice. Raises Broken for an error in it."""
    if error := piece.get("error"):
        raise Broken(str(error.get("message") if isinstance(error, dict) else error)[:400])
    if not owns:
        return
    _usage(piece, owns)
    _timings(piece, owns)
    choices = piece.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        index = choice.get("index")
        own = owns[index if isinstance(index, int) and 0 <= index < len(owns) else 0]
        if own.ended:
            continue
        delta = choice.get("delta") if isinstance(choice.get("delta"), dict) else choice
        text = "".join(said for key in TEXTS if isinstance(said := delta.get(key), str))
        _ids(own, piece, choice)
        own.pieces += bool(text)
        journal.say(own, text)
        if isinstance(reason := choice.get("finish_reason"), str):
            own.reason = reason


def _ids(own: Own, piece: dict[str, Any], choice: dict[str, Any]) -> None:
    """Token ids, where they were asked for: then counts are exact."""
    prompt = choice.get("prompt_token_ids") or piece.get("prompt_token_ids")
    if isinstance(prompt, list) and not own.prompt_ids and len(prompt) <= MAX_IDS:
        own.token_ids, own.prompt_ids = list(prompt), len(prompt)
        own.prompt_tokens = own.prompt_tokens or len(prompt)
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        own.ids += len(ids)
        if own.prompt_ids and len(own.token_ids) < MAX_IDS:
            own.token_ids += ids


def _usage(piece: dict[str, Any], owns: list[Own]) -> None:
    """Of all choices together: it says something of one only where there is only one."""
    usage = piece.get("usage")
    if not isinstance(usage, dict) or len(owns) != 1:
        return
    own = owns[0]
    if isinstance(tokens := usage.get("prompt_tokens"), int) and tokens > 0:
        own.prompt_tokens = tokens
    if isinstance(tokens := usage.get("completion_tokens"), int) and tokens > 0:
        own.told = tokens
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
        own.cached_tokens = cached


def _timings(piece: dict[str, Any], owns: list[Own]) -> None:
    """vLLM's with --enable-per-request-metrics."""
    told = piece.get("metrics")
    if isinstance(told, dict) and len(owns) == 1 and isinstance(ms := told.get("queue_time_ms"), int | float):
        owns[0].queue_s = ms / 1e3
