"""The one schema of facts. A source emits events, everything a person sees is a fold of them.

Wire form: one JSON object a line, `{"type": "step", "seq": 17, "t": 3.25, …}`; fields that hold
their default are left out. Readers ignore fields they do not know, and refuse a `Hello` or
`Snapshot` whose `schema` is newer than theirs. A recording is these lines, compressed.

Clock: `t` is seconds on the engine's monotonic clock since the engine started. `seq` rises by
one per event within an epoch (one engine start); a gap means that events were lost.

Two channels. *State* events say who holds what and when; every viewer gets them and they are
small. *Text* events (`Prompt`, `Tokens`, `Sealed`) carry what the blocks mean; a hub keeps them
and hands a viewer only what it asks for.

Requests are numbered by the engine (`request`, 1, 2, 3 …); the API's id travels once, in `Queued`.
Blocks are numbered 0 … num_blocks - 1.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = 1


class Event(msgspec.Struct, tag_field="type", omit_defaults=True, kw_only=True):
    seq: int = 0
    t: float = 0.0


class ModelInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The loaded model, as the engine found it (measured on the live tensors, not read from a card)."""

    name: str
    family: str = ""  # transformers' model_type
    weights: str = "real"  # or "random"
    dtype: str = "float32"
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    parameters: int = 0
    weight_bytes: int = 0  # every parameter, stored
    step_weight_bytes: int = 0  # what one step must read: the input embedding is a gather, a tied head is read
    kv_bytes_per_token: int = 0
    max_model_len: int = 0
    chat_template: bool = False
    notes: list[str] = []  # plain words for the screen: why this dtype, what was checked


class DeviceInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    kind: str = "cpu"  # or "cuda"
    name: str = ""
    threads: int = 0
    memory_bytes: int = 0


class Hello(Event, tag="hello", kw_only=True):
    """First event of an epoch. Everything before it is void: the pool is empty, no request lives."""

    epoch: str
    schema: int = 0
    source: str = "embedded"  # embedded | remote | modelled | replay | vllm | sglang
    evidence: str = "measured"  # measured | computed | modelled | simulated
    wall_time: float = 0.0  # unix seconds at t = 0
    model: ModelInfo
    device: DeviceInfo
    block_size: int
    num_blocks: int
    config: dict[str, Any] = {}

    def __post_init__(self) -> None:
        self.schema = self.schema or SCHEMA  # not the field's default: defaults are left out, this is always written


class Configured(Event, tag="configured", kw_only=True):
    """Switches changed while the engine was idle. `rebuilt`: the pool was made anew, all blocks are free."""

    block_size: int
    num_blocks: int
    rebuilt: bool = False
    config: dict[str, Any] = {}


class Queued(Event, tag="queued", kw_only=True):
    request: int
    id: str
    user: str = ""  # who asked, for the lane's label; "" when unknown
    prompt_tokens: int
    max_tokens: int


class Step(Event, tag="step", kw_only=True):
    """One engine step, written when it ended (`t` is its end, `t - step_s` its start).

    `ops`, in the order they happened while the step was scheduled:
        ["admit", request, *blocks]        enters the batch; these blocks were found in the prefix cache
        ["alloc", request, *blocks]        fresh blocks appended to its table (a cached one is evicted)
        ["copy", request, old, new]        copy-on-write: `new` replaces `old` in its table
        ["preempt", request]               its blocks are released, its computed tokens fall to 0
    `prefill`: [request, tokens, context before] for requests that still compute known tokens.
    `decode`: requests that computed one token each; None means every request in state "decode".
    A request that has computed all it knows samples one token in this step.
    `sealed`: blocks that became full and answer prefix look-ups from now on.
    """

    step: int
    ops: list[list[str | int]] = []
    prefill: list[tuple[int, int, int]] = []
    decode: list[int] | None = None
    sealed: list[int] = []
    waiting: int = 0
    step_s: float = 0.0  # whole step, the sum below plus what is not attributed
    schedule_s: float = 0.0
    build_s: float = 0.0  # inputs: ids, positions, slots, tables
    forward_s: float = 0.0
    sample_s: float = 0.0
    output_s: float = 0.0  # detokenize, stop checks, hand-over
    flops: float = 0.0
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    activation_bytes: int = 0


class Finished(Event, tag="finished", kw_only=True):
    """Its blocks are released (tail first). Times in seconds; None where there is none to state."""

    request: int
    reason: str  # stop | length | abort | error
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the first admission; resuming after preemption does not count
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    message: str = ""  # with reason "error"


class Cleared(Event, tag="cleared", kw_only=True):
    """The prefix cache was emptied: no free block keeps its hash."""


class Fault(Event, tag="fault", kw_only=True):
    message: str
    fatal: bool = False


class Prompt(Event, tag="prompt", kw_only=True):
    """Text channel. The prompt of a request, one piece of text a token."""

    request: int
    pieces: list[str]


class Tokens(Event, tag="tokens", kw_only=True):
    """Text channel. What a step said: [request, text]; "" while a character is incomplete or held back."""

    step: int
    texts: list[tuple[int, str]]


class Sealed(Event, tag="sealed", kw_only=True):
    """Text channel. [block, its hash, its parent's hash or "", request that filled it, its first token's position]."""

    blocks: list[tuple[int, str, str, int, int]]


class Snapshot(Event, tag="snapshot", kw_only=True):
    """A whole folded state (`backend.fold.State`), so that a late joiner need not hear the past."""

    schema: int = 0
    state: Any

    def __post_init__(self) -> None:
        self.schema = self.schema or SCHEMA


TEXT_CHANNEL = (Prompt, Tokens, Sealed)
AnyEvent = Hello | Configured | Queued | Step | Finished | Cleared | Fault | Prompt | Tokens | Sealed | Snapshot

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """One line, without the newline."""
    return _encoder.encode(event)


def decode(line: bytes | str) -> AnyEvent:
    """Raises msgspec.ValidationError or msgspec.DecodeError for a line that is no event of this schema."""
    return _decoder.decode(line)
