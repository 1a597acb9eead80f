from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backend.events import Devices, Sample
from backend.telemetry.machine import Machine
from tests.nvml import library


class Told:
    """What a machine told, and its latest values by name."""

    def __init__(self) -> None:
        self.events: list[Devices | Sample] = []

    def add(self, event: Devices | Sample) -> None:
        self.events.append(event)

    @property
    def devices(self) -> Devices:
        return [e for e in self.events if isinstance(e, Devices)][-1]

    def values(self, index: int = 0) -> dict[str, float]:
        sensors = self.devices.devices[index].sensors
        found = {}
        for event in self.events:
            if isinstance(event, Sample) and event.device == index and len(event.values) == len(sensors):
                found |= {s.name: v for s, v in zip(sensors, event.values, strict=True) if v is not None}
        return found

    def sensors(self, index: int = 0):
        return {sensor.name: sensor for sensor in self.devices.devices[index].sensors}


class Box:
    """A machine on the fake library, ticked by hand. Time is a test's own, but for the 100 ms that GPM pairs need."""

    def __init__(self, script: library.Script | None):
        self.script, self.now = script, 100.0
        self.machine = Machine(lambda: self.now, self._pause)
        self.told = Told()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        self.now += seconds

    def tick(self, times: int = 1, panels: tuple[str, ...] = (), seconds: float = 0.2) -> Told:
        for _ in range(times):
            self.now += seconds
            for event in self.machine.tick(panels):
                self.told.add(event)
        return self.told


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Box]]:
    """`box("t4")`: that machine, or one without a driver for "none"."""
    made: list[Box] = []

    def make(name: str) -> Box:
        import pynvml

        monkeypatch.setattr(pynvml, "nvmlLib", None)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        if name == "none":
            monkeypatch.delenv("KVSCOPE_NVML_LIBRARY", raising=False)
            monkeypatch.setattr(pynvml, "CDLL", no_library)
            made.append(Box(None))
            return made[-1]
        if not library.COMPILER:
            pytest.skip(library.NO_COMPILER)
        for key, value in library.variables(name, tmp_path).items():
            monkeypatch.setenv(key, value)
        made.append(Box(library.Script(tmp_path / f"{name}.txt")))
        return made[-1]

    yield make
    for each in made:
        each.machine.close()


def no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")
