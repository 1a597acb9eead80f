"""Server-sent events of one streamed answer, in OpenAI's two dialects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from backend.sources.follow import reason
from backend.workload.job import Answer

MAX_LINE = 1 << 20
MAX_REFUSAL = 1 << 16


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class NoAnswer(Exception):
    """The server's answer is none; plain words."""


class AnswerStream:
    """Puts what comes for one request into its `answer`. Its methods raise NoAnswer."""

    def __init__(self, answer: Answer, now: Callable[[], float]):
        self._answer, self._now = answer, now
        self._rest = b""
        self._refusal: bytearray | None = None
        self._finished = False

    def head(self, code: int, headers: dict[str, str]) -> None:
        self._answer.code = code
        if code != 200:
            self._refusal = bytearray()
        elif not headers.get("content-type", "").startswith("text/event-stream"):
            raise NoAnswer("the server does not stream its answer")

    def data(self, data: bytes) -> None:
        if self._refusal is not None:
            self._refusal += data[: MAX_REFUSAL - len(self._refusal)]
            return
        now = self._now()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise NoAnswer("the stream has a line of more than a mebibyte")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(now, line[5:].strip())

    def end(self) -> None:
        """The answer has come to its end: was it one?"""
        if self._refusal is not None:
            raise NoAnswer(reason(self._answer.code, bytes(self._refusal)))
        if not self._finished:
            raise NoAnswer("the stream ended before the answer did")
        if self._answer.output_tokens is None:
            self._answer.output_tokens = len(self._answer.times_s)

    def _event(self, now: float, data: bytes) -> None:
        if data == b"[DONE]":
            self._finished = True
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError:
            raise NoAnswer("the stream holds something that is no OpenAI chunk") from None
        if chunk.error is not None:
            told = chunk.error.get("message") if isinstance(chunk.error, dict) else chunk.error
            raise NoAnswer(f"the server broke off: {told}")
        if chunk.usage is not None:
            self._answer.input_tokens = chunk.usage.prompt_tokens
            self._answer.output_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            self._finished = self._finished or choice.finish_reason is not None
            delta = choice.delta
            if choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
                self._answer.times_s.append(now)
