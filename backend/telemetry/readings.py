"""Readings and their words. Everything that a number may be called stands here, so that no page can call it more.

The ladder for the bandwidth of a device's memory, best first: measured by NVML's GPM counters; measured by a DCGM
exporter; computed from the bytes that the model must move; "memory busy", a share of time that is never turned into
bytes; not available, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backend.events import Sensor

FAST_S, SLOW_S, HOST_S = 0.2, 2.0, 1.0  # how often: what moves with the steps; what hardly moves; the host's own

GPM = "measured: NVML GPM, average over the last {ms:.0f} ms"
DCGM = "measured: DCGM exporter, average between its collections, time of arrival"
MEMORY_BUSY = "memory busy, share of time (NVML)"
GPU_BUSY = "GPU busy, share of time (NVML)"
NOW = "measured: NVML, at this moment"
AVERAGE_1S = "measured: NVML, average over the last second"
COUNTER = "measured: NVML counter since the driver was loaded"
DRIVER = "reported by the driver (NVML)"
LIMIT = f"{DRIVER}: enforced limit"
RESERVED = f"{DRIVER}: kept by the driver for itself"
OVER_20MS = "measured: NVML, over 20 ms"
BETWEEN = "measured: NVML counter, average between two readings"
SYSTEM = "measured: operating system"
SHARED_MEMORY = "measured: operating system, memory that GPU and CPU share"
NEEDS_HOPPER = "this GPU reports no DRAM counters (needs Hopper or newer)"


def not_available(reason: str) -> str:
    return f"not available: {reason}"


class ReadError(Exception):
    """A reading that gave no value. `lasting`: it never will on this device, so it is not asked again."""

    def __init__(self, reason: str, *, lasting: bool = False):
        super().__init__(reason)
        self.reason, self.lasting = reason, lasting


class DeviceLost(ReadError):
    """The device itself is gone, for now at least."""


class LibraryGone(ReadError):
    """NVML must be opened anew: it was shut down, or its driver changed."""


@dataclass(slots=True)
class Way:
    """One way to come to a reading's value. `read` returns it, None when there is none yet, or raises ReadError."""

    source: str
    label: str
    read: Callable[[], float | None]
    span_s: float | None = 0.0


WAITS = "read only while its panel is open, because asking takes 20 ms"
TOLERATED = 3  # failures in a row before a reading says that it has none; a single one is nothing to say


@dataclass(slots=True)
class Reading:
    """A reading of a device: the ways to come to it, best first, and what became of them."""

    name: str
    unit: str
    ways: list[Way]
    period_s: float = FAST_S
    panel: str = ""  # asked only while this panel is open: asking takes long
    missing: str = ""  # what to say when no way is left, instead of what the last one said
    note: str = ""
    closed: bool = False  # its panel is
    failures: int = field(default=0, repr=False)

    def read(self) -> float | None:
        """The value, or None. Raises DeviceLost or LibraryGone; anything else ends in `note`."""
        while self.ways:
            try:
                value = self.ways[0].read()
            except (DeviceLost, LibraryGone):
                raise
            except ReadError as error:
                if error.lasting:
                    self._drop(error.reason)
                    continue
                return self._failed(error.reason)
            except Exception as error:  # a binding that chokes on what the driver said must not cost the others
                return self._failed(f"{type(error).__name__}: {error}")
            self.failures, self.note = 0, ""
            return value
        return None

    def _drop(self, reason: str) -> None:
        del self.ways[0]
        self.failures = 0
        self.note = "" if self.ways else self.missing or reason

    def _failed(self, reason: str) -> None:
        self.failures += 1
        if self.failures >= TOLERATED:
            self.note = f"no answer at the moment: {reason}"

    def sensor(self) -> Sensor:
        if not self.ways:
            return Sensor(name=self.name, unit=self.unit, label=not_available(self.note), note=self.note)
        way, note = self.ways[0], self.note or (WAITS if self.closed else "")
        return Sensor(
            name=self.name,
            unit=self.unit,
            source=way.source,
            label=not_available(note) if note else way.label,
            note=note,
            period_s=self.period_s,
            span_s=way.span_s,
        )


def absent(name: str, unit: str, reason: str, **options: object) -> Reading:
    """A reading that this device is known not to have."""
    return Reading(name, unit, [], note=reason, **options)


# NVML's bit mask, least bit first. The words of `nvidia-smi -q`, in plainer ones.
CLOCK_REASONS = {
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "synchronised with other GPUs",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
POWER_CAPPED = 0x4 | 0x80


def clock_reasons(mask: float) -> list[str]:
    """Why the clocks are what they are, in words. An unknown bit is named by its number."""
    bits = int(mask)
    words = [text for bit, text in CLOCK_REASONS.items() if bits & bit]
    left = bits & ~sum(CLOCK_REASONS)
    return words + ([f"reason {left:#x}"] if left else [])
