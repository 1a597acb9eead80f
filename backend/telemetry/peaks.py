"""What a device may reach at most, beside what was measured: the theoretical peak and the data sheet's figures.

A peak that is not plausible beside the measurement is shown as such and never used: drivers and libraries have told
wrong bus widths, and a second factor 2. On a processor's own memory nothing is known but the measurement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from backend.planner.errors import UnsupportedDtype
from backend.telemetry.identity import data_sheet

if TYPE_CHECKING:
    from backend.events import Device
    from backend.telemetry.ceiling import Ceilings

ABOVE, FAR = 1.02, 2.5  # measured <= 1.02 × peak, and peak <= 2.5 × measured


class Peak(msgspec.Struct, kw_only=True, frozen=True):
    of: str  # bandwidth | arithmetic
    value: float
    unit: str  # B/s | FLOP/s
    kind: str  # theoretical | data sheet
    source: str
    accepted: bool  # plausible beside the measurement
    note: str = ""


def beside(measured: Ceilings, device: Device | None) -> list[Peak]:
    """Peaks of the device that `measured` is of, as NVML described it; [] for a CPU."""
    if device is None or device.kind != "gpu" or device.fake:
        return []
    found = []
    copy, matmul = max(measured.copy.value, measured.read.value), measured.matmul.value
    if device.peak_bandwidth_bytes_per_s and device.peak_source.startswith("theoretical"):
        found.append(_checked("bandwidth", device.peak_bandwidth_bytes_per_s, "theoretical", device.peak_source, copy))
    sheet = data_sheet(device.name, device.memory_bytes)
    if sheet is None:
        return found
    source = f"{sheet.name}: {sheet.source}"
    found.append(_checked("bandwidth", sheet.bandwidth_bytes_per_s, "data sheet", source, copy))
    try:
        rate = sheet.rate(measured.conditions.dtype)
    except UnsupportedDtype:
        return found
    found.append(_checked("arithmetic", rate, "data sheet", f"{source}; dense", matmul))
    return found


def _checked(of: str, value: float, kind: str, source: str, measured: float) -> Peak:
    note = ""
    if measured > ABOVE * value:
        note = f"below what was measured ({measured / value:.2f} ×): not used"
    elif value > FAR * measured:
        note = f"{value / measured:.1f} × what was measured: not used"
    unit = "B/s" if of == "bandwidth" else "FLOP/s"
    return Peak(of=of, value=value, unit=unit, kind=kind, source=source, accepted=not note, note=note)
