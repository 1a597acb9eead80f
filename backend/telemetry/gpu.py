"""The readings of one GPU: which there are, how each is asked, and what stands beside it.

Each reading has its ways in order (the ladder of `readings`); one that the device does not know is dropped for good and
the next is tried. Nothing here is drawn from a data sheet, and nothing is filled in.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil

from backend.events import Process
from backend.telemetry import gpm, readings
from backend.telemetry.dcgm import Exporter
from backend.telemetry.gpm import Gpm, Pair
from backend.telemetry.identity import AMPERE, HOPPER, VOLTA, Identity
from backend.telemetry.nvml import Nvml
from backend.telemetry.readings import FAST_S, SLOW_S, ReadError, Reading, Way, absent

POWER_INSTANT, MEMORY_TEMPERATURE, NVLINK_TX_KIB, NVLINK_RX_KIB = 186, 82, 138, 139
ALL_LINKS = 0xFFFFFFFF  # the field's scope for the sum over all links
CLOCK_SM, CLOCK_MEM = 1, 2
PCIE_TX, PCIE_RX = 0, 1
MIB, KIB = 2**20, 2**10
PID_LIMIT = 2**22  # Linux's own: a pid beyond it is a struct of another version


class Gpu:
    """One GPU or one slice of it. `pause(seconds)` waits, and may be cut short."""

    def __init__(
        self,
        nvml: Nvml,
        identity: Identity,
        clock: Callable[[], float],
        pause: Callable[[float], object],
        fast_s: float = FAST_S,
        exporter: Exporter | None = None,
    ):
        self._nvml, self.identity, self._clock, self._fast_s = nvml, identity, clock, fast_s
        self._exporter = exporter
        self._asked: dict[str, object] = {}  # answers of this tick that more than one reading is drawn from
        self._pair: Pair | ReadError | None = None
        self._counters: dict[int, tuple[float, float]] = {}
        self._gpm, self.gpm_reason = self._open_gpm(pause)
        self.readings = self._readings()
        self.processes: list[Process] = []
        self.processes_note = ""

    # ---- a tick ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Once a tick, before any reading. Raises DeviceLost, LibraryGone."""
        self._asked.clear()
        if self._gpm is None:
            return
        try:
            self._pair = self._gpm.read()
        except (readings.DeviceLost, readings.LibraryGone):
            raise
        except ReadError as error:  # it worked when it was probed: this time only
            self._pair = ReadError(error.reason)

    def forget(self) -> None:
        """What comes next shall not speak for a time in which nothing was read."""
        self._counters.clear()
        if self._gpm is not None:
            self._gpm.forget()

    @property
    def pair_seconds(self) -> tuple[float, float] | None:
        """The interval that this tick's GPM values speak for."""
        return (self._pair.t0, self._pair.t1) if isinstance(self._pair, Pair) else None

    def read_processes(self) -> None:
        """Who computes here and with how much memory. Raises DeviceLost, LibraryGone."""
        try:
            found = self._nvml.ask("nvmlDeviceGetComputeRunningProcesses", self.identity.handle)
        except (readings.DeviceLost, readings.LibraryGone):
            raise
        except ReadError as error:
            reason = "this driver lists no processes" if error.lasting else error.reason
            self.processes, self.processes_note = [], reason
            return
        total = self.identity.total_bytes or 2**63
        sound = [p for p in found if 0 < p.pid < PID_LIMIT and (p.usedGpuMemory or 0) <= total]
        self.processes = [
            Process(pid=p.pid, name=_name(p.pid), memory_bytes=p.usedGpuMemory)
            for p in sorted(sound, key=lambda p: -(p.usedGpuMemory or 0))
        ]
        self.processes_note = "" if len(sound) == len(found) else "the driver gave process entries that make no sense"

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()

    # ---- what there is to read ---------------------------------------------------------------------------------------

    def _open_gpm(self, pause: Callable[[float], object]) -> tuple[Gpm | None, str]:
        me = self.identity
        if me.architecture and me.architecture < HOPPER:
            return None, readings.NEEDS_HOPPER
        if me.mig:

            def take(sample: object) -> None:
                self._nvml.ask("nvmlGpmMigSampleGet", me.parent, me.gpu_instance, sample)
        else:

            def take(sample: object) -> None:
                self._nvml.ask("nvmlGpmSampleGet", me.handle, sample)

        keeper = None
        try:
            keeper = Gpm(self._nvml, me.parent, take, self._clock)
            keeper.probe(pause)
        except (readings.DeviceLost, readings.LibraryGone):
            raise
        except ReadError as error:
            if keeper is not None:
                keeper.close()
            if me.vgpu:
                return None, f"a virtual GPU's guest gets no DRAM counters ({error.reason})"
            if me.shared_memory:
                return None, f"this GPU shares the machine's memory and has no DRAM counters ({error.reason})"
            return None, error.reason if me.architecture else readings.NEEDS_HOPPER
        return keeper, ""

    def _readings(self) -> list[Reading]:
        """In the order of the device's sensors. Fast ones move with the steps; slow ones hardly move."""
        me = self.identity
        shared = "memory is shared with the machine" if me.shared_memory else ""
        no_energy = "this GPU counts no energy (needs Volta or newer)" if 0 < me.architecture < VOLTA else ""
        instant = self._of_card(POWER_INSTANT, scale=1e-3)
        usage = self._of_card("nvmlDeviceGetPowerUsage", scale=1e-3)
        if self._averages_power:
            usage.label, usage.span_s = usage.label.replace(readings.NOW, readings.AVERAGE_1S), 1.0
        energy = self._of_card("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3, label=readings.COUNTER)
        limit = self._of_card("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3, label=readings.LIMIT)
        reserved = Way("nvml", readings.RESERVED, lambda: self._memory(2).reserved)
        clock, reasons = "nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocks{}Reasons"
        return [
            self._dram_bandwidth(),
            self._busy("memory_busy", readings.MEMORY_BUSY, "memory"),
            self._busy("gpu_busy", readings.GPU_BUSY, "gpu"),
            self._by_gpm("sm_active", gpm.SM_ACTIVE),
            self._by_gpm("sm_occupancy", gpm.SM_OCCUPANCY),
            self._by_gpm("tensor_active", gpm.TENSOR_ACTIVE),
            Reading("power", "W", [instant, usage]),
            Reading("energy", "J", [energy], missing=no_energy),
            Reading("sm_clock", "MHz", [self._of_card(clock, CLOCK_SM)]),
            Reading("memory_clock", "MHz", [self._of_card(clock, CLOCK_MEM)]),
            Reading("clock_reasons", "bits", [
                self._of_card(reasons.format(word)) for word in ("Event", "Throttle")
            ]),
            self._memory_used(),
            Reading("memory_reserved", "B", [] if shared else [reserved], SLOW_S, note=shared,
                    missing="this driver counts what it reserves as used"),
            Reading("temperature", "°C", [
                self._of_card(f"nvmlDeviceGetTemperature{version}", 0) for version in ("V", "")
            ], SLOW_S),
            Reading("memory_temperature", "°C", [self._of_card(MEMORY_TEMPERATURE)], SLOW_S),
            Reading("power_limit", "W", [limit], SLOW_S),
            self._pcie("pcie_tx", gpm.PCIE_TX, PCIE_TX),
            self._pcie("pcie_rx", gpm.PCIE_RX, PCIE_RX),
            self._nvlink("nvlink_tx", gpm.NVLINK_TX, NVLINK_TX_KIB),
            self._nvlink("nvlink_rx", gpm.NVLINK_RX, NVLINK_RX_KIB),
        ]  # fmt: skip

    def _of_card(self, question: str | int, *given: int, scale: float = 1, label: str = readings.NOW) -> Way:
        """By a function's name, or by a field's number; of the whole card, also where only a slice is ours."""
        card = self.identity.parent
        if self.identity.mig:
            label += ", of the whole card"
        if isinstance(question, int):
            return Way("nvml_field", label, lambda: self._field(card, question) * scale)
        return Way("nvml", label, lambda: self._number(card, question, *given) * scale)

    def _dram_bandwidth(self) -> Reading:
        """The ladder: NVML's counters, a DCGM exporter, or why there is neither. Never the share of busy time."""
        if self._gpm is not None:
            return Reading("dram_bandwidth", "%", [self._gpm_way(gpm.DRAM_BANDWIDTH)])
        exporter, uuid = self._exporter, self.identity.uuid
        if exporter is None:
            return absent("dram_bandwidth", "%", self.gpm_reason)
        way = Way("dcgm", readings.DCGM, lambda: exporter.dram_active_percent(uuid), None)
        return Reading("dram_bandwidth", "%", [way], SLOW_S)

    def _by_gpm(self, name: str, metric: int) -> Reading:
        if self._gpm is None:
            return absent(name, "%", self.gpm_reason.replace("DRAM counters", "such counters"))
        return Reading(name, "%", [self._gpm_way(metric)])

    def _gpm_way(self, metric: int) -> Way:
        scale = MIB if metric in gpm.MIB_PER_S else 1

        def read() -> float | None:
            if isinstance(self._pair, ReadError):
                raise ReadError(self._pair.reason)
            return self._pair.value(metric) * scale if self._pair else None

        return Way("nvml_gpm", readings.GPM.format(ms=self._fast_s * 1e3), read, None)

    def _busy(self, name: str, label: str, which: str) -> Reading:
        me = self.identity
        if me.mig:
            return absent(name, "%", "not reported on MIG")
        if me.shared_memory and which == "memory":
            return absent(name, "%", "on a GPU that shares the machine's memory this is 0 or missing, whatever happens")
        if me.wsl and which == "memory":
            return absent(name, "%", "under WSL2 this reading is 0 or an error, whatever happens")

        def read() -> float:
            rates = self._once("nvmlDeviceGetUtilizationRates", me.handle)
            return getattr(rates, which)

        return Reading(name, "%", [Way("nvml", label, read, 1.0)])

    def _memory_used(self) -> Reading:
        if self.identity.shared_memory:
            used = Way("proc", readings.SHARED_MEMORY, _system_memory_used)
            return Reading("memory_used", "B", [used], SLOW_S)
        return Reading("memory_used", "B", [
            Way("nvml", f"{readings.DRIVER}, reserved memory not counted", lambda: self._memory(2).used),
            Way("nvml", f"{readings.DRIVER}, with what the driver reserves", lambda: self._memory(1).used),
        ], SLOW_S)  # fmt: skip

    def _pcie(self, name: str, metric: int, direction: int) -> Reading:
        """By the counters where there are any; else by a call that waits 20 ms, only while somebody looks at it."""
        me = self.identity
        if self._gpm is not None:
            return Reading(name, "B/s", [self._gpm_way(metric)])
        if me.vgpu or me.mig:
            return absent(name, "B/s", f"PCIe traffic is not told to {'a MIG slice' if me.mig else 'a virtual GPU'}")
        waiting = self._of_card("nvmlDeviceGetPcieThroughput", direction, scale=1e3, label=readings.OVER_20MS)
        waiting.span_s = 0.02
        return Reading(name, "B/s", [waiting], SLOW_S, panel="pcie")

    def _nvlink(self, name: str, metric: int, counter: int) -> Reading:
        ways = [] if self._gpm is None else [self._gpm_way(metric)]
        if not self.identity.mig:
            ways.append(Way("nvml_field", readings.BETWEEN, lambda: self._rate(counter), None))
        note = "" if ways else "NVLink traffic is not told to a MIG slice"
        return Reading(name, "B/s", ways, missing="this GPU reports no NVLink", note=note)

    # ---- asking ------------------------------------------------------------------------------------------------------

    @property
    def _averages_power(self) -> bool:
        """From Ampere on the plain power reading is an average over a second; the header excepts GA100."""
        ga100 = self.identity.architecture == AMPERE and any(word in self.identity.name for word in ("A100", "A30"))
        return self.identity.architecture >= AMPERE and not ga100

    def _once(self, function: str, *arguments: object) -> object:
        """One call for all readings of a tick that are drawn from it; an error is shared too."""
        if function not in self._asked:
            try:
                self._asked[function] = self._nvml.ask(function, *arguments)
            except (readings.DeviceLost, readings.LibraryGone):
                raise
            except ReadError as error:
                self._asked[function] = error
        found = self._asked[function]
        if isinstance(found, ReadError):
            raise found
        return found

    def _number(self, handle: object, function: str, *arguments: object) -> int:
        return self._nvml.ask(function, handle, *arguments)

    def _memory(self, version: int) -> object:
        """Version 2 tells reserved memory apart. Where it fails in any way the first is asked: WSL2 knows only that."""
        wanted = self._nvml.api.nvmlMemory_v2 if version == 2 else None
        try:
            return self._nvml.ask("nvmlDeviceGetMemoryInfo", self.identity.handle, wanted)
        except (readings.DeviceLost, readings.LibraryGone):
            raise
        except ReadError as error:
            raise ReadError(error.reason, lasting=error.lasting or version == 2) from None

    def _field(self, handle: object, *field: int) -> float:
        (value,) = self._nvml.fields(handle, field if len(field) > 1 else field[0])
        if isinstance(value, ReadError):
            raise value
        return value

    def _rate(self, field_id: int) -> float | None:
        """Bytes per second from a counter in KiB; None for the first reading and when the counter began anew."""
        now, value = self._clock(), self._field(self.identity.parent, field_id, ALL_LINKS)
        before = self._counters.get(field_id)
        self._counters[field_id] = (now, value)
        if before is None or value < before[1] or now <= before[0]:
            return None
        return (value - before[1]) * KIB / (now - before[0])


def _system_memory_used() -> float:
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def _name(pid: int) -> str:
    """Of a process as seen from here: in a container the driver's pids are the host's, and then there is no name."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""
