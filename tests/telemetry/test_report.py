from __future__ import annotations

import pytest

from backend.events import Device, Devices, Sensor
from backend.telemetry import report
from tests.nvml import library


def test_every_reading_has_its_line_and_none_without_a_value_has_a_number():
    sensors = [
        Sensor(name="dram_bandwidth", unit="%", source="nvml_gpm", label="measured: NVML GPM"),
        Sensor(name="clock_reasons", unit="bits", source="nvml", label="measured: NVML"),
        Sensor(name="memory_used", unit="B", source="nvml", label="reported"),
        Sensor(name="energy", unit="J", label="not available: none", note="none"),
        Sensor(name="power", unit="W", source="nvml", label="measured: NVML"),
    ]
    peak = {"peak_bandwidth_bytes_per_s": 3.352e12, "peak_source": "theoretical"}
    gpu = Device(uuid="GPU-1", name="One", fake=True, state="lost", notes=["lost: gone"], sensors=sensors, **peak)
    values = {"dram_bandwidth": 71.5, "clock_reasons": 0x24, "memory_used": 2**30, "energy": 5.0}
    found = report.Look(devices=Devices(devices=[gpu], message="one is lost"), values=[values])
    told = list(report.lines(found))
    assert told[0] == "NVIDIA: one is lost"
    assert told[2] == "One · GPU-1 · peak 3352 GB/s (theoretical) · LOST · FAKE DEVICE"
    assert [line.split() for line in told[3:]] == [
        "note: lost: gone".split(),
        "dram bandwidth 71.5 % of peak (2.40 TB/s) measured: NVML GPM".split(),
        "clock reasons power cap, temperature (driver) measured: NVML".split(),
        "memory used 1.00 GiB reported".split(),
        "energy - not available: none".split(),
        "power - no answer (yet)".split(),
    ]


@pytest.mark.skipif(not library.COMPILER, reason=library.NO_COMPILER)
def test_one_look_reads_also_what_takes_long(tmp_path, monkeypatch):
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    for key, value in library.variables("t4", tmp_path).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(report, "SLOW_S", 0.05)
    found = report.look(["GPU-74000000-0000-0000-0000-000000000000"])
    assert [device.used for device in found.devices.devices] == [True, False]
    assert found.values[0]["pcie_rx"] == 12_000_000 and found.values[1]["memory_used"] > 0
