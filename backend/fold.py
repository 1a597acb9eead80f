"""The fold: events in, the state that everything on screen is drawn from out. `assets/live/fold.js` is its twin:
both give the same state from the same lines, block by block, and a test holds them together.

The fold never raises for a request or a block that it does not know (a recording may begin in the middle, a line may
be lost); such a part of an event is skipped. An event that was folded already (its `seq` is not newer) is skipped too,
so overlapping deliveries are harmless. A hole in `seq` raises `gaps`; who sees it rise asks for a snapshot.

Cost: a step costs what it touches. Pool counters are kept as blocks change hands, never recounted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backend import events
from backend.events import Device, DeviceInfo, EngineRow, Event, ModelInfo, Value, View

KEPT_FINISHED = 256  # finished requests that stay in the state
KEPT_ROWS = 3000  # rows of `series`
KEPT_TTFTS = 512
KEPT_SAMPLES = 600  # two minutes of one device at five a second
KEPT_SPANS = 128  # of one request; a request that is preempted again and again loses its oldest

EVICTED = "evicted"
PREEMPTED = "preempted"


class NewerSchema(ValueError):
    """The source speaks a newer event schema than this code understands."""


class Request(msgspec.Struct, kw_only=True):
    request: int
    id: str = ""
    user: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0
    state: str = "queued"  # queued | prefill | decode | preempted | finished
    reason: str = ""  # of the end: stop | length | abort | error
    message: str = ""  # with reason "error"
    cached_tokens: int = 0  # found in the prefix cache at its first admission
    computed: int = 0  # tokens whose keys and values are in the pool
    swapped: int = 0  # computed tokens whose keys and values wait in host memory
    reached: int = 0  # most tokens it had computed when it was preempted; below that, work is done again
    output_tokens: int = 0
    table: list[int] = []  # logical block -> physical block
    spans: list[list[Any]] = []  # [phase, begin, end or None], seconds on the engine's clock
    t_queued: float = 0.0
    t_first: float | None = None  # end of the step that sampled its first token
    t_last: float | None = None
    t_end: float | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


class Blocks(msgspec.Struct):
    """Parallel arrays over the physical blocks. Without owners and sealed: cached. Neither: free."""

    owners: list[tuple[int, ...]] = []  # requests whose table holds it, in order of arrival
    fill: list[int] = []  # slots with keys and values in them
    sealed: list[int] = []  # 1: answers prefix look-ups
    changed: list[int] = []  # step of the last change
    mark: list[str] = []  # "" | "evicted" | "preempted": what last happened against its holder's wish
    marked: list[int] = []  # step of the mark

    @classmethod
    def free(cls, count: int) -> Blocks:
        return cls([()] * count, [0] * count, [0] * count, [0] * count, [""] * count, [0] * count)


class Pool(msgspec.Struct):
    used_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    filled_slots: int = 0  # of used blocks, each physical slot once
    wasted_slots: int = 0  # of used blocks
    shared_saved_blocks: int = 0  # blocks that sharing spared: holders beyond the first
    held_tokens: int = 0  # computed tokens of live requests, shared ones counted for each
    resident_blocks: int = 0  # of a foreign engine: blocks whose hash is cached, also while requests hold them


class Totals(msgspec.Struct):
    steps: int = 0
    computed_prefill_tokens: int = 0
    output_tokens: int = 0
    lookup_tokens: int = 0  # prompt tokens of first admissions, with the prefix cache on
    cached_tokens: int = 0  # of those, found
    preemptions: int = 0
    recomputed_tokens: int = 0
    evictions: int = 0
    queued: int = 0
    finished: int = 0  # by stop or length
    aborted: int = 0
    errors: int = 0


class Telemetry(msgspec.Struct):
    """What the last `Devices` said."""

    state: str = ""  # "": nothing was said yet
    message: str = ""
    devices: list[Device] = []


class Scraped(msgspec.Struct):
    """What the last `Scrape` said, and when."""

    t: float
    values: dict[str, Value]
    window_s: float
    scrape_s: float
    restarts: int
    unknown: int
    by_engine: list[EngineRow]


class Capable(msgspec.Struct):
    """What the last `Capabilities` said."""

    kind: str = ""  # "": nothing was said, as by every engine of our own: all pictures are exact
    version: str = ""
    views: list[View] = []


class State(msgspec.Struct):
    schema: int = events.SCHEMA
    seq: int = 0
    t: float = 0.0
    step: int = 0  # of a foreign engine: reports heard, so that what changed last can be marked
    gaps: int = 0  # holes in `seq` since the start or the last snapshot
    epoch: str = ""  # "": nothing was heard yet
    source: str = ""
    evidence: str = ""
    wall_time: float = 0.0
    model: ModelInfo = msgspec.field(default_factory=lambda: ModelInfo(name=""))
    device: DeviceInfo = msgspec.field(default_factory=DeviceInfo)
    config: dict[str, Any] = {}
    block_size: int = 0
    num_blocks: int = 0
    fault: str = ""  # the last that was told
    fatal: bool = False  # it ended the engine
    requests: dict[int, Request] = {}  # live ones, and the last that finished
    running: list[int] = []  # in the batch, in order of admission
    ended: list[int] = []  # finished ones in `requests`, oldest first
    blocks: Blocks = msgspec.field(default_factory=Blocks)
    pool: Pool = msgspec.field(default_factory=Pool)
    totals: Totals = msgspec.field(default_factory=Totals)
    ttfts: list[tuple[float, float]] = []  # [end of the step, seconds]
    # [t, step_s, prefill_tokens, decode_tokens, used_blocks, cached_blocks, filled_slots, held_tokens, running,
    #  waiting, output_tokens, forward_s, weight_bytes, kv_read_bytes, flops]
    series: list[list[float]] = []
    devices: Telemetry = msgspec.field(default_factory=Telemetry)
    samples: list[list[Any]] = []  # [t, t0, index in devices, values, spans or None], as in `events.Sample`
    scrape: Scraped | None = None  # of a foreign engine
    capabilities: Capable = msgspec.field(default_factory=Capable)

    @property
    def in_flight(self) -> int:
        totals = self.totals
        return totals.queued - totals.finished - totals.aborted - totals.errors


def apply(state: State, event: Event) -> None:
    """Folds one event into `state`, in place.

    Raises NewerSchema for a `Hello` or `Snapshot` of a newer schema, msgspec.ValidationError for a malformed snapshot.
    """
    kind = type(event)
    if kind is events.Hello:
        _hello(state, event)
        return
    if kind is events.Snapshot:
        _snapshot(state, event)
        return
    if event.seq:
        if event.seq <= state.seq:
            return
        if event.seq != state.seq + 1:
            state.gaps += 1
        state.seq = event.seq
    state.t = max(
        state.t, event.t
    )  # a request counts as queued when it arrived, which may be before the last step ended
    fold = _FOLDS.get(kind)
    if fold is not None:
        fold(state, event)


def label(number: int) -> str:
    """A request's letters: 1 -> A, 26 -> Z, 27 -> AA."""
    letters = ""
    while number > 0:
        number, letter = divmod(number - 1, 26)
        letters = chr(65 + letter) + letters
    return letters


