"""Work that is known exactly, for a GPU's counters to be held against."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PERIOD_S = 0.02


class Copies:
    """Copies in device memory, at a share of the time. `moved` counts bytes read and written."""

    def __init__(self, device: str, size: int | None = None):
        import torch

        self.torch, self.on_gpu = torch, device.startswith("cuda")
        size = size or (2**30 if self.on_gpu else 2**24)
        self.source = torch.ones(size, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)
        self.copy()  # pages are taken, clocks wake

    def copy(self) -> int:
        """Bytes moved by one copy, done when it returns."""
        self.target.copy_(self.source)
        if self.on_gpu:
            self.torch.cuda.synchronize()
        return 2 * self.source.numel()

    def run(self, seconds: float, duty: float) -> int:
        """Copies for `duty` of every period; returns the bytes moved."""
        moved, end = 0, time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            busy_until = now + duty * PERIOD_S
            while time.perf_counter() < busy_until:
                moved += self.copy()
            if duty < 1:
                # A copy may overrun its share: the pause follows what was really taken.
                taken = time.perf_counter() - now
                time.sleep(max(0.0, taken / duty - taken))
        return moved


@contextmanager
def in_background(work) -> Iterator[None]:
    """`work(stop)` in a thread, told to stop at the end."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def busy(device: str):
    """Matrix products until told to stop: full power."""
    import torch

    size = 8192 if device.startswith("cuda") else 256
    a = torch.full(
        (size, size), 1 / 64, dtype=torch.bfloat16 if device.startswith("cuda") else torch.float32, device=device
    )

    def work(stop: threading.Event) -> None:
        while not stop.is_set():
            a @ a
            if device.startswith("cuda"):
                torch.cuda.synchronize()

    return work
