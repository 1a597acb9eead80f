"""Steps and readings on one clock, against a plain count millisecond by millisecond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend import events
from backend.events import Device, Sensor
from backend.telemetry import join
from backend.telemetry.join import StepRow, window

PEAK = 1e12
DEVICE = Device(
    uuid="GPU-1",
    name="One",
    peak_bandwidth_bytes_per_s=PEAK,
    peak_source="theoretical",
    sensors=[
        Sensor(name="dram_bandwidth", unit="%", source="nvml_gpm", label="measured: NVML GPM", span_s=None),
        Sensor(name="energy", unit="J", source="nvml", label="measured: NVML counter", span_s=0.0),
        Sensor(name="power", unit="W", source="nvml_field", label="measured: NVML, at this moment", span_s=0.0),
        Sensor(name="clock_reasons", unit="bits", source="nvml", label="measured: NVML", span_s=0.0),
    ],
)
DRAM, ENERGY, POWER, REASONS = range(4)


def step(t0: float, t1: float, phase: str = "decode", tokens: int = 1, moved: int = 0) -> StepRow:
    return StepRow(t0, t1, phase, tokens, 0.0, 0.0, moved, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def sample(t: float, t0: float, *, device: int = 0, spans=None, **values: float) -> list:
    """`values` by sensor name; the others were not asked."""
    return [t, t0, device, [values.get(sensor.name) for sensor in DEVICE.sensors], spans]


def without(name: str, note: str) -> Device:
    sensors = [Sensor(name=s.name, note=note) if s.name == name else s for s in DEVICE.sensors]
    return Device(uuid="GPU-1", name="One", peak_bandwidth_bytes_per_s=PEAK, peak_source="theoretical", sensors=sensors)


@st.composite
def stories(draw):
    """Steps with pauses between them, readings in a row, both in whole milliseconds, and a window."""
    steps, t = [], draw(st.integers(0, 50))
    for _ in range(draw(st.integers(1, 25))):
        length = draw(st.integers(1, 90))
        phase = draw(st.sampled_from(join.PHASES))
        steps.append(step(t / 1e3, (t + length) / 1e3, phase, draw(st.integers(1, 9)), draw(st.integers(1, 10**9))))
        t += length + draw(st.sampled_from([0, 0, 0, 7, 60]))
    samples, at, joules = [], draw(st.integers(0, 200)), 0
    for _ in range(draw(st.integers(1, 15))):
        later = at + draw(st.integers(20, 300))
        joules += draw(st.integers(1, 50))
        values = {
            "dram_bandwidth": draw(st.integers(1, 100)),
            "energy": joules,
            "clock_reasons": draw(st.integers(0, 8)),
        }
        samples.append(sample(later / 1e3, at / 1e3, **values))
        at = later
    begin = draw(st.integers(0, t))
    return steps, samples, begin, begin + draw(st.integers(1, 1500))


@settings(max_examples=120, deadline=None)
@given(stories())
def test_it_agrees_with_a_plain_count(story):
    steps, samples, begin, end = story
    found = window(steps, samples, begin / 1e3, end / 1e3, DEVICE)
    at = {}  # millisecond -> (phase, bytes in it)
    for row in steps:
        first, last = round(row.t0 * 1e3), round(row.t1 * 1e3)
        at |= {ms: (row.phase, row.bytes / (last - first)) for ms in range(first, last) if begin <= ms < end}
    spans = [range(max(round(s[1] * 1e3), begin), min(round(s[0] * 1e3), end)) for s in samples]
    assert set(found.phases) == {phase for phase, _ in at.values()}
    for phase, told in found.phases.items():
        mine = [ms for ms, (who, _) in at.items() if who == phase]
        assert told.seconds == pytest.approx(len(mine) / 1e3)
        assert told.computed == pytest.approx(sum(at[ms][1] for ms in mine) / (len(mine) / 1e3))
        weights = [sum(at.get(ms, ("",))[0] == phase for ms in span) for span in spans]
        covered = sum(weights)
        if not covered or covered < join.LEAST_COVERED * len(mine) - 1e-9:
            assert told.measured.value is None and told.measured.reason and told.ratio.value is None
        elif covered > join.LEAST_COVERED * len(mine) + 1e-9:
            percent = sum(w * s[3][DRAM] for w, s in zip(weights, samples, strict=True)) / covered
            rates = [sum(at.get(ms, ("", 0))[1] for ms in span) / (len(span) / 1e3) if span else 0 for span in spans]
            computed = sum(w * rate for w, rate in zip(weights, rates, strict=True)) / covered
            assert told.measured.value == pytest.approx(percent / 100 * PEAK)
            assert told.computed_over_readings == pytest.approx(computed)
            assert told.ratio.value == pytest.approx(told.measured.value / computed)
        if covered:
            capped = sum(w for w, s in zip(weights, samples, strict=True) if s[3][REASONS] & 4)
            assert told.power_capped.value == pytest.approx(capped / covered)
        else:
            assert told.power_capped.value is None and told.power_capped.reason


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=12, max_size=30), st.integers(1, 9))
def test_the_energies_of_adjacent_windows_are_the_energy_of_the_whole(joules, cut):
    """One phase all the time, so joules a token times tokens is the energy; a window of each tells its own."""
    total, samples = 0, []
    for i, more in enumerate(joules):
        total += more
        samples.append(sample(0.5 * (i + 1), 0.5 * i, energy=total))
    end = 0.5 * len(joules)
    steps = [step(0.05 * i, 0.05 * (i + 1), tokens=3) for i in range(round(end / 0.05))]
    middle = 0.5 + round((end - 0.5) * cut / 10 / 0.05) * 0.05
    whole, first, second = (
        window(steps, samples, a, b, DEVICE).phases["decode"] for a, b in ((0.5, end), (0.5, middle), (middle, end))
    )
    assert whole.joules_per_token.value * whole.tokens == pytest.approx(total - joules[0])
    if first.joules_per_token.value is not None and second.joules_per_token.value is not None:
        parts = sum(part.joules_per_token.value * part.tokens for part in (first, second))
        assert parts == pytest.approx(total - joules[0])
    for part in (first, second):
        if part.joules_per_token.value is None:
            assert "too short" in part.joules_per_token.reason


def steady(seconds: float = 4.0, **values) -> tuple[list, list]:
    """Decode all the time, 50 steps a second with 1 GB each; a reading every 0.2 s."""
    steps = [step(i / 50, (i + 1) / 50, moved=10**9) for i in range(round(seconds * 50))]
    samples = [
        sample((i + 1) / 5, i / 5, **{k: v(i) if callable(v) else v for k, v in values.items()}) for i in range(20)
    ]
    return steps, samples


def test_measured_and_computed_stand_side_by_side():
    told = window(*steady(dram_bandwidth=6.0), 1.0, 3.0, DEVICE).phases["decode"]
    assert told.computed == pytest.approx(50e9)
    assert told.measured.value == pytest.approx(60e9)
    assert told.ratio.value == pytest.approx(1.2)
    assert "theoretical" in told.measured.label and "GPM" in told.measured.label


def test_joules_a_token_from_the_counter_with_its_error():
    told = window(*steady(energy=lambda i: 100.0 * i), 1.0, 3.0, DEVICE).phases["decode"]
    assert told.joules_per_token.value == pytest.approx(10.0)  # 500 W, 50 tokens/s
    assert told.joules_per_token.error == pytest.approx(0.0, abs=1e-6)
    assert told.joules_per_token.label == "measured: NVML counter"


def test_phases_that_take_turns_faster_than_the_counter_blur_each_other():
    steps, samples = steady(energy=lambda i: 100.0 * i)
    steps = [row._replace(phase="prefill" if i % 2 else "decode") for i, row in enumerate(steps)]
    told = window(steps, samples, 0.5, 3.5, DEVICE).phases
    for phase in ("prefill", "decode"):
        assert told[phase].joules_per_token.error == pytest.approx(told[phase].joules_per_token.value, rel=0.2)


def test_without_a_counter_power_is_integrated_and_called_so():
    steps, samples = steady(power=lambda i: 300.0)
    told = window(steps, samples, 1.0, 3.0, without("energy", "no counter")).phases["decode"]
    assert told.joules_per_token.value == pytest.approx(6.0)
    assert told.joules_per_token.label.startswith("integrated from power")


@pytest.mark.parametrize(
    ("values", "t1", "words"),
    [
        ({"energy": lambda i: 100.0 * i}, 1.8, "too short: 0.8 s"),
        ({"energy": lambda i: 100.0 * (i // 8)}, 3.0, "moved 1 times"),
        ({"energy": lambda i: 100.0 * (i % 9)}, 3.0, "began anew"),
        ({"energy": lambda i: None}, 3.0, "nothing was read"),
    ],
)
def test_joules_a_token_are_refused_when_they_would_be_wrong(values, t1, words):
    told = window(*steady(**values), 1.0, t1, DEVICE).phases["decode"]
    assert told.joules_per_token.value is None and words in told.joules_per_token.reason


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (None, "no hardware is read"),
        (without("dram_bandwidth", "needs Hopper or newer"), "needs Hopper or newer"),
        (Device(uuid="GPU-1", sensors=DEVICE.sensors), "peak of this device is not known"),
        (Device(uuid="host", name="Box"), "Box has no reading of this kind"),
    ],
)
def test_a_missing_reading_has_a_reason_and_no_number(device, words):
    told = window(*steady(dram_bandwidth=6.0), 1.0, 3.0, device).phases["decode"]
    assert (told.measured.value, told.ratio.value) == (None, None)
    assert words in told.measured.reason and words in told.ratio.reason
    assert told.computed == pytest.approx(50e9)  # that is always there


def test_counters_that_say_0_while_the_engine_works_are_not_believed():
    told = window(*steady(dram_bandwidth=0.0), 1.0, 3.0, DEVICE).phases["decode"]
    assert told.measured.value is None and "not to be trusted" in told.measured.reason


def test_readings_of_another_device_do_not_count():
    steps, samples = steady(dram_bandwidth=6.0)
    told = window(steps, [[*s[:2], 1, *s[3:]] for s in samples], 1.0, 3.0, DEVICE).phases["decode"]
    assert "nothing was read" in told.measured.reason


def test_a_reading_that_speaks_for_longer_than_its_sample_counts_for_that_time():
    steps = [step(i / 50, (i + 1) / 50, moved=10**9) for i in range(100)]
    samples = [sample(2.0, 1.8, spans=[2.0, None, None, None], dram_bandwidth=5.0)]
    told = window(steps, samples, 0.0, 2.0, DEVICE).phases["decode"]
    assert told.ratio.value == pytest.approx(1.0)
    samples[0][4] = None
    assert window(steps, samples, 0.0, 2.0, DEVICE).phases["decode"].measured.value is None  # speaks for a tenth only


def test_a_step_becomes_a_row():
    told = events.Step(
        step=1, t=2.0, step_s=0.5, prefill=[(1, 30, 0)], flops=9.0, attention_flops=2.0, weight_bytes=7,
        kv_read_bytes=5, kv_write_bytes=3400, activation_bytes=1, forward_s=0.4, attention_s=0.1,
    )  # fmt: skip
    row = join.row(told, 100)
    assert (row.t0, row.t1, row.phase, row.tokens, row.bytes) == (1.5, 2.0, "mixed", 34, 3413)
    told.kv_write_bytes = 3000
    assert join.row(told, 100).phase == "prefill"
    told.prefill = []
    assert join.row(told, 100).phase == "decode"