def pool_split(state: State) -> dict[str, float]:
    """The pool in blocks: filled + wasted + cached + free = total; `saved` would be needed on top without sharing."""
    pool, size = state.pool, state.block_size or 1
    return {
        "filled": pool.filled_slots / size,
        "wasted": pool.wasted_slots / size,
        "cached": pool.cached_blocks,
        "free": pool.free_blocks,
        "saved": pool.shared_saved_blocks,
        "total": state.num_blocks,
        "block_bytes": size * state.model.kv_bytes_per_token,
    }


def _replace(state: State, new: State) -> None:
    for name in State.__struct_fields__:
        setattr(state, name, getattr(new, name))


def _refuse_newer(schema: int) -> None:
    if schema > events.SCHEMA:
        raise NewerSchema(
            f"the source speaks event schema {schema}, this KVScope knows up to {events.SCHEMA}: update KVScope here"
        )


def _hello(state: State, event: events.Hello) -> None:
    _refuse_newer(event.schema)
    _replace(
        state,
        State(
            seq=event.seq,
            t=event.t,
            epoch=event.epoch,
            source=event.source,
            evidence=event.evidence,
            wall_time=event.wall_time,
            model=event.model,
            device=event.device,
            config=event.config,
            block_size=event.block_size,
            num_blocks=event.num_blocks,
            blocks=Blocks.free(event.num_blocks),
            pool=Pool(free_blocks=event.num_blocks),
        ),
    )


