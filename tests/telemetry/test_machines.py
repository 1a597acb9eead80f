"""Fake machines against what they must show, and what happens when hardware fails while it is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.telemetry import identity
from backend.telemetry.nvml import Nvml
from tests.telemetry import golden

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("machine", golden.MACHINES)
def test_every_reading_is_called_what_it_is(box, machine, monkeypatch):
    monkeypatch.setattr(identity, "on_wsl", lambda: machine == "wsl2")
    told = golden.read(box(machine))
    assert golden.render(told, machine) == (golden.FOLDER / f"{machine}.txt").read_text()
    for index, device in enumerate(told.devices.devices):
        values = told.values(index)
        for sensor in device.sensors:
            assert sensor.label, sensor
            assert sensor.label.startswith("not available") == bool(sensor.note), sensor
            if sensor.note:
                assert sensor.name not in values, f"{sensor.name} says it has no value, and has {values[sensor.name]}"
            if sensor.name == "memory_busy":
                assert sensor.unit == "%"  # a share of time, never bytes
            if sensor.unit == "B/s" and sensor.source == "nvml":
                assert sensor.name.startswith("pcie")
        assert device.kind == "host" or device.fake


def test_the_machine_itself_is_read_everywhere(box):
    told = box("mismatch").tick(2, seconds=1.0)
    (host,) = told.devices.devices
    values = told.values(0)
    assert (host.uuid, host.kind, host.fake) == ("host", "host", False)
    assert 0 < values["memory_available"] < host.memory_bytes
    assert values["process_memory"] > 1e6
    assert 0 <= values["cpu_busy"] <= 100
    dram = told.sensors(0)["dram_bandwidth"]
    assert dram.note and "dram_bandwidth" not in values


def test_without_a_driver_it_says_what_was_looked_for(box):
    told = box("none").tick(2, seconds=1.0)
    assert told.devices.state == "absent"
    assert "libnvidia-ml.so.1" in told.devices.message and "utility" in told.devices.message
    assert [device.kind for device in told.devices.devices] == ["host"]


def test_a_library_of_ones_own_that_cannot_be_loaded_is_named(monkeypatch):
    monkeypatch.setenv("KVSCOPE_NVML_LIBRARY", "/nowhere/libnvml.so")
    nvml = Nvml()
    assert nvml.open() == "absent"
    assert "/nowhere/libnvml.so" in nvml.message


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        ("DRIVER_NOT_LOADED", "absent", "kernel module is not loaded"),
        ("LIB_RM_VERSION_MISMATCH", "mismatch", "Reboot"),
        ("NO_PERMISSION", "no_permission", "may not talk"),
        ("UNKNOWN", "error", "restart the container"),
    ],
)
def test_why_the_library_does_not_open_is_said_and_it_is_tried_again(box, error, state, words):
    machine = box("t4")
    machine.script.update({"error.nvmlInitWithFlags": error})
    told = machine.tick()
    assert (told.devices.state, len(told.devices.devices)) == (state, 1)
    assert words in told.devices.message
    machine.script.update({"error.nvmlInitWithFlags": None})
    machine.tick()
    assert told.devices.state == state  # not at every tick: the pause is 2 s
    machine.tick(12)
    assert (told.devices.state, told.devices.message, told.devices.devices[0].name) == ("ready", "", "Tesla T4")


def test_an_old_package_that_hides_the_binding_is_named(monkeypatch):
    import importlib.metadata

    import pynvml

    monkeypatch.delattr(pynvml, "nvmlGpmSampleGet")
    monkeypatch.setattr(
        importlib.metadata, "packages_distributions", lambda: {"pynvml": ["nvidia-ml-py3", "nvidia-ml-py"]}
    )
    nvml = Nvml()
    assert nvml.open() == "error"
    assert "pip uninstall nvidia-ml-py3" in nvml.message and nvml.lasting


def test_a_gpu_that_is_lost_and_found_again(box):
    machine = box("lost")
    machine.script.update({"error.gpu.1.nvmlDeviceGetName": None})
    told = golden.read(machine, 3)
    assert [d.state for d in told.devices.devices] == ["ok", "ok", "ok"]
    machine.script.update({"error.gpu.1.*": "GPU_IS_LOST"})
    before = len(told.events)
    machine.tick(3)
    gone = told.devices.devices[1]
    assert (gone.state, gone.name) == ("lost", "NVIDIA H100 80GB HBM3")
    assert all("fell off the bus" in sensor.note for sensor in gone.sensors)
    after = [e for e in told.events[before:] if getattr(e, "device", None) is not None]
    assert {e.device for e in after} >= {0} and 1 not in {e.device for e in after}  # the other one is read on

    machine.script.update({"error.gpu.1.*": None})
    machine.tick(1)
    assert told.devices.devices[1].state == "lost"  # looked for again after 2 s only
    machine.tick(12)
    assert told.devices.devices[1].state == "ok"
    assert not told.devices.devices[1].sensors[1].note


def test_a_lost_gpu_is_looked_for_with_growing_pauses(box, monkeypatch, tmp_path):
    machine = box("t4")
    machine.tick()
    monkeypatch.setenv("FAKE_NVML_LOG", str(tmp_path / "calls"))
    machine.script.update({"error.gpu.0.*": "GPU_IS_LOST"})
    machine.tick(600, seconds=0.2)  # two minutes
    tries = (tmp_path / "calls").read_text().count("nvmlDeviceGetHandleByUUID")
    assert 4 <= tries <= 7  # 2, 4, 8, 16, 32, 60 s


def test_one_reading_that_fails_for_a_while_costs_only_itself(box):
    machine = box("h100")
    told = golden.read(machine, 4)
    machine.script.update({"error.gpu.0.nvmlDeviceGetClockInfo": "TIMEOUT"})
    machine.tick(2)
    assert not told.sensors()["sm_clock"].note  # twice is nothing to say
    machine.tick(2)
    assert "timeout" in told.sensors()["sm_clock"].note
    assert not told.sensors()["power"].note
    machine.script.update({"error.gpu.0.nvmlDeviceGetClockInfo": None})
    machine.tick(1)
    assert not told.sensors()["sm_clock"].note


def test_what_a_device_does_not_know_is_asked_once(box, monkeypatch, tmp_path):
    machine = box("laptop")
    monkeypatch.setenv("FAKE_NVML_LOG", str(tmp_path / "calls"))
    machine.tick(30)
    calls = (tmp_path / "calls").read_text()
    assert calls.count("nvmlDeviceGetPowerUsage ") == 1
    assert calls.count("nvmlDeviceGetTotalEnergyConsumption ") == 1
    assert calls.count("nvmlDeviceGetUtilizationRates ") == 30  # one call for both of its readings


def test_an_error_storm_goes_quiet_and_ends(box, monkeypatch, tmp_path):
    machine = box("t4")
    told = machine.tick(2)
    machine.script.update({"error.gpu.0.*": "UNKNOWN"})
    before = len(told.events)
    monkeypatch.setenv("FAKE_NVML_LOG", str(tmp_path / "calls"))
    machine.tick(600)
    assert told.devices.devices[0].state == "stale"
    assert any("restart the container" in note for note in told.devices.devices[0].notes)
    assert sum(type(e).__name__ == "Devices" for e in told.events[before:]) <= 4  # no flood of news
    assert (tmp_path / "calls").read_text().count("nvmlDeviceGetUtilizationRates") < 20
    machine.script.update({"error.gpu.0.*": None})
    machine.tick(320)
    assert told.devices.devices[0].state == "ok"
    assert "gpu_busy" in told.values()


def test_the_library_is_opened_anew_after_the_driver_was_replaced(box):
    machine = box("t4")
    told = machine.tick(2)
    machine.script.update({"error.nvmlDeviceGetUtilizationRates": "DRIVER_NOT_LOADED"})
    machine.tick(1)
    assert told.devices.state == "error" and told.devices.devices[0].state == "lost"
    machine.script.update({"error.nvmlDeviceGetUtilizationRates": None})
    machine.tick(25)
    assert told.devices.state == "ready" and told.devices.devices[0].state == "ok"


def test_a_driver_that_reports_no_gpu_for_a_while_is_asked_again(box):
    machine = box("t4")
    machine.script.update({"count": 0})
    told = machine.tick(2)
    assert "no GPU" in told.devices.message and len(told.devices.devices) == 1
    machine.script.update({"count": 1})
    machine.tick(15)
    assert told.devices.devices[0].name == "Tesla T4" and told.devices.message == ""


def test_the_waiting_pcie_call_is_made_only_while_its_panel_is_open(box, monkeypatch, tmp_path):
    machine = box("t4")
    monkeypatch.setenv("FAKE_NVML_LOG", str(tmp_path / "calls"))
    told = machine.tick(15)
    assert "nvmlDeviceGetPcieThroughput" not in (tmp_path / "calls").read_text()
    assert "panel" in told.sensors()["pcie_rx"].note
    machine.tick(15, panels=("pcie",))
    assert told.values()["pcie_rx"] == 12_000_000 and not told.sensors()["pcie_rx"].note
    machine.tick(1)
    assert "panel" in told.sensors()["pcie_rx"].note


def test_counters_that_are_there_spare_the_waiting_pcie_call(box, monkeypatch, tmp_path):
    machine = box("h100")
    monkeypatch.setenv("FAKE_NVML_LOG", str(tmp_path / "calls"))
    machine.tick(12, panels=("pcie",))
    assert "nvmlDeviceGetPcieThroughput" not in (tmp_path / "calls").read_text()


def test_a_failed_gpm_sample_keeps_the_pair(box):
    """The next pair then speaks for a longer time, says so, and is in the right order."""
    machine = box("h100")
    told = golden.read(machine, 4)
    machine.script.update({"error.gpu.0.nvmlGpmSampleGet": "TIMEOUT"})
    golden.read(machine, 2)
    machine.script.update({"error.gpu.0.nvmlGpmSampleGet": None})
    golden.read(machine, 1)
    last = [e for e in told.events if getattr(e, "device", None) == 0][-1]
    column = [s.name for s in told.devices.devices[0].sensors].index("dram_bandwidth")
    assert last.values[column] == 71.5
    assert last.spans[column] == pytest.approx(1.5, abs=0.01)
    assert last.spans[column + 1] is None


def test_gpm_values_that_are_no_numbers_are_dropped(box):
    machine = box("h100")
    told = golden.read(machine, 4)
    before = len(told.events)
    machine.script.update({"gpu.0.gpm.10": "140737488355328", "gpu.0.gpm.2": "nan"})
    golden.read(machine, 2)
    column = [s.name for s in told.devices.devices[0].sensors].index("dram_bandwidth")
    fresh = [e for e in told.events[before:] if getattr(e, "device", None) == 0]
    assert [e.values[column] for e in fresh] == [None, None]
    assert [e.values[column + 3] for e in fresh] == [None, None]


def test_devices_keep_their_place_and_are_matched_by_uuid(box, monkeypatch):
    machine = box("lost")
    machine.script.update({"error.gpu.1.nvmlDeviceGetName": None})
    machine.machine._used = ("GPU-10570000-0000-0000-0000-000000000000",)
    told = machine.tick(1)
    assert [d.used for d in told.devices.devices] == [False, True, False]


def test_a_processs_memory_that_the_driver_hides_is_unknown_not_zero(box):
    told = box("wsl2").tick(1)
    assert told.devices.devices[0].processes[0].memory_bytes is None


def test_process_entries_of_another_version_are_dropped_and_said(box):
    machine = box("rtx4090")
    machine.script.update({"gpu.0.processes": "812:9000000000 4294967295:1 913:99999999999999"})
    told = machine.tick(1)
    device = told.devices.devices[0]
    assert [p.pid for p in device.processes] == [812]
    assert "no sense" in device.processes_note


def test_a_forked_child_opens_its_own_library_and_reads_nothing_by_itself(box):
    machine = box("t4")
    machine.tick(1)
    pid = os.fork()
    if pid == 0:
        nvml = machine.machine.nvml
        os._exit(7 if not nvml.is_open and nvml.open() == "ready" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_it_imports_and_reads_without_torch_streamlit_or_nvml(tmp_path):
    code = """
import sys
sys.modules["pynvml"] = None
from backend.telemetry.machine import Machine
told = []
machine = Machine(lambda: 1.0, lambda s: None)
told.extend(machine.tick())
assert told[0].state == "absent" and "nvidia-ml-py" in told[0].message, told[0]
assert len(told) == 2
assert not {"torch", "streamlit", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_no_descriptors_are_left_open(box):
    machine = box("h100")
    golden.read(machine, 3)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        machine.tick(1)
    assert len(os.listdir("/proc/self/fd")) < before + 50  # threads of other tests open and close theirs meanwhile
