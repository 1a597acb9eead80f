"""Hardware readings as functions of time: which times a value speaks for, and how energy grows. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from backend.events import Device

LONGEST_GAP_S = 2.5  # between two readings of one time; readings further than this from a window are not looked at
SampleRow = Sequence  # [t, t0, device, values, spans or None], as `fold.State.samples` keeps them


@dataclass(slots=True)
class Interval:
    t0: float
    t1: float
    value: float


@dataclass(slots=True)
class Energy:
    """Joules as they were counted, or as power integrated. Between two readings they count as spent evenly."""

    label: str
    reason: str = ""
    times: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)


def of_sensor(device: Device | None, samples: Sequence[SampleRow], name: str) -> tuple[list[Interval], str]:
    """The values of one sensor with the times they speak for, or why there are none."""
    if device is None:
        return [], "no hardware is read"
    column = next((i for i, sensor in enumerate(device.sensors) if sensor.name == name), None)
    if column is None:
        return [], f"{device.name or device.uuid} has no reading of this kind"
    sensor = device.sensors[column]
    if sensor.note:
        return [], sensor.note
    found = []
    for t, since, _, values, *rest in samples:
        value = values[column] if column < len(values) else None
        if value is None:
            continue
        own = rest[0][column] if rest and rest[0] else None
        span = own if own is not None else sensor.span_s or t - since
        if span > 0:
            found.append(Interval(t - span, t, value))
    return found, "" if found else "nothing was read yet"


def bandwidth(device: Device | None, samples: Sequence[SampleRow]) -> tuple[list[Interval], str]:
    """In bytes/s: the counters' percent of the peak."""
    found, why_not = of_sensor(device, samples, "dram_bandwidth")
    if why_not:
        return [], why_not
    if next(sensor.source for sensor in device.sensors if sensor.name == "dram_bandwidth") == "dcgm":
        return [], "a DCGM exporter collects too seldom to be set beside phases"
    if not device.peak_bandwidth_bytes_per_s:
        return [], "the counters give a share of the peak, and the peak of this device is not known"
    scale = device.peak_bandwidth_bytes_per_s / 100
    return [Interval(i.t0, i.t1, i.value * scale) for i in found], ""


def energy(device: Device | None, samples: Sequence[SampleRow]) -> Energy:
    """The device's counter; else its power, integrated."""
    counted, why_not = of_sensor(device, samples, "energy")
    if not why_not:
        found = Energy(sensor_label(device, "energy"), times=[i.t1 for i in counted], joules=[i.value for i in counted])
        if any(b < a for a, b in pairwise(found.joules)):
            found.reason = "the energy counter began anew in this time"
    else:
        powers, why_no_power = of_sensor(device, samples, "power")
        if why_no_power:
            return Energy("", reason=why_not)
        found = Energy(f"integrated from power ({sensor_label(device, 'power')})")
        for before, now in pairwise(powers):
            if now.t1 - before.t1 > LONGEST_GAP_S:
                found.reason = f"power was not read for {now.t1 - before.t1:.0f} s in this time"
            if not found.times:
                found.times, found.joules = [before.t1], [0.0]
            found.joules.append(found.joules[-1] + (before.value + now.value) / 2 * (now.t1 - before.t1))
            found.times.append(now.t1)
    if not found.reason and len(found.times) < 2:
        found.reason = "window too short: the energy was read once"
    return found


def sensor_label(device: Device, name: str) -> str:
    return next((sensor.label for sensor in device.sensors if sensor.name == name), "")