def _snapshot(state: State, event: events.Snapshot) -> None:
    _refuse_newer(event.schema)
    content = event.state
    if isinstance(content, State):  # from the same process: the two must not share lists
        new = msgspec.json.decode(msgspec.json.encode(content), type=State)
    else:
        new = msgspec.convert(content, State, str_keys=True)
    if any(len(column) != new.num_blocks for column in msgspec.structs.astuple(new.blocks)):
        raise msgspec.ValidationError(f"a snapshot of {new.num_blocks} blocks has block columns of another length")
    new.gaps = 0
    _replace(state, new)


def _configured(state: State, event: events.Configured) -> None:
    rebuilt = event.rebuilt or event.num_blocks != state.num_blocks or event.block_size != state.block_size
    if event.config:
        state.config = event.config
    state.block_size = event.block_size
    state.num_blocks = event.num_blocks
    if rebuilt:
        for request in state.requests.values():  # the engine is idle for this; but a "finished" may have been lost
            request.table = []
            if request.state != "finished":
                request.computed = 0
        state.blocks = Blocks.free(event.num_blocks)
        state.pool = Pool(free_blocks=event.num_blocks)


def _queued(state: State, event: events.Queued) -> None:
    if event.request in state.requests:
        return
    state.requests[event.request] = Request(
        request=event.request,
        id=event.id,
        user=event.user,
        prompt_tokens=event.prompt_tokens,
        max_tokens=event.max_tokens,
        t_queued=event.t,
        spans=[["queued", event.t, None]],
    )
    state.totals.queued += 1


def _step(state: State, event: events.Step) -> None:
    requests, totals, step, t = state.requests, state.totals, event.step, event.t
    computed_something = step != state.step  # else: nothing but preemptions, told under the number of the step before
    state.step = step
    totals.steps += computed_something
    begin = t - event.step_s
    for op in event.ops:
        _op(state, op, step, begin)
    if event.decode is None:  # all who decoded before this step and still do: no op makes anybody decode
        decode = [r for number in state.running if (r := requests[number]).state == "decode"]
    else:
        decode = [r for number in event.decode if (r := requests.get(number)) is not None]

    keeps = state.config.get("kv_cache", True)
    prefill_tokens = output_tokens = 0
    for number, tokens, context in event.prefill:
        request = requests.get(number)
        if request is None or request.state == "finished" or context < 0 or tokens < 0:
            continue
        prefill_tokens += tokens
        end = context + tokens
        again = min(end, request.reached) - context
        if again > 0:
            request.recomputed_tokens += again
            totals.recomputed_tokens += again
        kept = end if keeps else 0
        state.pool.held_tokens += kept - request.computed
        request.computed = kept
        _fill(state, request, context, end, step)
        if end >= request.prompt_tokens + request.output_tokens:
            output_tokens += 1
            _sampled_by_prefill(state, request, t)
    totals.computed_prefill_tokens += prefill_tokens

    decode_tokens = _decode(state, decode, step, t)
    output_tokens += decode_tokens
    totals.output_tokens += output_tokens
    _seal(state, event.sealed, step)
    _settle(state)
    if computed_something:
        _row(state, event, prefill_tokens, decode_tokens, output_tokens)


def _row(state: State, event: events.Step, prefill_tokens: int, decode_tokens: int, output_tokens: int) -> None:
    pool, series = state.pool, state.series
    series.append(
        [
            event.t,
            event.step_s,
            prefill_tokens,
            decode_tokens,
            pool.used_blocks,
            pool.cached_blocks,
            pool.filled_slots,
            pool.held_tokens,
            len(state.running),
            event.waiting,
            output_tokens,
            event.forward_s,
            event.weight_bytes,
            event.kv_read_bytes,
            event.flops,
        ]
    )
    if len(series) > KEPT_ROWS:
        del series[0]


