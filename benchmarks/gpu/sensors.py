"""Part 1 of the GPU checks: NVML against work whose bytes and times are known."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from benchmarks.gpu.load import Copies, busy, in_background
from benchmarks.gpu_check import Check

POWER_INSTANT = 186
CALLS = [  # function, further arguments
    ("nvmlDeviceGetName",), ("nvmlDeviceGetUUID",), ("nvmlDeviceGetArchitecture",), ("nvmlDeviceGetMemoryBusWidth",),
    ("nvmlDeviceGetMaxClockInfo", 2), ("nvmlDeviceGetClockInfo", 1), ("nvmlDeviceGetClockInfo", 2),
    ("nvmlDeviceGetUtilizationRates",), ("nvmlDeviceGetMemoryInfo",), ("nvmlDeviceGetMemoryInfo", 0x02000028),
    ("nvmlDeviceGetPowerUsage",), ("nvmlDeviceGetEnforcedPowerLimit",), ("nvmlDeviceGetTotalEnergyConsumption",),
    ("nvmlDeviceGetTemperatureV", 0), ("nvmlDeviceGetTemperature", 0), ("nvmlDeviceGetCurrentClocksEventReasons",),
    ("nvmlDeviceGetPcieThroughput", 0), ("nvmlDeviceGetComputeRunningProcesses",), ("nvmlDeviceGetMigMode",),
    ("nvmlDeviceGetVirtualizationMode",), ("nvmlDeviceGetAddressingMode",), ("nvmlGpmQueryDeviceSupport",),
    ("nvmlDeviceGetFieldValues", [POWER_INSTANT, 82, 83, (138, 0xFFFFFFFF), (139, 0xFFFFFFFF), 197, 198]),
]  # fmt: skip


@contextmanager
def opened(device: str):
    """(pynvml, handle of the device that torch computes on)."""
    import pynvml
    import torch

    from backend.telemetry.nvml import Nvml
    from backend.telemetry.torch_device import used

    nvml = Nvml()
    if nvml.open() != "ready":
        raise RuntimeError(f"NVML: {nvml.message}")
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for uuid in used(torch.device(device)):
            if uuid.startswith("GPU-"):
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        yield pynvml, handle
    finally:
        nvml.close()


def calls(device: str) -> dict[str, Any]:
    from importlib.metadata import version

    found: dict[str, Any] = {}
    with opened(device) as (pynvml, handle):
        for function, *arguments in CALLS:
            took, answer = [], ""
            for _ in range(5):
                start = time.perf_counter()
                try:
                    answer = _plain(getattr(pynvml, function)(handle, *arguments))
                except Exception as error:  # which error is what is asked
                    answer = f"{type(error).__name__}: {error}"
                took.append((time.perf_counter() - start) * 1e6)
            name = f"{function}({', '.join(map(str, arguments))})"
            found[name] = {
                "answer": answer,
                "first_us": round(took[0], 1),
                "median_us": round(statistics.median(took), 1),
            }
        driver, nvml = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetNVMLVersion()
    slow = {name: f["median_us"] for name, f in found.items() if f["median_us"] > 5000}
    return {
        "nvidia_ml_py": version("nvidia-ml-py"),
        "driver": driver,
        "nvml": nvml,
        "calls": found,
        "in_words": f"driver {driver}; calls over 5 ms: {slow or 'none'}",
    }


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | type(None)):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(value, "fieldId"):
        return {"field": value.fieldId, "code": value.nvmlReturn, "type": value.valueType, "value": value.value.ullVal}
    if hasattr(value, "_fields_"):
        return {name: _plain(getattr(value, name)) for name, *_ in value._fields_}
    try:
        return [_plain(item) for item in value]
    except TypeError:
        return str(value)


def sensors(device: str) -> dict[str, Any]:
    import msgspec
    import torch

    from backend.telemetry import report
    from backend.telemetry.torch_device import used

    look = report.look(used(torch.device(device)))
    lines = list(report.lines(look))
    ours = next((d for d in look.devices.devices if d.used), None)
    peak = ours.peak_bandwidth_bytes_per_s if ours else 0.0
    which = f"found: {ours.name}" if ours else "NOT found by UUID"
    words = f"the device that torch uses is {which}, peak {peak / 1e9:.1f} GB/s"
    return {"look": msgspec.to_builtins(look), "lines": lines, "in_words": words}


def ceilings(device: str) -> dict[str, Any]:
    import msgspec
    import torch

    from backend.telemetry import ceiling, peaks, report
    from backend.telemetry.torch_device import used

    found = ceiling.measure(device, "bfloat16", working_set_bytes=None if device.startswith("cuda") else 2**26)
    ours = next((d for d in report.look(used(torch.device(device))).devices.devices if d.used), None)
    beside = peaks.beside(found, ours)
    words = (
        f"copy {found.copy.value / 1e9:.0f} GB/s, read {found.read.value / 1e9:.0f} GB/s ({found.read.way}), "
        f"multiply {found.matmul.value / 1e12:.1f} TFLOP/s; "
        + "; ".join(f"{p.kind} {p.of} {p.value:.4g} {'accepted' if p.accepted else p.note}" for p in beside)
    )
    return {"ceilings": msgspec.to_builtins(found), "beside": msgspec.to_builtins(beside), "in_words": words}


class _Pairs:
    """GPM pairs as the driver gives them, without the rules of `backend.telemetry.gpm`."""

    def __init__(self, pynvml, handle, metric: int = 10):
        self.pynvml, self.handle = pynvml, handle
        self.samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self.request = pynvml.c_nvmlGpmMetricsGet_t()
        self.request.version, self.request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 1
        self.request.metrics[0].metricId = metric

    def take(self) -> float:
        self.samples.reverse()
        self.pynvml.nvmlGpmSampleGet(self.handle, self.samples[1])
        return time.perf_counter()

    def value(self) -> float | str:
        self.request.sample1, self.request.sample2 = self.samples
        try:
            self.pynvml.nvmlGpmMetricsGet(self.request)
        except self.pynvml.NVMLError as error:
            return str(error)
        metric = self.request.metrics[0]
        if metric.nvmlReturn:
            return f"metric error {metric.nvmlReturn}"
        return metric.value if math.isfinite(metric.value) else str(metric.value)

    def free(self) -> None:
        for sample in self.samples:
            self.pynvml.nvmlGpmSampleFree(sample)


def gpm_duty(device: str) -> dict[str, Any]:
    """The counter's percent of the peak against bytes that were really copied."""
    from backend.telemetry.identity import identify
    from backend.telemetry.nvml import Nvml

    copies, rows = Copies(device), []
    with opened(device) as (pynvml, handle):
        nvml = Nvml()
        nvml.open()
        peak = identify(nvml, handle, "").peak_bytes_per_s
        pairs = _Pairs(pynvml, handle)
        for duty in (0.1, 0.5, 1.0):
            copies.run(0.5, duty)
            start = pairs.take()
            moved = copies.run(3.0, duty)
            seconds = pairs.take() - start
            percent = pairs.value()
            rate = moved / seconds
            row = {"duty": duty, "copied_bytes_per_s": rate, "gpm_percent": percent}
            if isinstance(percent, float):
                row |= {"gpm_bytes_per_s": percent / 100 * peak, "gpm_over_copied": percent / 100 * peak / rate}
            rows.append(row)
        pairs.free()
        nvml.close()
    ratios = [round(row["gpm_over_copied"], 3) for row in rows if "gpm_over_copied" in row]
    return {"peak_bytes_per_s": peak, "rows": rows, "in_words": f"GPM / copied at 10, 50, 100 % duty: {ratios}"}


