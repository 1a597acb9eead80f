"""The machine itself: load, memory, this process; and in plain words what it hides.

A virtual machine shows no DRAM counters, no power and no true clocks; then the computed bandwidth beside the measured
ceiling is all there is, and says so.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import psutil

from backend.telemetry import readings
from backend.telemetry.readings import HOST_S, ReadError, Reading, Way, absent

RAPL = Path("/sys/class/powercap/intel-rapl:0")
EVENT_SOURCES = Path("/sys/bus/event_source/devices")
THIS_PROCESS = f"{readings.SYSTEM}, the process that computes"


class Host:
    """Readings of the machine. psutil's percentages speak for the time since they were asked last."""

    def __init__(self) -> None:
        self.name = cpu_name()
        self.cores = psutil.cpu_count() or 1
        self.virtual = is_virtual()
        self.notes = [] if not self.virtual else [
            "a virtual machine: it hides DRAM counters, power and true clock rates, "
            "and its cache size may be that of the whole host"
        ]  # fmt: skip
        self._process = psutil.Process()
        self._process.cpu_percent()
        psutil.cpu_percent()
        self._memory = psutil.virtual_memory()
        self.total_bytes = self._memory.total
        self._energy = _Rapl()
        self.readings = [
            absent("dram_bandwidth", "%", self._no_dram_counters()),
            self._by("cpu_busy", "%", psutil.cpu_percent, f"{readings.SYSTEM}, all cores", None),
            self._by("process_cpu", "%", lambda: self._process.cpu_percent() / self.cores, THIS_PROCESS, None),
            self._by("process_memory", "B", lambda: self._process.memory_info().rss, THIS_PROCESS),
            self._by("memory_used", "B", lambda: self._memory.total - self._memory.available, readings.SYSTEM),
            self._by("memory_available", "B", lambda: self._memory.available, readings.SYSTEM),
            self._by("load_average", "", lambda: os.getloadavg()[0], f"{readings.SYSTEM}, one-minute average", 60.0),
            self._energy.reading(self.virtual),
        ]

    def begin(self) -> None:
        """Once a tick, before any reading."""
        self._memory = psutil.virtual_memory()

    def _by(self, name: str, unit: str, read: Callable[[], float], label: str, span_s: float | None = 0.0) -> Reading:
        return Reading(name, unit, [Way("proc", label, read, span_s)], HOST_S)

    def _no_dram_counters(self) -> str:
        if self.virtual:
            return "no DRAM counters in this virtual machine"
        if any(EVENT_SOURCES.glob("uncore_imc*")):
            return "this machine has DRAM counters (uncore_imc), but KVScope does not read them"
        return "this machine shows no DRAM counters"


class _Rapl:
    """Energy of the CPU package from Intel's and AMD's counter, where the system shows it."""

    def __init__(self) -> None:
        self._turns, self._last = 0, 0
        try:
            self._range = int((RAPL / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            self._range = 0

    def reading(self, virtual: bool) -> Reading:
        way = Way("proc", "measured: RAPL counter of the CPU package", self._read)
        if not RAPL.exists():
            where = "this virtual machine" if virtual else "this machine"
            return absent("energy", "J", f"no energy counter of the CPU (RAPL) in {where}", period_s=HOST_S)
        return Reading("energy", "J", [way], HOST_S)

    def _read(self) -> float:
        try:
            now = int((RAPL / "energy_uj").read_text())
        except PermissionError:
            raise ReadError("the energy counter of the CPU (RAPL) is for root only", lasting=True) from None
        except (OSError, ValueError) as error:
            raise ReadError(f"the energy counter of the CPU (RAPL): {error}") from None
        self._turns += now < self._last  # it begins anew at its range's end
        self._last = now
        return (now + self._turns * self._range) / 1e6


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def is_virtual() -> bool:
    """By the CPU's own word: a hypervisor sets this flag."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return any(" hypervisor" in line for line in file if line.startswith("flags"))
    except OSError:
        return False
