"""What the load client is told and what it tells: one run against one server."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Endpoint = Literal["completions", "chat"]
State = Literal["ok", "refused", "failed", "cut"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server that answered, and how to speak to it. `url` has neither /v1 nor a slash at its end."""

    url: str
    model: str
    endpoint: Endpoint = "completions"
    headers: dict[str, str] = {}
    tokens_per_word: float = 1.0  # of our vocabulary, in the server's tokenizer
    overhead_tokens: int = 0  # what a prompt has before its first word: chat template, begin of text
    counts_tokens: bool = True  # the server reports usage; without it, pieces of the stream are counted
    max_model_len: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    target: Target
    requests: list[tuple[float, int, int]]  # arrival in s from the start, prompt tokens, answer tokens; in order
    salt: str = ""  # of the prompts' words: two jobs with one salt ask the same
    prefix: str = ""  # all prompts begin with it; its tokens come on top of those that are asked for
    extra: dict[str, Any] = {}  # into every body: ignore_eos, temperature …
    timeout_s: float = 600.0  # of one request
    drain_s: float = 60.0  # after the last arrival; who is in flight then is cut off


class Tick(msgspec.Struct, tag="tick", kw_only=True):
    """How things stand, ten times a second. Times in s from the start of the run."""

    t: float
    arrived: int
    left: int  # ended in whatever way
    in_flight: int
    running: float | None = None  # by the server's own /metrics
    waiting: float | None = None


class Answer(msgspec.Struct, tag="answer", kw_only=True):
    """One request that has left. Times in s from the start of the run.

    ok: ended as it should. refused: 429. failed: anything else that is no answer. cut: in flight when the run ended.
    """

    number: int
    arrival_s: float  # as planned, whatever the client or the server did
    sent_s: float
    end_s: float
    state: State
    times_s: list[float] = []  # of each piece of the answer that carried text, first to last
    wanted_input: int
    wanted_output: int
    input_tokens: int | None = None  # as the server counts
    output_tokens: int | None = None
    code: int = 0  # HTTP status; 0: no answer at all
    message: str = ""


class End(msgspec.Struct, tag="end", kw_only=True):
    t: float
    stopped: bool = False  # before all had arrived
    clock_s: float = 0.0  # time.perf_counter at the start of the run


Said = Tick | Answer | End
