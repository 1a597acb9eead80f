"""The hardware page's tables: pure functions of the folded state."""

from __future__ import annotations

import pandas as pd

from backend.fold import State


def computes_on_gpu(state: State) -> bool:
    """Whether the engine computes on something else than the machine's CPU."""
    return state.device.kind not in ("", "cpu") or any(d.used and d.kind != "host" for d in state.devices.devices)


def has_gpu(state: State) -> bool:
    return any(device.kind != "host" for device in state.devices.devices)


def readings(state: State) -> pd.DataFrame:
    """One row a sensor of every device; a reading that is not there has no value, and says why."""
    newest: dict[tuple[int, int], tuple[float, float]] = {}
    for t, _, index, values, *_ in state.samples:
        for column, value in enumerate(values):
            if value is not None:
                newest[index, column] = (t, value)
    rows = []
    for index, device in enumerate(state.devices.devices):
        for column, sensor in enumerate(device.sensors):
            t, value = newest.get((index, column), (None, None))
            if sensor.note:
                t = value = None  # what it was before it failed is not what it is
            rows.append(
                {
                    "device": device.name or device.uuid,
                    "fake": device.fake,
                    "reading": sensor.name,
                    "value": value,
                    "unit": sensor.unit,
                    "label": sensor.label or f"not available: {sensor.note}",
                    "age (s)": None if t is None else round(max(0.0, state.t - t), 1),
                }
            )
    return pd.DataFrame(rows, columns=["device", "fake", "reading", "value", "unit", "label", "age (s)"])
