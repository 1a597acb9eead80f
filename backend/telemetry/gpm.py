"""NVML's GPM counters, Hopper and newer: the one real reading of a GPU's memory bandwidth.

A value is an average between two samples, so a pair of them is kept and one is taken anew each time. Under 100 ms
apart a value is not defined. A sample that could not be taken leaves the pair as it is: the next one speaks for a
longer time and is still right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend.telemetry.nvml import Nvml
from backend.telemetry.readings import DeviceLost, LibraryGone, ReadError

LEAST_S = 0.1
PROBES = 2  # pairs that may give nothing before the counters count as absent, whatever the driver claims

SM_ACTIVE, SM_OCCUPANCY, TENSOR_ACTIVE, DRAM_BANDWIDTH = 2, 3, 5, 10
PCIE_TX, PCIE_RX, NVLINK_RX, NVLINK_TX = 20, 21, 60, 61
METRICS = (SM_ACTIVE, SM_OCCUPANCY, TENSOR_ACTIVE, DRAM_BANDWIDTH, PCIE_TX, PCIE_RX, NVLINK_RX, NVLINK_TX)
MIB_PER_S = {PCIE_TX, PCIE_RX, NVLINK_RX, NVLINK_TX}  # the others are percent


@dataclass(slots=True)
class Pair:
    """Averages over [t0, t1]: the metric's own unit, or the error that stands for it."""

    t0: float
    t1: float
    values: dict[int, float | ReadError]

    def value(self, metric: int) -> float:
        value = self.values[metric]
        if isinstance(value, ReadError):
            raise value
        return value


class Gpm:
    """`take(sample)` fills one of the two samples; for a MIG device that asks the parent for the instance's."""

    def __init__(self, nvml: Nvml, handle: object, take: Callable[[Any], None], clock: Callable[[], float]):
        self._nvml, self._take, self._clock = nvml, take, clock
        self._samples: list[Any] = []
        self._older_t: float | None = None
        if not nvml.ask("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice:
            raise ReadError("this GPU has no GPM counters", lasting=True)
        self._samples = [nvml.ask("nvmlGpmSampleAlloc") for _ in range(2)]
        self._request = nvml.api.c_nvmlGpmMetricsGet_t()  # some kilobytes: made once
        self._request.version = nvml.api.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(METRICS)
        for i, metric in enumerate(METRICS):
            self._request.metrics[i].metricId = metric

    def probe(self, pause: Callable[[float], object]) -> None:
        """Takes real pairs, since support may be claimed and still fail. Raises ReadError when none gives a value."""
        reason = "no pair of samples could be taken"
        for _ in range(PROBES):
            try:
                self.read()
                pause(1.2 * LEAST_S)
                pair = self.read()
            except (DeviceLost, LibraryGone):
                raise
            except ReadError as error:
                reason = error.reason
                continue
            errors = [value for value in pair.values.values() if isinstance(value, ReadError)] if pair else []
            if pair and len(errors) < len(pair.values):
                return
            reason = errors[0].reason if errors else reason
        raise ReadError(f"this GPU claims GPM counters and gives none ({reason})", lasting=True)

    def forget(self) -> None:
        """Begins anew: the next value shall not speak for a time in which nobody looked."""
        self._older_t = None

    def read(self) -> Pair | None:
        """The averages since the last reading; None for the first, and for one that comes too early."""
        older, newer = self._samples
        t0 = self._older_t
        if t0 is not None and self._clock() - t0 <= LEAST_S:
            return None
        before = self._clock()
        self._take(newer)  # when this raises, the pair stays as it is
        self._older_t = (before + self._clock()) / 2
        self._samples.reverse()
        if t0 is None:
            return None
        self._request.sample1, self._request.sample2 = older, newer
        self._nvml.ask("nvmlGpmMetricsGet", self._request)
        return Pair(t0, self._older_t, {metric: self._value(i) for i, metric in enumerate(METRICS)})

    def _value(self, index: int) -> float | ReadError:
        metric = self._request.metrics[index]
        if metric.nvmlReturn:
            return self._nvml.error(metric.nvmlReturn)
        if not math.isfinite(metric.value) or not 0 <= metric.value < 2**46:  # 2^47 and up: blank by convention
            return ReadError("the driver gave no number")
        return metric.value

    def close(self) -> None:
        for sample in self._samples:
            try:
                self._nvml.ask("nvmlGpmSampleFree", sample)
            except ReadError:  # with the library gone its memory is gone too
                pass
        self._samples = []
