"""The last minutes of readings, bounded; a thread writes, anybody reads."""

from __future__ import annotations

import csv
import io
import itertools
import json
import threading
from collections import deque

from backend.events import Device, Devices, Sample

KEPT_S = 15 * 60.0


class Ring:
    """Samples with running numbers from 1. `Devices` told later hold for the samples after it."""

    def __init__(self, rows: int = 4500):
        self._rows: deque[tuple[int, Sample, Device]] = deque(maxlen=rows)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._devices: Devices | None = None
        self._latest: dict[int, dict[str, tuple[float, float]]] = {}  # device -> sensor -> (value, when)

    def add(self, event: Devices | Sample) -> None:
        with self._lock:
            if isinstance(event, Devices):
                if self._devices is None or _sensors(self._devices) != _sensors(event):
                    self._latest.clear()
                self._devices = event
                return
            if self._devices is None or not 0 <= event.device < len(self._devices.devices):
                return
            device = self._devices.devices[event.device]
            self._rows.append((next(self._numbers), event, device))
            latest = self._latest.setdefault(event.device, {})
            for sensor, value in zip(device.sensors, event.values, strict=True):
                if value is not None:
                    latest[sensor.name] = (value, event.t)

    @property
    def devices(self) -> Devices | None:
        with self._lock:
            return self._devices

    def since(self, number: int = 0) -> list[tuple[int, Sample]]:
        """(number, sample) of all samples after `number` that are still kept, oldest first."""
        with self._lock:
            return [(n, sample) for n, sample, _ in self._rows if n > number]

    def newest_t(self) -> float | None:
        with self._lock:
            return self._rows[-1][1].t if self._rows else None

    def latest(self, now: float) -> list[dict[str, dict[str, float]]]:
        """For each device: sensor -> {"value", "age_s"}. A sensor that says why it has no value is not in it."""
        with self._lock:
            found = []
            for index, device in enumerate(self._devices.devices if self._devices else []):
                silent = {sensor.name for sensor in device.sensors if sensor.note}
                values = self._latest.get(index, {})
                found.append(
                    {n: {"value": v, "age_s": round(now - t, 3)} for n, (v, t) in values.items() if n not in silent}
                )
            return found

    def jsonl(self) -> str:
        """One line a sample: device, t, t0, and each value with its unit and label."""
        lines = []
        for _, sample, device in self._copy():
            values = {
                sensor.name: {"value": value, "unit": sensor.unit, "source": sensor.source, "label": sensor.label}
                for sensor, value in zip(device.sensors, sample.values, strict=True)
                if value is not None
            }
            lines.append(json.dumps({"device": device.uuid, "t_s": sample.t, "t0_s": sample.t0, "values": values}))
        return "".join(line + "\n" for line in lines)

    def csv(self) -> str:
        """One row a value; unit, source and label stand beside it. A value that is missing has no row."""
        out = io.StringIO()
        table = csv.writer(out, lineterminator="\n")
        table.writerow(["t_s", "t0_s", "device", "name", "reading", "value", "unit", "source", "label"])
        for _, sample, device in self._copy():
            for sensor, value in zip(device.sensors, sample.values, strict=True):
                if value is not None:
                    table.writerow(
                        [round(sample.t, 6), round(sample.t0, 6), device.uuid, device.name, sensor.name, value]
                        + [sensor.unit, sensor.source, sensor.label]
                    )
        return out.getvalue()

    def _copy(self) -> list[tuple[int, Sample, Device]]:
        with self._lock:
            return list(self._rows)


def _sensors(devices: Devices) -> list[list[str]]:
    return [[device.uuid, *(sensor.name for sensor in device.sensors)] for device in devices.devices]