def _decode(state: State, requests: list[Request], step: int, t: float) -> int:
    """One token more for each; how many there were. The hot loop of the fold: everything inline."""
    size = state.block_size or 1
    fill, changed = state.blocks.fill, state.blocks.changed
    decoded = filled = 0
    for request in requests:
        if request.state != "decode":
            if request.state == "finished":
                continue
            _enter(state, request, "decode", t)
        decoded += 1
        position = request.computed
        request.computed = position + 1
        request.output_tokens += 1
        request.t_last = t
        index = position // size
        table = request.table
        if index < len(table):
            block = table[index]
            slots = position - index * size + 1
            if fill[block] < slots:
                filled += slots - fill[block]
                fill[block] = slots
            changed[block] = step
    state.pool.filled_slots += filled
    state.pool.held_tokens += decoded
    return decoded


def _sampled_by_prefill(state: State, request: Request, t: float) -> None:
    """Its prefill reached all it knows: this step sampled its next token."""
    request.output_tokens += 1
    request.t_last = t
    if request.t_first is None:
        _first_token(state, request, t, t - request.t_queued)
    _enter(state, request, "decode", t)


def _first_token(state: State, request: Request, t: float, ttft_s: float) -> None:
    request.t_first, request.ttft_s = t, ttft_s
    state.ttfts.append((t, ttft_s))
    if len(state.ttfts) > KEPT_TTFTS:
        del state.ttfts[0]


def _op(state: State, op: list[str | int], step: int, begin: float) -> None:
    if len(op) < 2:
        return
    request = state.requests.get(op[1])
    if request is None or request.state == "finished":
        return
    kind = op[0]
    if kind == "alloc":
        _allocate(state, request, op[2:], step)
        # Blocks of a request that was swapped in: what it had computed is copied into them.
        _fill(state, request, (len(request.table) - len(op) + 2) * state.block_size, request.computed, step)
    elif kind == "admit":
        _admit(state, request, op[2:], step, begin)
    elif kind == "copy" and len(op) == 4:
        _copy(state, request, op[2], op[3], step)
    elif kind == "preempt":
        request.reached = max(request.reached, request.computed)
        _preempt(state, request, step, begin)
    elif kind == "swap_out":
        request.swapped = request.computed
        _preempt(state, request, step, begin)
    elif kind == "swap_in":
        _swap_in(state, request, op[2:], step, begin)


def _allocate(state: State, request: Request, new: list[str | int], step: int) -> None:
    """Fresh blocks at the end of its table. Long prompts take dozens in a step: everything inline."""
    blocks, pool = state.blocks, state.pool
    owners, sealed, changed, fill = blocks.owners, blocks.sealed, blocks.changed, blocks.fill
    count, alone, evicted = state.num_blocks, (request.request,), 0
    for block in new:
        if type(block) is not int or not 0 <= block < count:
            continue
        if owners[block]:
            _hold(state, request, block, step)
        else:
            if sealed[block]:
                sealed[block] = fill[block] = 0
                blocks.mark[block] = EVICTED
                blocks.marked[block] = step
                evicted += 1
            owners[block] = alone
            changed[block] = step
            pool.used_blocks += 1
            pool.filled_slots += fill[block]
        request.table.append(block)
    pool.cached_blocks -= evicted
    state.totals.evictions += evicted


def _known(state: State, block: str | int) -> bool:
    return type(block) is int and 0 <= block < state.num_blocks


def _admit(state: State, request: Request, blocks: list[str | int], step: int, begin: float) -> None:
    first = request.queue_s is None
    _release(state, request, step)
    for block in blocks:
        if _known(state, block):
            _hold(state, request, block, step)
            request.table.append(block)
    # One token is always left to compute, its logits are needed; a fork's last block is shared while partly filled.
    known = request.prompt_tokens + request.output_tokens
    found = max(0, min(len(request.table) * state.block_size, known - 1))
    request.computed = found
    state.pool.held_tokens += found
    _fill(state, request, 0, found, step)
    if first:
        request.queue_s = max(0.0, begin - request.t_queued)
        request.cached_tokens = found
        if state.config.get("prefix_cache", True):
            state.totals.lookup_tokens += request.prompt_tokens
            state.totals.cached_tokens += found
    _enter(state, request, "prefill", begin)


def _swap_in(state: State, request: Request, blocks: list[str | int], step: int, begin: float) -> None:
    _release(state, request, step)
    for block in blocks:
        if _known(state, block):
            _hold(state, request, block, step)
            request.table.append(block)
    request.computed, request.swapped = request.swapped, 0
    state.pool.held_tokens += request.computed
    _enter(state, request, "prefill", begin)


