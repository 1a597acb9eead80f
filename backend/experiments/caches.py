"""The same model with transformers' DynamicCache, its StaticCache, and paged blocks, with and without fast paths.

Each kind decodes one sequence in a fresh process of its own, so that nothing of one is left for the next.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from backend.experiments import Experiment, ExperimentError, Partial, Progress, Result
from backend.sources.remote import EngineClient, EngineError

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "peers" / "cache_kinds.py")]
TIMEOUT_S = 600.0
LOOK_S = 0.3
PLAIN = {"attention": "reference", "linear": "plain", "fusion": "plain"}


@dataclass(frozen=True)
class Kind:
    """`switch`: how `serve` is told."""

    title: str
    kind: str  # dynamic | static | paged
    kernels: dict[str, str] | None = None
    switch: str = ""
    what: str = ""


KINDS = (
    Kind("DynamicCache", "dynamic", what="transformers; a new tensor for every layer and step, the old one copied"),
    Kind("StaticCache", "static", what="transformers; reserved at full length, attended with a mask"),
    Kind(
        "paged, readable path",
        "paged",
        PLAIN,
        "--attention reference --linear plain --fusion plain",
        "this engine's blocks, in torch operations only",
    ),
    Kind("paged, fast paths", "paged", {}, "as served by default", "this engine's blocks, with compiled kernels"),
)


@dataclass(frozen=True)
class Settings:
    contexts: tuple[int, ...] = (128, 1024)
    steps: int = 24
    reserve: int = 2048  # tokens that StaticCache is made for


Jobs = dict[str, dict[str, Any]]  # job name -> what its process said
Run = Callable[[dict[str, Any]], Generator[None, None, Jobs]]


def compare(client: EngineClient, settings: Settings = Settings(), run: Run | None = None) -> Experiment:
    """On the model, dtype and threads of the running engine, which must be idle. `run`: as `in_a_process`."""
    try:
        state = client.state()
    except EngineError as error:
        raise ExperimentError(f"the engine cannot be asked what it runs: {error}") from None
    if state.get("requests"):
        raise ExperimentError("requests run on the engine: they would be measured too. Stop them first.")
    model, device = state["model"], state["device"]
    if max(settings.contexts) + settings.steps >= settings.reserve:
        raise ExperimentError(f"StaticCache is made for {settings.reserve} tokens: choose shorter contexts")
    order = {"model": model["name"], "weights": model.get("weights", "real"), "dtype": model.get("dtype", "float32")}
    order["threads"] = device.get("threads") or 1
    rows: list[dict[str, Any]] = []
    for done, kind in enumerate(KINDS):
        progress = Progress(done, len(KINDS), None, f"{kind.title}: loading and decoding in a process of its own")
        turn = (run or in_a_process)(order | {"jobs": _jobs(kind, settings)})
        try:
            while True:
                yield progress
                next(turn)
        except StopIteration as end:
            rows += _rows(kind, settings, end.value)
        finally:
            turn.close()
        yield Partial(_result(rows, settings, order, device))
    return _result(rows, settings, order, device)


def in_a_process(order: dict[str, Any]) -> Generator[None, None, Jobs]:
    """Yields while it runs, so that it can be stopped: closing this ends the process. Raises ExperimentError."""
    threads = {name: str(order["threads"]) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = os.environ | threads | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    said: list[str] = []
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment
        ) as process,
    ):
        reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
        reader.start()
        end = time.monotonic() + TIMEOUT_S
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()  # and kept open: its end would tell the process that we are gone
            while process.poll() is None:
                if time.monotonic() > end:
                    raise ExperimentError(f"not done after {TIMEOUT_S:.0f} s: this machine is too busy")
                yield
                time.sleep(LOOK_S)
        except BrokenPipeError:
            process.wait()
        finally:
            process.kill()
        reader.join()
        complaints.seek(0)
        words = [line.strip() for line in complaints.read().splitlines() if line.strip()]
        jobs = {line["job"]: line for line in map(json.loads, said)}
        if process.returncode or len(jobs) < len(order["jobs"]):
            raise ExperimentError(words[-1][:300] if words else f"its process ended with status {process.returncode}")
        return jobs


def _jobs(kind: Kind, settings: Settings) -> list[dict[str, Any]]:
    same = {"kind": kind.kind, "kernels": kind.kernels, "steps": settings.steps, "reserve": settings.reserve}
    return [same | {"name": str(context), "context": context} for context in settings.contexts]


def _rows(kind: Kind, settings: Settings, jobs: Jobs) -> list[dict[str, Any]]:
    rows = []
    for context in settings.contexts:
        job = jobs[str(context)]
        times = sorted(job["step_s"])
        rows.append(
            {
                "cache": kind.title,
                "context (tokens)": context,
                "ms a step": round(1e3 * statistics.median(times), 2),
                "fastest (ms)": round(1e3 * times[0], 2),
                "slowest (ms)": round(1e3 * times[-1], 2),
                "K and V held (MiB)": round(job["cache_bytes"] / 2**20, 2),
                "switched by": kind.switch or "other library",
                "what it is": kind.what,
            }
        )
    return rows


def _result(rows: list[dict[str, Any]], settings: Settings, order: dict[str, Any], device: dict[str, Any]) -> Result:
    prompts = " or ".join(f"{context:,}" for context in settings.contexts)
    notes = [
        f"Measured: median of {settings.steps} decode steps of one sequence after a prompt of {prompts} tokens; whole "
        f"steps, with choosing the token. {order['model']}, {order['dtype']}, {order['threads']} threads.",
        f"StaticCache is made for {settings.reserve:,} tokens and holds that much from the start; its use is compiled "
        "graphs, which are not made here.",
    ]
    return Result(
        name="caches", table=pd.DataFrame(rows), notes=notes, settings=asdict(settings), machine={**order, **device}
    )
