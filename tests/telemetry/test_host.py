"""What the machine tells of itself, and what it says where it tells nothing."""

from __future__ import annotations

import pytest

from backend.telemetry import host
from backend.telemetry.host import Host


def energy(machine: Host):
    return next(reading for reading in machine.readings if reading.name == "energy")


@pytest.fixture
def rapl(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "RAPL", tmp_path)
    (tmp_path / "max_energy_range_uj").write_text("1000000000\n")
    (tmp_path / "energy_uj").write_text("999000000\n")
    return tmp_path


def test_the_cpus_energy_counter_goes_on_past_its_range(rapl):
    reading = energy(Host())
    assert reading.read() == 999.0
    (rapl / "energy_uj").write_text("2000000\n")
    assert reading.read() == 1002.0
    assert "RAPL" in reading.sensor().label and not reading.note


def test_a_counter_for_root_only_says_so_and_is_not_asked_again(rapl, monkeypatch):
    reading = energy(Host())
    asked = []

    def refuse(path, *_, **__):
        asked.append(path)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(rapl), "read_text", refuse)
    assert reading.read() is None and reading.read() is None
    assert "root only" in reading.note and len(asked) == 1


@pytest.mark.parametrize(
    ("virtual", "counters", "words"),
    [(True, True, "virtual machine"), (False, True, "uncore_imc"), (False, False, "shows no DRAM counters")],
)
def test_why_there_is_no_dram_bandwidth(tmp_path, monkeypatch, virtual, counters, words):
    monkeypatch.setattr(host, "is_virtual", lambda: virtual)
    monkeypatch.setattr(host, "EVENT_SOURCES", tmp_path)
    monkeypatch.setattr(host, "RAPL", tmp_path / "none")
    if counters:
        (tmp_path / "uncore_imc_0").mkdir()
    machine = Host()
    sensor = machine.readings[0].sensor()
    assert sensor.name == "dram_bandwidth" and words in sensor.note and sensor.label.startswith("not available")
    assert bool(machine.notes) is virtual
    assert "RAPL" in energy(machine).note
