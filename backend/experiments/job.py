"""Running an experiment in a thread: whoever looks at a page may come and go, the experiment goes on."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from backend.experiments import Experiment, ExperimentError, Partial, Progress, Result

log = logging.getLogger("kvscope.experiments")


class Busy(ExperimentError):
    """One experiment at a time: they would measure each other."""


class Job:
    """One run. All attributes may be read from any thread at any time."""

    def __init__(self, name: str, experiment: Experiment):
        self.name = name
        self.progress = Progress(0, 1, None, "starting")
        self.result: Result | None = None
        self.error = ""
        self.state = "running"  # running | done | stopped | failed
        self.started = time.monotonic()
        self.took_s: float | None = None
        self._stop = threading.Event()
        self._experiment = experiment
        self._thread = threading.Thread(target=self._run, name=f"experiment-{name}", daemon=True)

    def start(self) -> Job:
        self._thread.start()
        return self

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def stopping(self) -> bool:
        return self.running and self._stop.is_set()

    def stop(self, timeout_s: float = 0.0) -> None:
        """Asks it to end and keep what it has; it does between two of its reports. Harmless when it has ended."""
        self._stop.set()
        if timeout_s:
            self._thread.join(timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        state = "failed"
        try:
            state = self._follow()
        except ExperimentError as error:
            self.error = str(error)
        except Exception as error:  # a defect of an experiment ends it, not the page
            log.exception("the experiment %s broke", self.name)
            self.error = f"the experiment broke: {type(error).__name__}: {error}"
        if state != "done" and self.result is not None:
            self.result = replace(self.result, complete=False)
        self.took_s = time.monotonic() - self.started
        self.state = state

    def _follow(self) -> str:
        try:
            while not self._stop.is_set():
                try:
                    report = next(self._experiment)
                except StopIteration as end:
                    self.result = end.value
                    return "done"
                if isinstance(report, Partial):
                    self.result = report.result
                else:
                    self.progress = report
            return "stopped"
        finally:
            self._experiment.close()  # it puts the engine's switches back


class Lab:
    """At most one job runs; the last one of each name is kept, so that a page finds its result again."""

    def __init__(self):
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}

    @property
    def running(self) -> Job | None:
        return next((job for job in list(self._jobs.values()) if job.running), None)

    def last(self, name: str) -> Job | None:
        return self._jobs.get(name)

    def start(self, name: str, experiment: Experiment) -> Job:
        """Raises Busy while another one runs; the generator is closed then, and nothing of it has run."""
        with self._lock:
            other = self.running
            if other is not None:
                experiment.close()
                raise Busy(f"'{other.name}' is running: stop it or wait for its end")
            job = self._jobs[name] = Job(name, experiment).start()
        return job

    def close(self) -> None:
        """Ends what runs; waits a moment for the engine's switches to be put back."""
        job = self.running
        if job is not None:
            job.stop(timeout_s=3.0)