def _copy(state: State, request: Request, old: str | int, new: str | int, step: int) -> None:
    if old not in request.table or not _known(state, new):
        return
    index = len(request.table) - 1 - request.table[::-1].index(old)
    _evict(state, new, step)
    _hold(state, request, new, step)
    request.table[index] = new
    _drop(state, request, old, step)
    begin = index * state.block_size
    _fill(state, request, begin, min(request.computed, begin + state.block_size), step)


def _preempt(state: State, request: Request, step: int, begin: float) -> None:
    held = request.table
    _release(state, request, step)
    for block in held:
        if not state.blocks.owners[block]:
            state.blocks.mark[block] = PREEMPTED
            state.blocks.marked[block] = step
    request.preemptions += 1
    state.totals.preemptions += 1
    _leave(state, request)
    _turn(request, "preempted", begin)


def _finished(state: State, event: events.Finished) -> None:
    request = state.requests.get(event.request)
    if request is None or request.state == "finished":
        return
    _release(state, request, state.step)
    _settle(state)
    _leave(state, request)
    request.swapped = 0
    request.state = "finished"
    _close_span(request, event.t)
    request.reason = event.reason
    request.message = event.message
    request.t_end = event.t
    request.cached_tokens = event.cached_tokens
    request.output_tokens = event.output_tokens
    request.preemptions = event.preemptions
    request.recomputed_tokens = event.recomputed_tokens
    request.queue_s = event.queue_s
    request.ttft_s = event.ttft_s
    request.tpot_s = event.tpot_s
    request.e2e_s = event.e2e_s
    totals = state.totals
    if event.reason == "abort":
        totals.aborted += 1
    elif event.reason == "error":
        totals.errors += 1
    else:
        totals.finished += 1
    state.ended.append(event.request)
    if len(state.ended) > KEPT_FINISHED:
        state.requests.pop(state.ended.pop(0), None)


def _cleared(state: State, event: events.Cleared) -> None:
    blocks, step = state.blocks, state.step
    for block, sealed in enumerate(blocks.sealed):
        if sealed and not blocks.owners[block]:
            blocks.sealed[block] = 0
            blocks.fill[block] = 0
            blocks.changed[block] = step
    state.pool.cached_blocks = state.pool.resident_blocks = 0
    _settle(state)
    _gauge(state)


def _fault(state: State, event: events.Fault) -> None:
    if not state.fatal:
        state.fault, state.fatal = event.message, event.fatal


def _devices(state: State, event: events.Devices) -> None:
    """Rows of samples stay only while they still mean the same sensors of the same devices."""
    if _sensors(state.devices.devices) != _sensors(event.devices):
        state.samples = []
    state.devices = Telemetry(event.state, event.message, event.devices)


def _sensors(devices: list[Device]) -> list[list[str]]:
    return [[device.uuid, *(sensor.name for sensor in device.sensors)] for device in devices]


def _sample(state: State, event: events.Sample) -> None:
    devices = state.devices.devices
    if not 0 <= event.device < len(devices) or len(event.values) != len(devices[event.device].sensors):
        return
    state.samples.append([event.t, event.t0, event.device, event.values, event.spans])
    if len(state.samples) > KEPT_SAMPLES:
        del state.samples[0]


def _scrape(state: State, event: events.Scrape) -> None:
    """A foreign engine's gauges and counters. Totals grow by what its counters grew since the scrape before."""
    values, totals, window = event.values, state.totals, event.window_s
    state.step += 1
    state.scrape = Scraped(event.t, values, window, event.scrape_s, event.restarts, event.unknown, event.by_engine)
    said = _grown(values, "output_tokens_per_s", window)
    computed = "prompt_tokens_computed_per_s"
    if _number(values, computed) is None:
        computed = "prompt_tokens_per_s"
    prefilled = _grown(values, computed, window)
    totals.output_tokens += said
    totals.computed_prefill_tokens += prefilled
    totals.lookup_tokens += _grown(values, "prefix_queries_per_s", window)
    totals.cached_tokens += _grown(values, "prefix_hits_per_s", window)
    totals.preemptions = int(_number(values, "preemptions") or 0)
    _gauge(state)
    running, waiting = _number(values, "running"), _number(values, "waiting")
    if running is None and not said and not prefilled:
        return  # nothing that a strip could show
    pool = state.pool
    held = [pool.used_blocks, pool.cached_blocks, pool.filled_slots, pool.held_tokens]
    state.series.append(
        [event.t, window, prefilled, said, *held, int(running or 0), int(waiting or 0), said, 0.0, 0, 0, 0]
    )
    if len(state.series) > KEPT_ROWS:
        del state.series[0]


