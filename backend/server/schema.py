"""What a client may ask for. Every option that we know acts or is refused by its name; others are listed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from backend.engine.request import SamplingParams
from backend.server.errors import bad_request

MAX_CHOICES = 128  # OpenAI's limit on n
MAX_SEQUENCES = 1024  # prompts times n in one request
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, OpenAI's

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, Meta(max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generate(msgspec.Struct, kw_only=True):
    """Options that both generating endpoints share. null means "not given", as clients send it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: off
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    user: Name | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower goes first

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return bool(self.usage_in_stream and self.stream_options.continuous_usage_stats)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def default_max_tokens(self) -> int | None:
        """What max_tokens is when none is given; None: all that fits."""
        return None

    @property
    def wanted_logprobs(self) -> int | None:
        """None: off; else how many alternatives beside the chosen token."""
        return None

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters; `max_tokens` holds when the client names none. Raises ApiError (400)."""
        max_tokens = self.wanted_tokens or max_tokens
        if (self.min_tokens or 0) > max_tokens:
            raise bad_request(f"min_tokens ({self.min_tokens}) is more than max_tokens ({max_tokens})", "min_tokens")
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=self.stop_strings,
            stop_token_ids=self.stop_token_ids or [],
            include_stop=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.wanted_logprobs,
        )


class Completion(Generate):
    prompt: Any = None  # str | list[str] | list[int] | list[list[int]]; see prompts()
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @property
    def default_max_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


Messages = Annotated[list[Message], Meta(min_length=1, max_length=4096)]


class Chat(Generate):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Tokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
