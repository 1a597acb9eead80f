"""The sampler's thread on the fake library: who calls, how often, and when it is silent."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from backend.events import Devices, Sample
from backend.telemetry import sampler as sampling
from backend.telemetry.sampler import Sampler
from tests.nvml import library
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not library.COMPILER, reason=library.NO_COMPILER)


class Call(NamedTuple):
    t: float  # seconds, monotonic
    thread: int
    function: str
    device: str


class Rig:
    """A sampler on a fake machine, with the log of every call into the library."""

    def __init__(self, machine: str, folder: Path, **options: object):
        self.script = library.Script(folder / f"{machine}.txt")
        self.log = folder / "calls"
        self.told: list[tuple[Devices | Sample, float]] = []
        self.sampler = Sampler(lambda event, t: self.told.append((event, t)), clock=time.monotonic, **options)

    def calls(self, function: str = "") -> list[Call]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [Call(int(t) / 1e9, int(thread), name, device) for t, thread, name, device in map(str.split, lines)]
        return [call for call in found if function in call.function]

    def samples(self, device: int = 0) -> list[Sample]:
        return [event for event, _ in list(self.told) if isinstance(event, Sample) and event.device == device]


@pytest.fixture
def rig(tmp_path, monkeypatch):
    import pynvml

    made: list[Rig] = []

    def make(machine: str, **options: object) -> Rig:
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        for key, value in library.variables(machine, tmp_path).items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("FAKE_NVML_LOG", str(tmp_path / "calls"))
        made.append(Rig(machine, tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.sampler.close()


def test_one_thread_one_init_the_right_rate_and_silence_after_the_last_viewer(rig):
    rigged = rig("h100", lease_s=2.0)
    rigged.sampler.start()
    assert rigged.calls() == []  # nobody looks, nothing works: the GPU may sleep
    for _ in range(10):
        rigged.sampler.watch()  # ten viewers, one sampler
    eventually(lambda: rigged.sampler.awake)
    eventually(lambda: not rigged.sampler.awake)
    silent = time.monotonic()
    calls = rigged.calls()
    assert len({call.thread for call in calls}) == 1
    assert calls[0].thread != threading.get_native_id()
    assert len(rigged.calls("nvmlInit")) == 1
    ticks = rigged.calls("nvmlDeviceGetUtilizationRates")
    slots = len(ticks) - 1 + rigged.sampler.skipped_ticks
    assert slots >= 5
    assert (ticks[-1].t - ticks[0].t) / slots == pytest.approx(0.2, rel=0.1)
    assert not rigged.calls("nvmlDeviceGetPcieThroughput")

    eventually(lambda: time.monotonic() > silent + 0.6)
    assert len(rigged.calls()) == len(calls)
    rigged.sampler.watch()
    eventually(lambda: len(rigged.calls()) > len(calls))
    assert len(rigged.calls("nvmlInit")) == 1  # opened once, kept
    rigged.sampler.close()
    names = [call.function for call in rigged.calls()]
    assert names[-3:] == ["nvmlGpmSampleFree", "nvmlGpmSampleFree", "nvmlShutdown"]


def test_it_reads_while_the_engine_works_though_nobody_looks(rig, monkeypatch):
    monkeypatch.setattr(sampling, "ASLEEP_S", 0.05)
    works = threading.Event()
    rigged = rig("t4", busy=works.is_set, lease_s=0.2)
    rigged.sampler.start()
    works.set()
    eventually(lambda: len(rigged.samples()) >= 2)
    works.clear()
    eventually(lambda: not rigged.sampler.awake)
    kind = [type(event).__name__ for event, _ in rigged.told]
    assert kind[0] == "Devices"
    first, second = rigged.samples()[:2]
    assert first.t0 == first.t < second.t0 + 1e-9 and second.t0 == first.t


def test_the_waiting_pcie_call_follows_its_panels_lease(rig):
    rigged = rig("t4", lease_s=0.5)
    rigged.sampler.watch(["pcie"])
    eventually(lambda: rigged.calls("nvmlDeviceGetPcieThroughput"))
    eventually(lambda: not rigged.sampler.awake)
    before = len(rigged.calls("nvmlDeviceGetPcieThroughput"))
    begun = len(rigged.samples())
    rigged.sampler.watch()
    eventually(lambda: len(rigged.samples()) > begun + 1)
    assert len(rigged.calls("nvmlDeviceGetPcieThroughput")) == before


def test_a_hung_call_is_seen_by_its_age_and_holds_nobody(rig, monkeypatch):
    monkeypatch.setattr(sampling, "JOIN_S", 0.1)
    rigged = rig("t4")
    rigged.sampler.watch()
    eventually(lambda: rigged.samples())
    rigged.script.update({"delay_ms.nvmlDeviceGetUtilizationRates": 1500})
    eventually(lambda: rigged.sampler.hung_s > 0.3)
    age = rigged.sampler.age_s
    latest = rigged.sampler.latest()[0]["gpu_busy"]  # readers are answered, and see how old it is
    assert latest["value"] == 96 and latest["age_s"] >= 0.3 and age >= 0.3
    start = time.monotonic()
    rigged.sampler.close()
    assert time.monotonic() - start < 1.0  # left behind, not waited for
    rigged.script.update({"delay_ms.nvmlDeviceGetUtilizationRates": None})
    eventually(lambda: not rigged.sampler._thread.is_alive())


@pytest.mark.parametrize("fast_s", [0.05, 0.0999, 11, float("nan")])
def test_rates_that_no_driver_bears_are_refused(fast_s):
    with pytest.raises(ValueError, match="every 0.1 to 10 s"):
        Sampler(lambda event, t: None, fast_s=fast_s)


def test_a_forked_child_starts_with_nothing(rig):
    rigged = rig("t4")
    rigged.sampler.watch()
    eventually(lambda: rigged.samples())
    pid = os.fork()
    if pid == 0:
        mine = rigged.sampler
        fresh = mine._thread is None and mine.age_s is None and not mine.awake
        mine.watch()  # its own thread, its own library
        until = time.monotonic() + 10
        while mine.age_s is None and time.monotonic() < until:
            time.sleep(0.01)
        os._exit(7 if fresh and mine.age_s is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_defect_in_reading_leaves_the_process_alone(rig, monkeypatch, caplog):
    rigged = rig("t4")
    monkeypatch.setattr("backend.telemetry.machine.Machine.tick", lambda *_: 1 / 0)
    rigged.sampler.watch()
    eventually(lambda: "no longer read" in caplog.text)
    eventually(lambda: not rigged.sampler._thread.is_alive())
