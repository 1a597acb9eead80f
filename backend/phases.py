"""What limits each phase: a fold of whole `Step` events into what the phases page draws. Pure Python, UI process.

A step is prefill, decode, or both (mixed). Each becomes a point of the roofline: FLOPs ÷ bytes and FLOPs ÷ seconds,
with bytes and FLOPs as the engine counted them and seconds as it measured them. Nothing is computed until it is asked
for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from backend import events, fold
from backend.hub import Hub
from backend.telemetry import join
from backend.telemetry.join import PHASES, StepRow, Window
from backend.telemetry.verdict import Verdict, verdict

INTERVAL_S = 0.25  # between two messages: 4 a second
TRAIL_S = 30.0  # how far back the points go
TRAIL_STEP_S = 0.5  # steps of one phase in this time are one point
WINDOW_S = 20.0  # over which readings of sensors are held against steps
WINDOW_EVERY_S = 1.0
KEPT_ROWS = 4096
NEWEST = 32  # steps of a phase that its summary is about
BACKLOG = 4000  # lines that are read when somebody asks for the first time
PARTS = ("schedule", "build", "attention", "linear", "sample", "output", "unattributed")


class Summary(msgspec.Struct, kw_only=True):
    """The newest steps of one phase, summed. Seconds are measured, FLOPs and bytes counted."""

    steps: int
    seconds: float
    tokens: int
    batch: float  # of decode: tokens of a step, one a sequence, mean; 0 for other phases
    context: float  # of decode: tokens that a sequence attends, mean; 0 for other phases
    flops: float
    attention_flops: float
    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    activation_bytes: int
    parts: dict[str, float]  # seconds by what they went into; without a measurement of attention it is part of linear
    attention_measured: bool
    rate_low: float  # FLOP/s, a tenth of the steps is below
    rate_high: float  # and a tenth above
    verdict: Verdict | None = None  # None: no ceilings are known


class Estimate(msgspec.Struct, kw_only=True):
    """What an attached engine estimates of itself between its last two scrapes: all its steps together, and the time
    between them too."""

    t: float
    flop_per_byte: float
    flops_per_s: float  # of one accelerator
    bytes_per_s: float  # read and written
    series: list[str]  # what it was read from
    window_s: float


class Message(msgspec.Struct, tag="phases", tag_field="type", kw_only=True):
    """To the browser, at most every INTERVAL_S, while somebody asks."""

    epoch: str
    t: float
    trail: list[tuple[float, str, float, float]]  # [t, phase, FLOP/byte, FLOP/s], oldest first
    phases: dict[str, Summary]
    chunk: tuple[int, int] | None = None  # (tokens, context before) of the largest of the newest chunks of prompts
    roofs: dict[str, Any] = {}  # as `sources.roofs` has them
    window: Window | None = None  # what sensors say of the last seconds
    estimate: Estimate | None = None  # of an attached engine whose steps are not known


_decode = msgspec.json.Decoder(events.Step).decode
_decode_scrape = msgspec.json.Decoder(events.Scrape).decode
_encode = msgspec.json.Encoder().encode
_STEP, _SCRAPE = b'{"type":"step"', b'{"type":"scrape"'
ESTIMATED = "estimated"  # in the trail: no phase


class Phases:
    """`message()` from any thread. `roofs`: what is known of the ceilings in an epoch, at no cost (`sources.roofs`)."""

    def __init__(self, hub: Hub, roofs: Callable[[str], dict[str, Any]] = lambda epoch: {}):
        self._hub, self._roofs = hub, roofs
        self._lock = threading.Lock()
        self._rows: deque[StepRow] = deque(maxlen=KEPT_ROWS)
        self._chunks: deque[tuple[int, int]] = deque(maxlen=NEWEST)
        self._estimates: deque[Estimate] = deque(maxlen=KEPT_ROWS)
        self._epoch, self._seq = "", 0
        self._said, self._not_before = "", 0.0
        self._window: Window | None = None
        self._window_due = 0.0

    def message(self) -> str:
        """The newest message as JSON; the same string while there is nothing new or the last is younger than 1/4 s."""
        with self._lock:
            now = time.monotonic()
            if now >= self._not_before:
                self._not_before = now + INTERVAL_S
                self._said = self._make(now)
            return self._said

    def _make(self, now: float) -> str:
        epoch, t, kv_bytes, device, samples, lines = self._hub.read(self._take)
        for line in lines:
            if line.startswith(_STEP):
                step = _decode(line)
                row = join.row(step, kv_bytes)
                if row.flops and row.t1 > row.t0:  # else it only moved blocks
                    self._rows.append(row)
                if step.prefill:
                    self._chunks += [chunk[1:] for chunk in step.prefill]
            elif line.startswith(_SCRAPE) and (found := estimate(_decode_scrape(line))):
                self._estimates.append(found)
        if now >= self._window_due:
            self._window_due = now + WINDOW_EVERY_S
            index, device = device
            recent = list(_newest(self._rows, t - WINDOW_S))
            self._window = join.window(recent, samples, t - WINDOW_S, t, device, index) if recent else None
        said = message(epoch, t, self._rows, self._roofs(epoch), kv_bytes)
        said.chunk, said.window = max(self._chunks, default=None), self._window
        recent = [found for found in self._estimates if found.t > t - TRAIL_S]
        said.trail += [(found.t, ESTIMATED, found.flop_per_byte, found.flops_per_s) for found in recent]
        said.estimate = recent[-1] if recent else None
        return _encode(said).decode()

    def _take(self, state: fold.State) -> tuple:
        """Under the hub's lock: what came since the last time, and copies of what else is needed."""
        if state.epoch != self._epoch or state.seq < self._seq:
            self._rows.clear()
            self._estimates.clear()
            self._epoch, self._seq = state.epoch, state.seq - BACKLOG
            self._chunks.clear()
            self._window = None
        lines = self._hub.lines_since(max(self._seq, self._hub.before))
        self._seq = state.seq
        device = computing_device(state)
        return state.epoch, state.t, state.model.kv_bytes_per_token, device, list(state.samples), lines or []


