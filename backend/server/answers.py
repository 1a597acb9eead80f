"""The two dialects of an answer: text completions and chat completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backend.engine.request import Delta, TokenLogprob, Usage

LOWEST_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(slots=True)
class Choice:
    """What one request has said so far."""

    index: int
    request: int  # the engine's number for it
    prompt_ids: list[int]
    echo: str = ""  # comes before what it says
    wants_ids: bool = False
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    started: bool = False  # a chunk of it was sent
    offset: int = 0  # characters of tokens whose logprobs were told

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.usage = delta.usage or self.usage

    @property
    def output_tokens(self) -> int:
        return self.usage.output_tokens if self.usage else len(self.ids)

    def end(self) -> dict[str, Any]:
        """What every choice says when it is over, in both dialects. `kvscope` is our own extension."""
        usage = self.usage or Usage()
        return {
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "kvscope": {
                "request": self.request,
                "cached_tokens": usage.cached_tokens,
                "preemptions": usage.preemptions,
                "timings": {
                    "queue_s": usage.queue_s,
                    "ttft_s": usage.ttft_s,
                    "tpot_s": usage.tpot_s,
                    "e2e_s": usage.e2e_s,
                },
            },
        }

    def token_ids(self, new: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": new} if self.wants_ids else {}


def usage_of(choices: list[Choice], n: int) -> dict[str, Any]:
    """Token counts. The `n` choices of one prompt stand side by side, and their prompt counts once."""
    firsts = choices[::n]
    prompt = sum(len(c.prompt_ids) for c in firsts)
    output = sum(c.output_tokens for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(c.usage.cached_tokens for c in firsts if c.usage)},
    }


class Dialect(Protocol):
    prefix: str
    whole_name: str
    chunk_name: str

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A finished choice."""

    def pieces(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """What a delta adds, as choices of chunks; [] when there is nothing to say yet. `choice` has it already."""


class CompletionDialect:
    prefix = "cmpl-"
    whole_name = chunk_name = "text_completion"

    def whole(self, choice: Choice) -> dict[str, Any]:
        ids = {"prompt_token_ids": choice.prompt_ids} if choice.wants_ids else {}
        return {
            "index": choice.index,
            "text": choice.echo + "".join(choice.text),
            "logprobs": self._logprobs(choice, choice.logprobs),
            **choice.end(),
            **choice.token_ids(choice.ids),
            **ids,
        }

    def pieces(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        text = delta.text if choice.started else choice.echo + delta.text
        if not (text or delta.logprobs or delta.finish_reason or choice.wants_ids):
            return []
        ids = {} if choice.started or not choice.wants_ids else {"prompt_token_ids": choice.prompt_ids}
        choice.started = True
        return [
            {
                "index": choice.index,
                "text": text,
                "logprobs": self._logprobs(choice, delta.logprobs),
                **(choice.end() if delta.finish_reason else {"finish_reason": None}),
                **choice.token_ids(delta.token_ids),
                **ids,
            }
        ]

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        offsets = []
        for item in logprobs:
            offsets.append(choice.offset)
            choice.offset += len(item.token)
        return {
            "text_offset": offsets,
            "tokens": [item.token for item in logprobs],
            "token_logprobs": [max(item.logprob, LOWEST_LOGPROB) for item in logprobs],
            "top_logprobs": [
                {item.token: max(item.logprob, LOWEST_LOGPROB)}
                | {token: max(logprob, LOWEST_LOGPROB) for _, token, logprob in item.top}
                for item in logprobs
            ],
        }


class ChatDialect:
    prefix = "chatcmpl-"
    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def whole(self, choice: Choice) -> dict[str, Any]:
        ids = {"prompt_token_ids": choice.prompt_ids} if choice.wants_ids else {}
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            **choice.end(),
            **choice.token_ids(choice.ids),
            **ids,
        }

    def pieces(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.logprobs or delta.finish_reason or choice.wants_ids):
            return []
        pieces = []
        if not choice.started:
            # Told with the first token and not before: clients take the first chunk's time for the first token's.
            choice.started = True
            ids = {"prompt_token_ids": choice.prompt_ids} if choice.wants_ids else {}
            opening = {"role": "assistant", "content": ""}
            pieces.append({"index": choice.index, "delta": opening, "logprobs": None, "finish_reason": None, **ids})
        pieces.append(
            {
                "index": choice.index,
                "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
                "logprobs": self._logprobs(delta.logprobs),
                **(choice.end() if delta.finish_reason else {"finish_reason": None}),
                **choice.token_ids(delta.token_ids),
            }
        )
        return pieces

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        return {
            "content": [
                {
                    **_scored(item.token, item.logprob),
                    "top_logprobs": [_scored(token, logprob) for _, token, logprob in item.top],
                }
                for item in logprobs
            ],
            "refusal": None,
        }


def _scored(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(token.encode())}