def _number(values: dict[str, Value], name: str) -> float | None:
    found = values.get(name)
    return found.value if found else None


def _grown(values: dict[str, Value], name: str, window_s: float) -> int:
    """What a counter grew in the window, from its rate. Rounds as JavaScript does."""
    return int((_number(values, name) or 0.0) * window_s + 0.5)


def _gauge(state: State) -> None:
    """The pool of an engine that tells only how many blocks are used, and which hashes are cached.

    Cached blocks may be used at the same time, and which are is not told. Counted as cached is what must be idle: all
    but the used ones, of which each running request has one that is not full yet and so has no hash. How full used
    blocks are is not told either: no slot counts as wasted.
    """
    used = _number(state.scrape.values, "used_blocks") if state.scrape else None
    if used is None:
        return
    pool = state.pool
    pool.used_blocks = max(0, min(int(used), state.num_blocks))
    running = int(_number(state.scrape.values, "running") or 0)
    idle = pool.resident_blocks - max(0, pool.used_blocks - running)
    pool.cached_blocks = max(0, min(idle, state.num_blocks - pool.used_blocks))
    pool.filled_slots = pool.used_blocks * state.block_size
    _settle(state)


def _capabilities(state: State, event: events.Capabilities) -> None:
    state.capabilities = Capable(event.kind, event.version, event.views)


def _resident(state: State, event: events.Resident) -> None:
    state.step += 1
    if event.cleared:
        _cleared(state, events.Cleared())
    sealed, pool = state.blocks.sealed, state.pool
    for cell in event.removed:
        if _known(state, cell) and sealed[cell]:
            _evict(state, cell, state.step)
            pool.resident_blocks = max(0, pool.resident_blocks - (1 - sealed[cell]))  # a step may have sealed it
    fresh = [cell for cell in dict.fromkeys(event.stored) if _known(state, cell) and not sealed[cell]]
    _seal(state, fresh, state.step)
    # A step may have evicted some that were counted: never more than there are.
    pool.resident_blocks = min(pool.resident_blocks + len(fresh), state.num_blocks)
    _settle(state)
    _gauge(state)


def _heard(state: State, event: events.Heard) -> None:
    for number, prompt_tokens, said, t_first in event.requests:
        request = state.requests.get(number)
        if request is None or request.state == "finished":
            continue
        if request.state == "queued":
            _enter(state, request, "prefill", event.t if t_first is None else t_first)
        request.prompt_tokens = prompt_tokens or request.prompt_tokens
        if t_first is not None and request.t_first is None:
            _first_token(state, request, t_first, max(0.0, t_first - request.t_queued))
            _enter(state, request, "decode", t_first)
        if said > request.output_tokens:
            request.output_tokens = said
            request.t_last = event.t
        # The last token it said is not computed yet, as in an engine of our own.
        known = request.prompt_tokens + request.output_tokens - 1 if request.output_tokens else 0
        state.pool.held_tokens += known - request.computed
        request.computed = known


def _enter(state: State, request: Request, phase: str, t: float) -> None:
    """Into the batch, or from one phase of it to the next."""
    if request.state not in ("prefill", "decode"):
        state.running.append(request.request)
    _turn(request, phase, t)


def _turn(request: Request, phase: str, t: float) -> None:
    if request.state == phase and request.spans:
        return
    request.state = phase
    _close_span(request, t)
    request.spans.append([phase, t, None])
    if len(request.spans) > KEPT_SPANS:
        del request.spans[0]


def _close_span(request: Request, t: float) -> None:
    if request.spans and request.spans[-1][2] is None:
        request.spans[-1][2] = max(t, request.spans[-1][1])


