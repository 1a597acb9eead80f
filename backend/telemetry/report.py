"""One look at all sensors, and the same in words: what `python -m backend measure` prints."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

import msgspec

from backend.events import Device, Devices, Sample, Sensor
from backend.telemetry.machine import Machine
from backend.telemetry.readings import HOST_S, SLOW_S, clock_reasons

PANELS = ("pcie",)


class Look(msgspec.Struct, kw_only=True):
    devices: Devices
    values: list[dict[str, float]]  # for each device: sensor -> its newest value


def look(used: Collection[str] = ()) -> Look:
    """Reads everything once, in this thread: for about two seconds where there is a GPU, since counters need two."""
    machine = Machine(time.perf_counter, time.sleep, used=used)
    devices, values = Devices(), {}
    began = time.perf_counter()
    try:
        while True:
            for event in machine.tick(PANELS):
                if isinstance(event, Devices):
                    devices = event
                else:
                    _take(event, devices, values)
            enough = SLOW_S if any(device.kind == "gpu" for device in devices.devices) else HOST_S
            if time.perf_counter() - began > 1.1 * enough:
                break
            time.sleep(machine.period_s)
    finally:
        machine.close()
    return Look(devices=devices, values=[values.get(i, {}) for i in range(len(devices.devices))])


def _take(sample: Sample, devices: Devices, values: dict[int, dict[str, float]]) -> None:
    sensors = devices.devices[sample.device].sensors
    found = {s.name: v for s, v in zip(sensors, sample.values, strict=True) if v is not None}
    values.setdefault(sample.device, {}).update(found)


def lines(found: Look) -> Iterator[str]:
    """One line a reading: name, value or "-", and what it may be called."""
    if found.devices.state != "ready" or found.devices.message:
        yield f"NVIDIA: {found.devices.message or found.devices.state}"
    for device, values in zip(found.devices.devices, found.values, strict=True):
        yield ""
        yield _title(device)
        for note in device.notes:
            yield f"  note: {note}"
        for sensor in device.sensors:
            value = None if sensor.note else values.get(sensor.name)
            yield f"  {sensor.name.replace('_', ' '):20} {_shown(sensor, value, device):>24}   {_label(sensor, value)}"


def _title(device: Device) -> str:
    words = [device.name or device.uuid, device.arch, device.uuid if device.kind == "gpu" else "this machine"]
    if device.memory_bytes:
        words.append(f"{device.memory_bytes / 2**30:.1f} GiB")
    if device.driver:
        words.append(f"driver {device.driver}")
    if device.peak_bandwidth_bytes_per_s:
        words.append(f"peak {device.peak_bandwidth_bytes_per_s / 1e9:.0f} GB/s ({device.peak_source})")
    if device.state != "ok":
        words.append(device.state.upper())
    if device.fake:
        words.append("FAKE DEVICE")
    return " · ".join(word for word in words if word)


def _label(sensor: Sensor, value: float | None) -> str:
    return sensor.label if sensor.note or value is not None else "no answer (yet)"


def _shown(sensor: Sensor, value: float | None, device: Device) -> str:
    if value is None:
        return "-"
    if sensor.unit == "B":
        return f"{value / 2**30:.2f} GiB"
    if sensor.unit == "B/s":
        return f"{value / 1e9:.3f} GB/s"
    if sensor.unit == "bits":
        return ", ".join(clock_reasons(value)) or "none: full clocks"
    if sensor.name == "dram_bandwidth" and device.peak_bandwidth_bytes_per_s:
        return f"{value:.1f} % of peak ({value * device.peak_bandwidth_bytes_per_s / 1e14:.2f} TB/s)"
    return f"{value:.6g} {sensor.unit}".strip()
