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

from functools import reduce
from operator import or_
from typing import Any, get_args

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
    shape: dict[str, Any] = {}  # `planner.shape.ModelShape`: what bytes and FLOPs of a step are counted from


class DeviceInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    kind: str = "cpu"  # or "cuda"
    name: str = ""
    threads: int = 0
    memory_bytes: int = 0


class Hello(Event, tag="hello", kw_only=True):
    """First event of an epoch. Everything before it is void: the pool is empty, no request lives."""

    epoch: str
    schema: int = 0
    source: str = "embedded"  # embedded | modelled | replay | vllm | sglang | llamacpp | tgi | trtllm | dynamo | openai
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
        ["swap_out", request]              its blocks are released, K and V of its computed tokens wait in host memory
        ["swap_in", request, *blocks]      enters the batch again with them; these blocks were found in the prefix
                                           cache, the "alloc" that follows has those that were copied back
    `prefill`: [request, tokens, context before] for requests that still compute known tokens; without a KV cache that
    is every request in every step.
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
    step_s: float = 0.0  # whole step: schedule, move, build, forward, sample, output, and what is not attributed
    forward_s: float = 0.0
    flops: float = 0.0
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    # A browser gets what stands above, see hub.py.
    schedule_s: float = 0.0
    move_s: float = 0.0  # K and V moved before computing: swapped, copied on write
    swap_bytes: int = 0  # of those, to and from host memory
    build_s: float = 0.0  # inputs: ids, positions, slots, tables
    sample_s: float = 0.0
    output_s: float = 0.0  # detokenize, stop checks, hand-over
    kv_write_bytes: int = 0
    activation_bytes: int = 0
    attention_flops: float = 0.0  # part of `flops`
    attention_s: float = 0.0  # part of `forward_s` that went into attention; 0: not measured


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


class Sensor(msgspec.Struct, kw_only=True):
    """One reading of a device, described once; its values come in `Sample`.

    `label` are the words that stand beside every value of it. A sensor that gives no value says why in `note`; then
    there is no number to show, least of all 0.
    """

    name: str  # dram_bandwidth, memory_busy, power …
    unit: str = ""  # % | W | J | MHz | °C | B | B/s | 1 (a bit mask)
    source: str = "none"  # nvml_gpm | nvml | nvml_field | dcgm | computed | probe | proc | none
    label: str = ""
    note: str = ""  # why there is no value, or ""
    period_s: float = 0.0  # how often it is asked
    span_s: float | None = None  # seconds a value speaks for, 0: that moment; None: the sample's own interval


class Process(msgspec.Struct, kw_only=True):
    pid: int
    name: str = ""
    memory_bytes: int | None = None  # None: the driver does not say


class Device(msgspec.Struct, kw_only=True):
    uuid: str  # "host" for the machine itself
    name: str = ""
    kind: str = "gpu"  # or "host"
    used: bool = False  # the engine computes here
    fake: bool = False  # a stand-in library was loaded on purpose: no such hardware need exist
    arch: str = ""
    driver: str = ""
    memory_bytes: int = 0  # 0: not known
    peak_bandwidth_bytes_per_s: float = 0.0  # of its memory; 0: not known
    peak_source: str = ""  # where the peak is from, in words
    notes: list[str] = []  # plain words for the screen
    state: str = "ok"  # ok | lost
    sensors: list[Sensor] = []
    processes: list[Process] = []
    processes_note: str = ""  # why there are none to list, or ""


class Devices(Event, tag="devices", kw_only=True):
    """What can be read here, and what not and why. Told when sampling starts and whenever something in it changes."""

    devices: list[Device] = []
    state: str = "ready"  # ready | absent | mismatch | no_permission | error, of NVIDIA's library
    message: str = ""  # that state in plain words


class Sample(Event, tag="sample", kw_only=True):
    """One reading of one device, taken at `t`. `values` in the order of its sensors; None: not asked, or no value.

    `spans`: for each sensor whose value speaks for another time than `span_s` says, how many seconds before `t`.
    """

    device: int  # index in `Devices`
    t0: float  # the reading before
    values: list[float | None]
    spans: list[float | None] | None = None