def _leave(state: State, request: Request) -> None:
    """Out of the batch, before its state is changed."""
    if request.state in ("prefill", "decode"):
        state.running.remove(request.request)


def _hold(state: State, request: Request, block: int, step: int) -> None:
    """One holder more for a block."""
    blocks, pool = state.blocks, state.pool
    owners = blocks.owners[block]
    if owners:
        pool.shared_saved_blocks += 1
    else:
        pool.used_blocks += 1
        pool.filled_slots += blocks.fill[block]
        pool.cached_blocks -= blocks.sealed[block]
    blocks.owners[block] = (*owners, request.request)
    blocks.changed[block] = step


def _drop(state: State, request: Request, block: int, step: int) -> None:
    """One holder less for a block; the last one leaves it cached when it is sealed, free when not."""
    blocks, pool = state.blocks, state.pool
    owners = list(blocks.owners[block])
    owners.remove(request.request)
    blocks.owners[block] = tuple(owners)
    blocks.changed[block] = step
    if owners:
        pool.shared_saved_blocks -= 1
        return
    pool.used_blocks -= 1
    pool.filled_slots -= blocks.fill[block]
    if blocks.sealed[block]:
        pool.cached_blocks += 1
    else:
        blocks.fill[block] = 0


def _release(state: State, request: Request, step: int) -> None:
    """All its blocks, tail first; nothing of it is computed any more. Long requests hold hundreds: inline as a rule."""
    blocks, pool = state.blocks, state.pool
    owners, sealed, changed, fill = blocks.owners, blocks.sealed, blocks.changed, blocks.fill
    alone, free, filled, cached = (request.request,), (), 0, 0
    for block in reversed(request.table):
        if owners[block] != alone:
            _drop(state, request, block, step)
            continue
        owners[block] = free
        changed[block] = step
        pool.used_blocks -= 1
        filled += fill[block]
        if sealed[block]:
            cached += 1
        else:
            fill[block] = 0
    pool.filled_slots -= filled
    pool.cached_blocks += cached
    request.table = []
    state.pool.held_tokens -= request.computed
    request.computed = 0


def _evict(state: State, block: int, step: int) -> None:
    """Makes room in a cached block; nothing to do for a free one."""
    blocks = state.blocks
    if blocks.sealed[block] and not blocks.owners[block]:
        blocks.sealed[block] = 0
        blocks.fill[block] = 0
        blocks.mark[block] = EVICTED
        blocks.marked[block] = step
        state.pool.cached_blocks -= 1
        state.totals.evictions += 1


def _fill(state: State, request: Request, begin: int, end: int, step: int) -> None:
    """Slots of its tokens begin … end - 1 have keys and values now. A written slot stays written while it is held."""
    size, table, fill, changed = state.block_size or 1, request.table, state.blocks.fill, state.blocks.changed
    for index in range(max(0, begin) // size, min(-(-end // size), len(table))):
        block = table[index]
        slots = min(size, end - index * size)
        if fill[block] < slots:
            state.pool.filled_slots += slots - fill[block]
            fill[block] = slots
            changed[block] = step


def _seal(state: State, full: list[int], step: int) -> None:
    blocks, pool, size = state.blocks, state.pool, state.block_size
    owners, sealed, changed, fill = blocks.owners, blocks.sealed, blocks.changed, blocks.fill
    count, filled, cached = state.num_blocks, 0, 0
    for block in full:
        if not 0 <= block < count or sealed[block]:
            continue
        sealed[block] = 1
        changed[block] = step
        if owners[block]:
            filled += size - fill[block]
        else:
            cached += 1
        fill[block] = size
    pool.filled_slots += filled
    pool.cached_blocks += cached


def _settle(state: State) -> None:
    pool = state.pool
    pool.free_blocks = state.num_blocks - pool.used_blocks - pool.cached_blocks
    pool.wasted_slots = pool.used_blocks * state.block_size - pool.filled_slots


_FOLDS = {
    events.Step: _step,
    events.Queued: _queued,
    events.Finished: _finished,
    events.Configured: _configured,
    events.Cleared: _cleared,
    events.Fault: _fault,
    events.Devices: _devices,
    events.Sample: _sample,
    events.Scrape: _scrape,
    events.Capabilities: _capabilities,
    events.Resident: _resident,
    events.Heard: _heard,
}