def estimate(scrape: events.Scrape) -> Estimate | None:
    """None when the engine does not estimate, or nothing ran."""
    found = [scrape.values.get(name) for name in ("flops_per_s", "read_bytes_per_s", "write_bytes_per_s")]
    flops, read, written = ((value.value or 0.0) if value else 0.0 for value in found)
    if not flops or not read + written or not scrape.window_s:
        return None
    moved = read + written
    return Estimate(
        t=scrape.t,
        flop_per_byte=float(f"{flops / moved:.4g}"),
        flops_per_s=float(f"{flops:.4g}"),
        bytes_per_s=float(f"{moved:.4g}"),
        series=[value.name for value in found if value and value.name],
        window_s=scrape.window_s,
    )


def computing_device(state: fold.State) -> tuple[int, events.Device | None]:
    """(its index, the device that the engine computes on), as far as it is told."""
    told = enumerate(state.devices.devices)
    return next(((i, device) for i, device in told if device.used), (-1, None))


def message(epoch: str, t: float, rows: Sequence[StepRow], roofs: dict[str, Any], kv_bytes_per_token: int) -> Message:
    """`rows`: oldest first. `roofs`: {"ceilings": {…}, …}, as the engine told them."""
    of_phase: dict[str, list[StepRow]] = {phase: [] for phase in PHASES}
    for row in reversed(rows):
        if len(newest := of_phase[row.phase]) < NEWEST:
            newest.append(row)
        elif t - row.t1 > TRAIL_S:
            break
    ceilings = roofs.get("ceilings")
    return Message(
        epoch=epoch,
        t=t,
        trail=trail(_newest(rows, t - TRAIL_S)),
        phases={p: summary(found, ceilings, kv_bytes_per_token) for p, found in of_phase.items() if found},
        roofs=roofs,
    )


def summary(rows: Sequence[StepRow], ceilings: dict[str, Any] | None, kv_bytes_per_token: int) -> Summary:
    """`rows`: at least one, all of one phase."""

    def total(name: str) -> Any:
        return sum(getattr(row, name) for row in rows)

    count, tokens, seconds = len(rows), total("tokens"), sum(row.t1 - row.t0 for row in rows)
    decoding = rows[0].phase == "decode" and tokens
    attention_s = total("attention_s")
    parts = {name: total(f"{name}_s") for name in ("schedule", "build", "sample", "output")}
    parts |= {"attention": attention_s, "linear": max(0.0, total("forward_s") - attention_s)}
    parts["unattributed"] = max(0.0, seconds - sum(parts.values()))
    rates = sorted(row.flops / (row.t1 - row.t0) for row in rows if row.t1 > row.t0) or [0.0]
    tenth = (len(rates) - 1) // 10
    found = Summary(
        steps=count,
        seconds=seconds,
        tokens=tokens,
        batch=tokens / count if decoding else 0.0,
        context=total("kv_read_bytes") / kv_bytes_per_token / tokens if decoding and kv_bytes_per_token else 0.0,
        flops=total("flops"),
        attention_flops=total("attention_flops"),
        weight_bytes=total("weight_bytes"),
        kv_read_bytes=total("kv_read_bytes"),
        kv_write_bytes=total("kv_write_bytes"),
        activation_bytes=total("activation_bytes"),
        parts={name: parts[name] for name in PARTS},
        attention_measured=attention_s > 0,
        rate_low=rates[tenth],
        rate_high=rates[-1 - tenth],
    )
    if ceilings and seconds and found.flops:
        found.verdict = verdict(found.flops, sum(row.bytes for row in rows), seconds, ceilings)
    return found


def trail(rows: Iterable[StepRow]) -> list[tuple[float, str, float, float]]:
    """One point for each phase and TRAIL_STEP_S, oldest first: sums, so that a slow step weighs what it took."""
    sums: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        at = sums.setdefault((int(row.t1 / TRAIL_STEP_S), row.phase), [0.0] * 4)
        at[0] = row.t1
        for i, value in enumerate((row.flops, row.bytes, row.t1 - row.t0), 1):
            at[i] += value
    return [
        (round(t, 3), phase, float(f"{flops / moved:.4g}"), float(f"{flops / seconds:.4g}"))
        for (_, phase), (t, flops, moved, seconds) in sums.items()
        if moved and seconds and flops
    ]


def _newest(rows: Sequence[StepRow], since: float) -> list[StepRow]:
    """Rows that ended after `since`, oldest first."""
    count = 0
    for row in reversed(rows):
        if row.t1 <= since:
            break
        count += 1
    return list(islice(rows, len(rows) - count, None))