def gpm_spacing(device: str) -> dict[str, Any]:
    """What comes back from pairs that are closer than the header allows."""
    copies, found = Copies(device), {}

    def work(stop) -> None:
        while not stop.is_set():
            copies.copy()

    with opened(device) as (pynvml, handle), in_background(work):
        pairs = _Pairs(pynvml, handle)
        for spacing_ms in (20, 60, 90, 100, 110, 150, 200, 500):
            values = []
            pairs.take()
            for _ in range(5 if spacing_ms > 100 else 8):
                time.sleep(spacing_ms / 1e3)
                pairs.take()
                values.append(pairs.value())
            found[spacing_ms] = values
        pairs.free()
    words = {ms: [round(v, 1) if isinstance(v, float) else v for v in values[:3]] for ms, values in found.items()}
    return {"values_by_spacing_ms": found, "in_words": f"first values by spacing in ms: {words}"}


def energy_steps(device: str) -> dict[str, Any]:
    """How often the energy counter moves, asked as fast as it answers."""
    with opened(device) as (pynvml, handle), in_background(busy(device)):
        moments, last, asked = [], None, 0
        end = time.perf_counter() + 4
        while time.perf_counter() < end:
            asked += 1
            value = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            if value != last:
                moments.append((time.perf_counter(), value))
                last = value
    gaps = [b[0] - a[0] for a, b in pairwise(moments)][1:]
    watts = [(b[1] - a[1]) / 1e3 / (b[0] - a[0]) for a, b in pairwise(moments)][1:]
    if not gaps:
        return {"asked": asked, "in_words": "the counter did not move"}
    return {
        "asked": asked,
        "update_s": {"median": statistics.median(gaps), "least": min(gaps), "most": max(gaps)},
        "watts": {"median": statistics.median(watts), "least": min(watts), "most": max(watts)},
        "in_words": f"every {statistics.median(gaps) * 1e3:.1f} ms ({min(gaps) * 1e3:.1f}–{max(gaps) * 1e3:.1f})",
    }


