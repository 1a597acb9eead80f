"""What a GPU is: name, memory, whether it is a slice of one, a guest's or one that shares the machine's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from backend.planner import accelerators
from backend.planner.errors import CatalogueError, UnknownName
from backend.telemetry.nvml import Nvml
from backend.telemetry.readings import DeviceLost, LibraryGone, ReadError

ARCHITECTURES = {
    2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper",
    10: "Blackwell", 13: "Rubin",
}  # fmt: skip
HOPPER, AMPERE, VOLTA = 9, 7, 5
VGPU_GUEST = 2
# Parts whose GPU uses the machine's own memory. Grace-Hopper is none: its addresses are shared, its HBM is not.
SHARED_MEMORY_NAMES = ("GB10", "Thor", "Orin", "Tegra", "Jetson", "Xavier")
CLOCK_MEM = 2
_DRIVER_WORDS = {
    "NVIDIA": "", "GeForce": "", "Tesla": "", "HBM3e": "SXM", "HBM3": "SXM", "SXM4": "SXM", "SXM5": "SXM",
    "Generation": "", "GPU": "",
}  # fmt: skip
PLAUSIBLE = (0.6, 1.67)  # NVML's own peak against the data sheet: outside, a driver told a wrong width or clock


@dataclass(slots=True)
class Identity:
    uuid: str
    handle: object  # of the device itself: for a slice, of the slice
    parent: object  # of the whole card
    name: str
    architecture: int = 0
    total_bytes: int = 0
    gpu_instance: int | None = None  # a MIG slice
    vgpu: bool = False
    shared_memory: bool = False
    wsl: bool = False
    peak_bytes_per_s: float = 0.0
    peak_source: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def mig(self) -> bool:
        return self.gpu_instance is not None

    @property
    def arch(self) -> str:
        return ARCHITECTURES.get(self.architecture, "")


def identify(nvml: Nvml, handle: object, uuid: str, parent: object | None = None) -> Identity:
    """Raises DeviceLost or LibraryGone; whatever else is not known stays empty."""
    name = nvml.text("nvmlDeviceGetName", handle, default="NVIDIA GPU (name unreadable)")
    found = Identity(uuid, handle, parent or handle, name, wsl=on_wsl())
    found.architecture = nvml.number("nvmlDeviceGetArchitecture", found.parent) or 0
    found.vgpu = nvml.number("nvmlDeviceGetVirtualizationMode", found.parent) == VGPU_GUEST
    if parent is not None:
        found.gpu_instance = nvml.number("nvmlDeviceGetGpuInstanceId", handle)
        found.notes.append("a MIG slice: power, clocks and temperature are those of the whole card")
    found.total_bytes, memory_known = _memory(nvml, handle)
    named = any(word in name for word in SHARED_MEMORY_NAMES)
    found.shared_memory = not found.mig and (named or not memory_known)
    if found.shared_memory:
        import psutil

        found.total_bytes = psutil.virtual_memory().total
        found.notes.append("shares the machine's memory: sizes are the operating system's")
    if found.vgpu:
        found.notes.append("a virtual GPU's guest: the host keeps most counters to itself")
    if found.wsl:
        found.notes.append("under WSL2: Windows owns the GPU, and some readings do not come through")
    _peak(nvml, found)
    return found


def on_wsl() -> bool:
    try:
        return "microsoft" in Path("/proc/sys/kernel/osrelease").read_text().lower()
    except OSError:
        return False


def _memory(nvml: Nvml, handle: object) -> tuple[int, bool]:
    """(bytes, whether the driver knows memory of its own). A reading that may not be made says nothing about that."""
    known = False
    for version in (nvml.api.nvmlMemory_v2, None):
        try:
            return nvml.ask("nvmlDeviceGetMemoryInfo", handle, version).total, True
        except (DeviceLost, LibraryGone):
            raise
        except ReadError as error:
            known = known or not error.lasting or "permission" in error.reason
    return 0, known


def _peak(nvml: Nvml, found: Identity) -> None:
    """Theoretical peak by NVML's own clock and width (one factor 2 for every kind of memory), else the data sheet's."""
    if found.mig:
        found.notes.append("memory bandwidth as a share only: what a slice may reach at most is not told")
        return
    sheet = data_sheet(found.name, 0 if found.shared_memory or found.vgpu else found.total_bytes)
    clock = nvml.number("nvmlDeviceGetMaxClockInfo", found.handle, CLOCK_MEM)
    width = nvml.number("nvmlDeviceGetMemoryBusWidth", found.handle)
    if clock and width and not found.shared_memory:
        peak = 2 * clock * 1e6 * width / 8
        if sheet is None or PLAUSIBLE[0] <= peak / sheet.bandwidth_bytes_per_s <= PLAUSIBLE[1]:
            found.peak_bytes_per_s = peak
            found.peak_source = f"theoretical: 2 × {clock} MHz × {width} bit / 8, both from NVML"
            return
        found.notes.append(
            f"NVML's clock and bus width would make {peak / 1e9:.0f} GB/s; the data sheet says "
            f"{sheet.bandwidth_bytes_per_s / 1e9:.0f} GB/s and is used"
        )
    if sheet is not None:
        found.peak_bytes_per_s = sheet.bandwidth_bytes_per_s
        found.peak_source = f"data sheet: {sheet.name}"


def data_sheet(name: str, memory_bytes: int = 0) -> accelerators.Accelerator | None:
    """The catalogue's row for a device as its driver names it; None where none fits, or its memory is another."""
    words = name
    for driver, catalogue in _DRIVER_WORDS.items():
        words = words.replace(driver, catalogue)
    try:
        row = accelerators.find(words.strip())
    except (UnknownName, CatalogueError):
        return None
    return row if not memory_bytes or 0.85 <= memory_bytes / row.memory_bytes <= 1.15 else None
