"""One thread a process that reads the hardware while somebody looks or the engine works, and sleeps otherwise.

NVML is touched by this thread and no other. A call that hangs, hangs here: readers see the age of the last sample, and
the engine never waits for one. ctypes lets go of the interpreter during a call, so a slow one costs the engine nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable

from backend.events import Devices, Sample
from backend.telemetry.machine import Machine
from backend.telemetry.readings import FAST_S
from backend.telemetry.ring import Ring

log = logging.getLogger("kvscope.telemetry")

LEAST_S, MOST_S = 0.1, 10.0
LEASE_S = 10.0  # without a viewer for so long and without work, nothing is read
ASLEEP_S = 1.0  # how often a sleeping sampler looks whether there is work
JOIN_S = 2.0
Emit = Callable[[Devices | Sample, float], None]  # the event and the moment it is of

_samplers: weakref.WeakSet[Sampler] = weakref.WeakSet()


class Sampler:
    """`emit(event, t)` takes what is told, from the sampler's thread. `busy()`: does the engine work?

    `clock`: the engine's, in seconds. The thread starts with the first `watch` or work, and only once.
    """

    def __init__(
        self,
        emit: Emit,
        *,
        clock: Callable[[], float] = time.perf_counter,
        busy: Callable[[], bool] = lambda: False,
        used: Collection[str] = (),
        fast_s: float = FAST_S,
        lease_s: float = LEASE_S,
    ):
        if not LEAST_S <= fast_s <= MOST_S:
            raise ValueError(f"readings come every {LEAST_S:g} to {MOST_S:g} s, not every {fast_s:g} s")
        self.ring = Ring()
        self.skipped_ticks = 0  # that came too late, because a reading or the machine took long
        self._emit, self._clock, self._busy = emit, clock, busy
        self._used, self._fast_s, self.lease_s = tuple(used), fast_s, lease_s
        self._wake = threading.Condition()
        self._closing = False
        self._leases: dict[str, float] = {}  # panel, "" for any page -> until when
        self._thread: threading.Thread | None = None
        self._awake = False
        self._tick_began: float | None = None
        _samplers.add(self)

    # ---- for anybody -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, asleep. Harmless when it runs or was closed."""
        with self._wake:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
                self._thread.start()

    def watch(self, panels: Iterable[str] = ()) -> None:
        """Somebody looks, for `lease_s` from now; at `panels` too, whose readings take long."""
        until = time.monotonic() + self.lease_s
        with self._wake:
            for panel in ("", *panels):
                self._leases[panel] = until
            self._wake.notify_all()
        self.start()

    @property
    def awake(self) -> bool:
        return self._awake

    @property
    def age_s(self) -> float | None:
        """Since the last sample; None when there was none."""
        t = self.ring.newest_t()
        return None if t is None else max(0.0, self._clock() - t)

    @property
    def hung_s(self) -> float:
        """For how long the present reading has not come back; 0 when none is under way."""
        began = self._tick_began
        return 0.0 if began is None else time.monotonic() - began

    def latest(self) -> list[dict[str, dict[str, float]]]:
        return self.ring.latest(self._clock())

    def close(self) -> None:
        """Ends the thread, frees the counters and closes the library. A call that hangs is left behind."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        machine = Machine(self._clock, self._pause, used=self._used, fast_s=self._fast_s)
        try:
            while self._sleep_until_wanted():
                self._sample_while_wanted(machine)
        except Exception:  # a defect of ours must not take the engine with it
            log.exception("the hardware is no longer read")
        finally:
            machine.close()

    def _sleep_until_wanted(self) -> bool:
        """False: closing."""
        with self._wake:
            while not self._closing and not self._wanted():
                self._wake.wait(ASLEEP_S)
            return not self._closing

    def _wanted(self) -> bool:
        return self._leases.get("", 0.0) > time.monotonic() or self._busy()

    def _sample_while_wanted(self, machine: Machine) -> None:
        machine.wake()
        self._awake = True
        due = time.monotonic()
        while not self._closing and self._wanted():
            self._tick_began = now = time.monotonic()
            for event in machine.tick([panel for panel, until in self._leases.items() if until > now]):
                t = event.t or self._clock()
                self.ring.add(event)
                self._emit(event, t)
            self._tick_began = None
            due += machine.period_s
            late = time.monotonic() - due
            if late > 0:
                missed = int(late / machine.period_s) + 1
                self.skipped_ticks += missed
                due += missed * machine.period_s
            self._pause(due - time.monotonic())
        self._awake = False

    def _pause(self, seconds: float) -> None:
        """Waits, unless the sampler is being closed."""
        until = time.monotonic() + seconds
        with self._wake:
            while not self._closing and (left := until - time.monotonic()) > 0:
                self._wake.wait(left)

    def _forked(self) -> None:
        """In a child process: the thread is not here, and neither is an open library."""
        self._wake = threading.Condition()
        self._thread, self._leases, self._tick_began, self._awake = None, {}, None, False
        self.ring = Ring()


def _close_all() -> None:
    for sampler in list(_samplers):
        sampler.close()


def _reset_all() -> None:
    for sampler in list(_samplers):
        sampler._forked()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