class Value(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One number that a foreign engine exports, under the name that we give it, and where it is from."""

    value: float | None = None  # None: there is none, `note` says why
    name: str = ""  # the series it was read from, as the engine calls it
    quality: str = "measured"  # measured | derived (computed from measured) | estimated (by the engine) | absent
    note: str = ""  # what it means where that is not plain ("includes cached tokens"), or why it is absent
    low: float | None = None  # bounds of the bucket that a quantile lies in; without a `high` it may be anything above
    high: float | None = None


class EngineRow(msgspec.Struct, kw_only=True):
    """One engine (data-parallel rank) of several that answer under one address."""

    labels: dict[str, str] = {}
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # 0 … 1


class Scrape(Event, tag="scrape", kw_only=True):
    """What a foreign engine's metrics said, read at `t`. Rates and quantiles are of the last `window_s`.

    `values` by canonical name; each of `backend.sources.attach.canonical.NAMES` is there, absent ones with the reason.
    """

    values: dict[str, Value] = {}
    window_s: float = 0.0  # since the scrape before; 0: the first, or the first after a restart
    scrape_s: float = 0.0  # from the question to the whole answer
    restarts: int = 0  # of the engine, seen since we attached
    unknown: int = 0  # series that no mapping knows
    by_engine: list[EngineRow] = []  # where there is more than one


class View(msgspec.Struct, kw_only=True):
    """What one picture can be drawn from at this source."""

    view: str  # block_map | prefix_tree | requests | roofline | batching | latency | preemption | hardware | switches
    quality: str  # exact | derived | estimated | inferred | none
    why: str = ""  # in plain words: what it is made from, or what is missing
    flag: str = ""  # of the foreign engine's command line, that would make it better; "": none


class Capabilities(Event, tag="capabilities", kw_only=True):
    """What can be shown of this source, and how well. Told after `Hello` and whenever it changes."""

    kind: str  # vllm | sglang | …, as in `Hello.source`
    version: str = ""
    views: list[View] = []


class Resident(Event, tag="resident", kw_only=True):
    """Blocks of a foreign engine's prefix cache came and went, in *cells*: places that we gave them, first free first,
    not the engine's. First `cleared`, then `removed`, then `stored`; each cell at most once in one event."""

    stored: list[int] = []
    removed: list[int] = []
    cleared: bool = False  # all of them are gone


class Heard(Event, tag="heard", kw_only=True):
    """How far requests of our own are at a foreign engine, as their client hears it: [request, tokens of its prompt
    (0: not known yet), tokens it said so far, when the first was heard (None: nothing yet)]. One that stands here was
    taken by the engine; whether it waits or computes there before its first word cannot be told from outside."""

    requests: list[tuple[int, int, int, float | None]]


class Prompt(Event, tag="prompt", kw_only=True):
    """Text channel. The prompt of a request, one piece of text a token."""

    request: int
    pieces: list[str]


class Tokens(Event, tag="tokens", kw_only=True):
    """Text channel. What a step said: [request, text]; "" while a character is incomplete or held back."""

    step: int
    texts: list[tuple[int, str]]


class Sealed(Event, tag="sealed", kw_only=True):
    """Text channel. [block, its hash, its parent's hash or "", request that filled it, its first token's position].

    `texts`, one a block, where no request here says what is in it (request 0: a foreign engine's). Told again for the
    same block when its text is known later.
    """

    blocks: list[tuple[int, str, str, int, int]]
    texts: list[str] = []


class Snapshot(Event, tag="snapshot", kw_only=True):
    """A whole folded state (`backend.fold.State`), so that a late joiner need not hear the past."""

    schema: int = 0
    state: Any

    def __post_init__(self) -> None:
        self.schema = self.schema or SCHEMA


TEXT_CHANNEL = (Prompt, Tokens, Sealed)
AnyEvent = (
    Hello
    | Configured
    | Queued
    | Step
    | Finished
    | Cleared
    | Fault
    | Devices
    | Sample
    | Scrape
    | Capabilities
    | Resident
    | Heard
    | Prompt
    | Tokens
    | Sealed
    | Snapshot
)


class Unread(Event, tag="prompt", kw_only=True):
    """A `Prompt` whose pieces are left as they came: most are never looked at."""

    request: int
    pieces: msgspec.Raw


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)
_lazy_decoder = msgspec.json.Decoder(reduce(or_, (Unread if kind is Prompt else kind for kind in get_args(AnyEvent))))


def encode(event: Event) -> bytes:
    """One line, without the newline."""
    return _encoder.encode(event)


def decode(line: bytes | str) -> AnyEvent:
    """Raises msgspec.ValidationError or msgspec.DecodeError for a line that is no event of this schema."""
    return _decoder.decode(line)


def decode_lazily(line: bytes | str) -> AnyEvent | Unread:
    """The same, with `Unread` in place of `Prompt`."""
    return _lazy_decoder.decode(line)
