"""How long a forward pass took, without making the host wait for it."""

from __future__ import annotations

import time

import torch


class ForwardTimer:
    """Seconds of a forward pass: by the host's clock on the CPU; on a GPU, which the host only launches for, by two
    events that are read once the tokens are there, so that a step waits for the GPU in one place."""

    def __init__(self, device: torch.device):
        self._events = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._start = time.perf_counter()

    def stop(self) -> None:
        self._stop = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Waits for the pass where nobody has done so yet. Launching may take longer than computing."""
        host_s = self._stop - self._start
        if not self._events:
            return host_s
        self._events[1].synchronize()
        return max(host_s, self._events[0].elapsed_time(self._events[1]) / 1e3)
