"""One place among the devices: who stands there, what became of it, and what is told of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from backend.events import Device, Process, Sensor
from backend.telemetry.gpu import Gpu
from backend.telemetry.host import Host
from backend.telemetry.nvml import Nvml
from backend.telemetry.readings import not_available

FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0  # before a lost GPU or a library that would not open is tried again
PROCESS_STEP_BYTES = 64 * 2**20  # a smaller change of a process's memory is nothing to tell


@dataclass(slots=True)
class Wait:
    """Pauses that double: 2, 4 … 60 s."""

    next_t: float = 0.0
    pause_s: float = FIRST_WAIT_S

    def failed(self, now: float) -> None:
        self.next_t = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_WAIT_S)


@dataclass(slots=True)
class Slot:
    """One place in `Devices`. It stays where it is, whatever becomes of the device."""

    uuid: str
    parent_uuid: str = ""  # of a MIG slice: its card
    gpu: Gpu | None = None
    known: Device | None = None  # as it was told last
    state: str = "ok"
    reason: str = ""
    silent: int = 0  # ticks without any answer
    wait: Wait = field(default_factory=Wait)
    read_t: float | None = None  # of the reading before
    told_processes: list[Process] = field(default_factory=list)


def describe(slot: Slot, nvml: Nvml, used: Collection[str]) -> Device:
    """What is told of it: of a lost one what it was, with every sensor saying that it is gone."""
    if slot.gpu is None:
        known = slot.known or Device(uuid=slot.uuid, name="NVIDIA GPU", fake=nvml.fake)
        return Device(
            uuid=slot.uuid,
            name=known.name,
            used=known.used or slot.uuid in used,
            fake=known.fake,
            arch=known.arch,
            driver=known.driver,
            memory_bytes=known.memory_bytes,
            peak_bandwidth_bytes_per_s=known.peak_bandwidth_bytes_per_s,
            peak_source=known.peak_source,
            notes=[f"lost: {slot.reason}"],
            state="lost",
            sensors=[gone(sensor, slot.reason) for sensor in known.sensors],
            processes_note=slot.reason,
        )
    gpu, me = slot.gpu, slot.gpu.identity
    if differ(gpu.processes, slot.told_processes):
        slot.told_processes = gpu.processes
    slot.known = Device(
        uuid=slot.uuid,
        name=me.name,
        used=slot.uuid in used,
        fake=nvml.fake,
        arch=me.arch,
        driver=nvml.driver,
        memory_bytes=me.total_bytes,
        peak_bandwidth_bytes_per_s=me.peak_bytes_per_s,
        peak_source=me.peak_source,
        notes=me.notes + ([slot.reason] if slot.reason else []),
        state=slot.state,
        sensors=[reading.sensor() for reading in gpu.readings],
        processes=slot.told_processes,
        processes_note=gpu.processes_note,
    )
    return slot.known


def describe_host(host: Host, used: Collection[str]) -> Device:
    return Device(
        uuid="host",
        name=host.name,
        kind="host",
        used="host" in used,
        memory_bytes=host.total_bytes,
        notes=host.notes,
        sensors=[reading.sensor() for reading in host.readings],
        processes_note="see the operating system's own tools",
    )


def gone(sensor: Sensor, reason: str) -> Sensor:
    """A lost device's sensor: what it was, and that it gives nothing now."""
    return msgspec.structs.replace(sensor, note=reason, label=not_available(reason))


def differ(now: list[Process], told: list[Process]) -> bool:
    if [process.pid for process in now] != [process.pid for process in told]:
        return True
    return any(
        (a.memory_bytes is None) != (b.memory_bytes is None)
        or abs((a.memory_bytes or 0) - (b.memory_bytes or 0)) >= PROCESS_STEP_BYTES
        for a, b in zip(now, told, strict=True)
    )
