"""Engine steps and hardware readings on one clock: what the chip says while a phase runs.

Steps are short (10 to 40 ms), readings are averages over longer times, so a reading is never put to one step. Over a
window each reading counts for a phase with the time that it overlaps the phase's steps. Pure Python, no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from backend.events import Device, Step
from backend.telemetry import intervals
from backend.telemetry.intervals import LONGEST_GAP_S, Energy, Interval, SampleRow, sensor_label
from backend.telemetry.readings import POWER_CAPPED

LEAST_WINDOW_S, LEAST_UPDATES = 1.0, 5  # of an energy counter, for joules a token
LEAST_COVERED = 0.5  # of a phase's time that readings must speak for
PHASES = ("prefill", "decode", "mixed")


class StepRow(NamedTuple):
    """One step, on the engine's clock. `tokens`: computed ones, of prompts and of answers."""

    t0: float
    t1: float
    phase: str  # prefill | decode | mixed
    tokens: int
    flops: float
    attention_flops: float
    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    activation_bytes: int
    forward_s: float
    attention_s: float
    schedule_s: float
    build_s: float
    sample_s: float
    output_s: float

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes


def row(step: Step, kv_bytes_per_token: int) -> StepRow:
    """Every token that a step computes writes its keys and values once: that counts the ones that decode too."""
    prefill = sum(tokens for _, tokens, _ in step.prefill)
    tokens = step.kv_write_bytes // kv_bytes_per_token if kv_bytes_per_token else prefill
    phase = "decode" if not prefill else "mixed" if tokens > prefill else "prefill"
    return StepRow(
        step.t - step.step_s, step.t, phase, tokens, step.flops, step.attention_flops, step.weight_bytes,
        step.kv_read_bytes, step.kv_write_bytes, step.activation_bytes, step.forward_s, step.attention_s,
        step.schedule_s, step.build_s, step.sample_s, step.output_s,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """A number, or why there is none. `label`: what it may be called. `error`: how far it may be off, if known."""

    value: float | None = None
    reason: str = ""
    label: str = ""
    error: float | None = None


@dataclass(frozen=True, slots=True)
class PhaseWindow:
    """One phase in a window. Bandwidths in bytes/s."""

    steps: int
    seconds: float  # of its steps, within the window
    tokens: float
    computed: float  # bytes the model must move / step time
    measured: Value  # DRAM bandwidth by the counters, mean over the time of the steps
    computed_over_readings: float | None  # computed over the same times as `measured`: what it may be compared with
    ratio: Value  # measured / computed_over_readings
    joules_per_token: Value
    power_capped: Value  # share of time that the clocks were held down by power


@dataclass(frozen=True, slots=True)
class Window:
    t0: float
    t1: float
    phases: dict[str, PhaseWindow]


def window(
    rows: Sequence[StepRow],
    samples: Sequence[SampleRow],
    t0: float,
    t1: float,
    device: Device | None = None,
    index: int = 0,
) -> Window:
    """What steps and readings say of [t0, t1]; both oldest first. `device` computes, and `samples` call it `index`.

    Steps that reach over the window's ends count with the part inside.
    """
    inside = [r for r in rows if r.t1 > t0 and r.t0 < t1]
    early, late = t0 - LONGEST_GAP_S, t1 + LONGEST_GAP_S
    mine = [s for s in samples if s[2] == index and early <= s[0] and s[1] <= late] if device else []
    bandwidth, reasons = intervals.bandwidth(device, mine), intervals.of_sensor(device, mine, "clock_reasons")
    chip = _Chip(device, bandwidth, reasons, intervals.energy(device, mine))
    steps = _Steps(inside, t0, t1)
    phases = {}
    for phase in PHASES:
        own = _Steps([r for r in inside if r.phase == phase], t0, t1)
        if own.rows:
            phases[phase] = _phase(own, steps, chip)
    return Window(t0, t1, phases)


class _Chip(NamedTuple):
    """What was read of the device. Of the pairs, the second says why the first is empty."""

    device: Device | None
    bandwidth: tuple[list[Interval], str]
    clock_reasons: tuple[list[Interval], str]
    energy: Energy


class _Steps:
    """Steps one after another, clipped to a window; their seconds and bytes as functions of time."""

    def __init__(self, rows: Sequence[StepRow], t0: float, t1: float):
        self.rows, self.t0, self.t1 = rows, t0, t1
        self._begins = [max(r.t0, t0) for r in rows]
        self._ends = [min(r.t1, t1) for r in rows]
        lengths = [end - begin for begin, end in zip(self._begins, self._ends, strict=True)]
        self.shares = [
            length / (r.t1 - r.t0) if r.t1 > r.t0 else 1.0 for length, r in zip(lengths, rows, strict=True)
        ]  # of each step, inside the window
        self._seconds = [0.0, *accumulate(lengths)]
        self._bytes = [0.0, *accumulate(r.bytes * share for r, share in zip(rows, self.shares, strict=True))]

    @property
    def seconds(self) -> float:
        return self._seconds[-1]

    @property
    def bytes(self) -> float:
        return self._bytes[-1]

    def seconds_in(self, t0: float, t1: float) -> float:
        return self._until(self._seconds, t1) - self._until(self._seconds, t0)

    def bytes_in(self, t0: float, t1: float) -> float:
        return self._until(self._bytes, t1) - self._until(self._bytes, t0)

    def _until(self, totals: list[float], t: float) -> float:
        i = bisect_right(self._begins, t) - 1  # the step that runs at t, or the last before
        if i < 0:
            return 0.0
        begin, end = self._begins[i], self._ends[i]
        if t >= end:
            return totals[i + 1]
        return totals[i] + (totals[i + 1] - totals[i]) * (t - begin) / (end - begin)


def _phase(own: _Steps, steps: _Steps, chip: _Chip) -> PhaseWindow:
    tokens = sum(r.tokens * share for r, share in zip(own.rows, own.shares, strict=True))
    measured, computed, ratio = _compare(own, steps, chip)
    return PhaseWindow(
        steps=len(own.rows),
        seconds=own.seconds,
        tokens=tokens,
        computed=own.bytes / own.seconds if own.seconds else 0.0,
        measured=measured,
        computed_over_readings=computed,
        ratio=ratio,
        joules_per_token=_joules(own, tokens, chip.energy),
        power_capped=_capped(own, *chip.clock_reasons),
    )


def _compare(own: _Steps, steps: _Steps, chip: _Chip) -> tuple[Value, float | None, Value]:
    """(measured, computed over the same readings, ratio). A reading weighs the time it shares with the phase's steps;
    against it stand the bytes of all steps in its time, so that neither pauses nor the other phase spoil the ratio."""
    readings, why_not = chip.bandwidth
    if why_not:
        return Value(reason=why_not), None, Value(reason=why_not)
    weights = measured = computed = 0.0
    for reading in readings:
        weight = own.seconds_in(reading.t0, reading.t1)
        if weight > 0:
            inside = max(reading.t0, own.t0), min(reading.t1, own.t1)
            weights += weight
            measured += weight * reading.value
            computed += weight * steps.bytes_in(*inside) / (inside[1] - inside[0])
    if not weights or weights < LEAST_COVERED * own.seconds:
        reason = "no reading of the counters covers these steps (yet)"
        return Value(reason=reason), None, Value(reason=reason)
    measured, computed = measured / weights, computed / weights
    if not measured and computed:
        reason = "the counters say 0 while the engine worked: they are not to be trusted"
        return Value(reason=reason), computed, Value(reason=reason)
    label = f"{sensor_label(chip.device, 'dram_bandwidth')} × peak ({chip.device.peak_source})"
    return Value(measured, label=label), computed, Value(measured / computed, label="measured / computed")


def _joules(own: _Steps, tokens: float, energy: Energy) -> Value:
    """A reading's energy goes to the phase by the share of its time. What other steps or a pause had the rest of is
    the error: who drew how much in that time is not known."""
    if energy.reason:
        return Value(reason=energy.reason)
    seconds = joules = blur = 0.0
    updates = 0
    for (t0, before), (t1, now) in pairwise(zip(energy.times, energy.joules, strict=True)):
        mine = own.seconds_in(t0, t1)
        if mine > 0:
            share = mine / (t1 - t0)
            seconds += mine
            updates += now != before
            joules += (now - before) * share
            blur += (now - before) * min(share, max(0.0, 1 - share))
    if seconds < LEAST_WINDOW_S:
        return Value(reason=f"window too short: {seconds:.1f} s of this phase, {LEAST_WINDOW_S:g} s are needed")
    if updates < LEAST_UPDATES:
        return Value(reason=f"window too short: the energy reading moved {updates} times, {LEAST_UPDATES} are needed")
    counted = tokens * seconds / own.seconds
    if not counted:
        return Value(reason="no tokens")
    return Value(joules / counted, label=energy.label, error=blur / counted)


def _capped(own: _Steps, readings: list[Interval], why_not: str) -> Value:
    if why_not:
        return Value(reason=why_not)
    weights = capped = 0.0
    for reading in readings:
        weight = own.seconds_in(reading.t0, reading.t1)
        weights += weight
        capped += weight * bool(int(reading.value) & POWER_CAPPED)
    if not weights:
        return Value(reason="no reading of the clocks covers these steps (yet)")
    return Value(capped / weights, label="share of time, NVML's reasons for the clocks")
