"""An experiment on the command line: how far it is, and what was kept when it ends early."""

from __future__ import annotations

import dataclasses
import sys

from backend import interrupt
from backend.experiments import Experiment, ExperimentError, Progress, Result


class Nothing(ExperimentError):
    """It was ended before it had measured anything."""


def follow(experiment: Experiment) -> Result:
    """Runs it, and says on a terminal how far it is; interrupted or failed on the way, what was kept.

    Raises Nothing when it was interrupted before anything was kept, its own ExperimentError when it failed before that.
    """
    kept: Result | None = None
    try:
        with interrupt.heard() as interrupted:
            while not interrupted.is_set():
                report = next(experiment)
                if isinstance(report, Progress):
                    left = "" if report.left_s is None else f", about {report.left_s:.0f} s left"
                    _line(f"{report.share:4.0%} {report.note}{left}")
                else:
                    kept = report.result
    except StopIteration as end:
        return end.value
    except KeyboardInterrupt:
        pass
    except ExperimentError as error:
        if kept is None:
            raise
        _line("")
        print(f"error: {error}; what was measured until then follows", file=sys.stderr)
    finally:
        experiment.close()
        _line("")
    if kept is None:
        raise Nothing("ended before anything was measured")
    return dataclasses.replace(kept, complete=False)


def _line(text: str) -> None:
    """In the place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