def power_square(device: str) -> dict[str, Any]:
    """Instant power, average power and the energy counter while work goes on and off every second."""
    work, rows = busy(device), []
    with opened(device) as (pynvml, handle):
        start = time.perf_counter()
        for number in range(6):
            on = number % 2 == 0
            if on:
                with in_background(work):
                    _watch_power(pynvml, handle, 1.0, start, on, rows)
            else:
                _watch_power(pynvml, handle, 1.0, start, on, rows)

    def mean(name: str, on: bool) -> float | None:
        late = [row[name] for row in rows if row["on"] is on and row["since_s"] > 0.5 and row[name] is not None]
        return statistics.mean(late) if late else None

    halves = {name: {"on": mean(name, True), "off": mean(name, False)} for name in ("instant_w", "average_w")}
    return {"rows": rows, "second_half_means": halves, "in_words": f"second half of each second: {halves}"}


def _watch_power(pynvml, handle, seconds: float, start: float, on: bool, rows: list) -> None:
    begun = time.perf_counter()
    while (now := time.perf_counter()) < begun + seconds:
        field = pynvml.nvmlDeviceGetFieldValues(handle, [POWER_INSTANT])[0]
        try:
            average = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
        except pynvml.NVMLError:
            average = None
        instant = None if field.nvmlReturn else field.value.uiVal / 1e3
        times = {"t_s": round(now - start, 4), "since_s": round(now - begun, 4)}
        rows.append({**times, "on": on, "instant_w": instant, "average_w": average})
        time.sleep(0.02)


CHECKS = [
    Check("calls", "every NVML call: what does it answer, how long does it take?", 10, calls),
    Check("sensors", "what does the telemetry of KVScope say of this machine?", 10, sensors),
    Check("ceilings", "measured roofs, and are theory and data sheet plausible beside them?", 30, ceilings),
    Check("gpm_duty", "is GPM's DRAM bandwidth linear in bytes that were really copied?", 20, gpm_duty),
    Check("gpm_spacing", "what comes back from GPM pairs closer than 100 ms?", 20, gpm_spacing),
    Check("energy_steps", "how often does the energy counter move?", 10, energy_steps),
    Check("power_square", "how far does power lag behind the load, instant and average?", 15, power_square),
]
