from __future__ import annotations

import csv
import io
import json

from hypothesis import given
from hypothesis import strategies as st

from backend.events import Device, Devices, Sample, Sensor
from backend.telemetry.ring import Ring

POWER = Sensor(name="power", unit="W", source="nvml_field", label="measured: NVML, at this moment")
NONE = Sensor(name="energy", unit="J", label="not available: none", note="none")
DEVICES = Devices(
    devices=[Device(uuid="GPU-1", name="One", sensors=[POWER, NONE]), Device(uuid="host", sensors=[POWER])]
)


@given(
    st.integers(1, 20), st.lists(st.tuples(st.integers(0, 1), st.none() | st.floats(0, 900)), max_size=60), st.data()
)
def test_it_keeps_the_last_rows_and_tells_what_is_new(size, readings, data):
    ring = Ring(size)
    ring.add(DEVICES)
    told = []
    for number, (device, value) in enumerate(readings, 1):
        sample = Sample(t=float(number), t0=number - 1.0, device=device, values=[value, None][: 2 - device])
        ring.add(sample)
        told.append((number, sample))
    since = data.draw(st.integers(0, len(told)))
    assert ring.since(since) == [row for row in told[-size:] if row[0] > since]
    latest = ring.latest(now=100.0)
    for device in (0, 1):
        values = [(s.values[0], s.t) for _, s in told if s.device == device and s.values[0] is not None]
        assert latest[device].get("power") == (
            {"value": values[-1][0], "age_s": round(100.0 - values[-1][1], 3)} if values else None
        )
        assert "energy" not in latest[device]


def test_a_reading_that_ended_has_no_latest_value():
    ring = Ring()
    ring.add(DEVICES)
    ring.add(Sample(t=1.0, t0=0.5, device=1, values=[3.0]))
    gone = Sensor(name="power", unit="W", label="not available: lost", note="lost")
    ring.add(Devices(devices=[DEVICES.devices[0], Device(uuid="host", sensors=[gone])]))
    assert ring.latest(2.0)[1] == {}


def test_samples_of_nothing_are_dropped():
    ring = Ring()
    ring.add(Sample(t=1.0, t0=0.5, device=0, values=[3.0]))
    ring.add(DEVICES)
    ring.add(Sample(t=1.0, t0=0.5, device=7, values=[3.0]))
    assert ring.since() == [] and ring.newest_t() is None


def test_exports_say_unit_source_and_label_and_leave_gaps_out():
    ring = Ring()
    ring.add(DEVICES)
    ring.add(Sample(t=1.25, t0=1.0, device=0, values=[301.5, None]))
    ring.add(Sample(t=1.5, t0=1.25, device=0, values=[None, None]))
    rows = list(csv.DictReader(io.StringIO(ring.csv())))
    assert rows == [
        {
            "t_s": "1.25", "t0_s": "1.0", "device": "GPU-1", "name": "One", "reading": "power", "value": "301.5",
            "unit": "W", "source": "nvml_field", "label": "measured: NVML, at this moment",
        }
    ]  # fmt: skip
    first, second = map(json.loads, ring.jsonl().splitlines())
    assert first["values"]["power"] == {
        "value": 301.5, "unit": "W", "source": "nvml_field", "label": "measured: NVML, at this moment",
    }  # fmt: skip
    assert second["values"] == {}
