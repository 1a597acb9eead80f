"""All devices of this machine: read in turn, each on its own, so that one that fails costs the others nothing.

GPUs are told apart by UUID. One that is lost is looked for again with growing pauses; so is a library that would not
open. Everything here runs in one thread, the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from backend.events import Device, Devices, Sample
from backend.telemetry import nvml as library
from backend.telemetry.dcgm import Exporter
from backend.telemetry.gpu import Gpu
from backend.telemetry.host import Host
from backend.telemetry.identity import identify
from backend.telemetry.nvml import Nvml
from backend.telemetry.readings import FAST_S, HOST_S, SLOW_S, LibraryGone, ReadError, Reading
from backend.telemetry.slot import Slot, Wait, describe, describe_host

STALE_TICKS = 5  # in a row with no answer to anything
STALE = "no reading answers any more; in a container that had the GPU before: restart the container"
DIGITS = {"B": 0, "B/s": 0, "bits": 0, "J": 3, "W": 3}


class Machine:
    """`used`: UUIDs of the devices that the engine computes on, "host" for the CPU. `pause(seconds)` waits."""

    def __init__(
        self,
        clock: Callable[[], float],
        pause: Callable[[float], object],
        *,
        used: Collection[str] = (),
        fast_s: float = FAST_S,
    ):
        self._clock, self._pause, self._used, self.fast_s = clock, pause, tuple(used), fast_s
        self.nvml = Nvml()
        self._exporter = Exporter.from_environment()
        self._wait = Wait()
        self._slots: list[Slot] = []
        self._host = Host()
        self._host_t: float | None = None
        self._due: dict[str, float] = {}  # "slow" and "host" -> when next
        self._told: list[Device] | None = None
        self._told_state = ("", "")

    # ---- a tick ------------------------------------------------------------------------------------------------------

    def tick(self, panels: Collection[str] = ()) -> Iterator[Devices | Sample]:
        """What there is to tell: `Devices` first if anything in them changed, then a `Sample` a device (`t` is set)."""
        now = self._clock()
        slow = self._is_due("slow", SLOW_S, now)
        host = self._is_due("host", HOST_S, now)
        self._open(now)
        samples = [sample for i in range(len(self._slots)) if (sample := self._read_gpu(i, slow, panels)) is not None]
        if host:
            samples.append(self._read_host())
        if (devices := self._news()) is not None:
            yield devices
        yield from samples

    def wake(self) -> None:
        """After a pause: the next readings speak for the time from here on."""
        self._due.clear()
        self._host_t = None
        for slot in self._slots:
            slot.read_t = None
            if slot.gpu is not None:
                slot.gpu.forget()

    @property
    def period_s(self) -> float:
        """How often a tick is worth it."""
        return self.fast_s if any(slot.gpu is not None for slot in self._slots) else max(HOST_S, self.fast_s)

    def close(self) -> None:
        for slot in self._slots:
            if slot.gpu is not None:
                slot.gpu.close()
        self._slots = []
        self.nvml.close()

    def _is_due(self, what: str, period_s: float, now: float) -> bool:
        if now < self._due.get(what, 0.0) - 0.5 * self.fast_s:
            return False
        self._due[what] = now + period_s
        return True

    # ---- the library -------------------------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        if (self.nvml.is_open and self._slots) or now < self._wait.next_t or self.nvml.lasting:
            return
        if self.nvml.open() != library.READY:
            self._wait.failed(now)
            return
        try:
            self._find()
        except ReadError as error:
            self._shut(error.reason, now)
            return
        if self._slots:
            self._wait = Wait()
        else:  # a driver that resets a GPU reports none for a while
            self._wait.failed(now)

    def _find(self) -> None:
        """Fills the slots, by UUID: places that were told stay."""
        known = {slot.uuid: slot for slot in self._slots}
        for uuid, parent in self._uuids():
            if uuid not in known:
                known[uuid] = Slot(uuid, parent)
                self._slots.append(known[uuid])
        self.nvml.message = "" if known else "NVIDIA's driver is here and reports no GPU"

    def _uuids(self) -> Iterator[tuple[str, str]]:
        """(UUID, card's UUID or "") of each GPU; of its slices instead where it is cut up."""
        ask, number = self.nvml.ask, self.nvml.number
        for index in range(ask("nvmlDeviceGetCount")):
            try:
                card = ask("nvmlDeviceGetHandleByIndex", index)
                uuid = self.nvml.text("nvmlDeviceGetUUID", card)
                slices = list(self._slices(card)) if number("nvmlDeviceGetMigMode", card) == 1 else []
            except LibraryGone:
                raise
            except ReadError:
                continue  # this one is lost or may not be seen; the others go on
            if uuid:
                yield from ((each, uuid) for each in slices) if slices else [(uuid, "")]

    def _slices(self, card: object) -> Iterator[str]:
        for index in range(self.nvml.number("nvmlDeviceGetMaxMigDeviceCount", card) or 0):
            try:
                handle = self.nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", card, index)
            except LibraryGone:
                raise
            except ReadError:
                continue  # no slice at this place
            if uuid := self.nvml.text("nvmlDeviceGetUUID", handle):
                yield uuid

    def _shut(self, reason: str, now: float) -> None:
        """Closes the library until the next try; every GPU is without readings so long."""
        for slot in self._slots:
            self._lose(slot, reason, now)
        self.nvml.close()
        self.nvml.state, self.nvml.message = library.ERROR, reason
        self._wait.failed(now)

    # ---- a GPU -------------------------------------------------------------------------------------------------------

    def _read_gpu(self, index: int, slow: bool, panels: Collection[str]) -> Sample | None:
        slot, now = self._slots[index], self._clock()
        if not self.nvml.is_open or now < slot.wait.next_t:
            return None
        try:
            if slot.gpu is None:
                self._resolve(slot)
            gpu = slot.gpu
            gpu.begin()
            values = [self._value(reading, slow, panels) for reading in gpu.readings]
            if slow:
                gpu.read_processes()
        except LibraryGone as error:
            self._shut(error.reason, now)
            return None
        except ReadError as error:
            self._lose(slot, error.reason, now)
            return None
        t = round(self._clock(), 6)
        t0, slot.read_t = t if slot.read_t is None else slot.read_t, t
        self._watch_silence(slot, values, now)
        pair = gpu.pair_seconds
        spans = None
        if pair and abs((t - pair[0]) - (t - t0)) > 0.05 * (t - t0) + 0.005:
            spans = [round(t - pair[0], 4) if r.ways and r.ways[0].source == "nvml_gpm" else None for r in gpu.readings]
        return Sample(t=t, t0=t0, device=index, values=values, spans=spans)

    def _value(self, reading: Reading, slow: bool, panels: Collection[str]) -> float | None:
        if reading.panel:
            reading.closed = reading.panel not in panels
        if reading.closed or (reading.period_s >= SLOW_S and not slow):
            return None
        value = reading.read()
        return None if value is None else round(value, DIGITS.get(reading.unit, 2))

    def _resolve(self, slot: Slot) -> None:
        """The handle anew: an old one of a device that was gone may crash the library."""
        handle = self.nvml.ask("nvmlDeviceGetHandleByUUID", slot.uuid.encode())
        parent = self.nvml.ask("nvmlDeviceGetHandleByUUID", slot.parent_uuid.encode()) if slot.parent_uuid else None
        me = identify(self.nvml, handle, slot.uuid, parent)
        slot.gpu = Gpu(self.nvml, me, self._clock, self._pause, self.fast_s, self._exporter)
        slot.state, slot.reason, slot.silent, slot.wait, slot.read_t = "ok", "", 0, Wait(), None

    def _lose(self, slot: Slot, reason: str, now: float) -> None:
        if slot.gpu is not None:
            slot.gpu.close()
        slot.gpu, slot.state, slot.reason = None, "lost", reason
        slot.wait.failed(now)

    def _watch_silence(self, slot: Slot, values: list[float | None], now: float) -> None:
        """A device whose every reading fails is asked less and less often, until one answers."""
        if any(value is not None for value in values):
            slot.state, slot.reason, slot.silent, slot.wait = "ok", "", 0, Wait()
        elif any(reading.failures for reading in slot.gpu.readings):
            slot.silent += 1
            if slot.silent >= STALE_TICKS:
                slot.state, slot.reason = "stale", STALE
                slot.wait.failed(now)

    # ---- the host ----------------------------------------------------------------------------------------------------

    def _read_host(self) -> Sample:
        host = self._host
        host.begin()
        values = []
        for reading in host.readings:
            value = reading.read()
            values.append(None if value is None else round(value, DIGITS.get(reading.unit, 2)))
        t = round(self._clock(), 6)
        t0, self._host_t = t if self._host_t is None else self._host_t, t
        return Sample(t=t, t0=t0, device=len(self._slots), values=values)

    # ---- what is told ------------------------------------------------------------------------------------------------

    def _news(self) -> Devices | None:
        """The devices, if anything in them is other than it was told."""
        devices = [describe(slot, self.nvml, self._used) for slot in self._slots]
        devices.append(describe_host(self._host, self._used))
        state = (self.nvml.state, self.nvml.message)
        if devices == self._told and state == self._told_state:
            return None
        self._told, self._told_state = devices, state
        return Devices(devices=devices, state=state[0], message=state[1])
