"""What every fake machine must show, word for word: expected/<machine>.txt, one line a reading.

python -m tests.telemetry.golden        writes them anew; read the difference before you believe it
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from backend.telemetry import identity
from tests.nvml import library
from tests.telemetry.conftest import Box, Told

FOLDER = Path(__file__).parent / "expected"
MACHINES = sorted(path.stem for path in library.MACHINES.glob("*.txt"))
OF_THIS_MACHINE = {"gb10", "orin"}  # their memory is the machine's own, whatever that is
MOVING = {"energy", "sm_clock"}


def read(box: Box, ticks: int = 6) -> Told:
    for _ in range(ticks):
        if any("gpm_supported 1" in f"{key} {value}" for key, value in box.script.lines.items()):
            time.sleep(0.105)  # on the library's own clock, GPM pairs are at least 100 ms apart
        box.tick(seconds=0.5)
    return box.told


def render(told: Told, machine: str) -> str:
    devices = told.devices
    lines = [f"library: {devices.state}{': ' if devices.message else ''}{devices.message}"]
    for index, device in enumerate(devices.devices):
        if device.kind == "host":
            continue
        shared = machine in OF_THIS_MACHINE
        size = "of this machine" if shared else f"{device.memory_bytes}"
        peak = f"{device.peak_bandwidth_bytes_per_s / 1e9:.1f} GB/s, {device.peak_source}"
        lines += [
            "",
            f"{device.name} | {device.uuid} | {device.arch} | {device.state} | {'fake' if device.fake else 'real'}",
            f"memory: {size} | peak: {peak if device.peak_source else 'not known'}",
            *(f"note: {note}" for note in device.notes),
            *(f"process: {p.pid} | {p.memory_bytes}" for p in device.processes),
            *([f"processes: {device.processes_note}"] if device.processes_note else []),
        ]
        values = told.values(index)
        for sensor in device.sensors:
            value = values.get(sensor.name)
            if sensor.name in MOVING or (shared and sensor.name == "memory_used"):
                value = None if value is None else "moves"
            shown = "-" if value is None or sensor.note else f"{value} {sensor.unit}"
            lines.append(f"{sensor.name} | {shown} | {sensor.source} | {sensor.label}")
    return "\n".join(lines) + "\n"


def main() -> None:
    import pynvml

    FOLDER.mkdir(exist_ok=True)
    for machine in MACHINES:
        with tempfile.TemporaryDirectory() as folder:
            os.environ.update(library.variables(machine, Path(folder)))
            pynvml.nvmlLib = None
            pynvml._nvmlGetFunctionPointer_cache.clear()
            identity.on_wsl = lambda machine=machine: machine == "wsl2"
            box = Box(library.Script(Path(folder) / f"{machine}.txt"))
            (FOLDER / f"{machine}.txt").write_text(render(read(box), machine))
            box.machine.close()


if __name__ == "__main__":
    main()
