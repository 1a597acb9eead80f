"""What reading the hardware costs decode: an engine with the sampler awake at 5 Hz, against the same with it asleep.

    python -m benchmarks.telemetry_overhead [--pairs 40] [--steps 32] [--batch 8] [--rate 5] [--machine h100] [--json]

One process, one engine. In short blocks the same batch decodes the same steps, while the sampler reads a fake NVML
machine (every reading there is, GPM pairs included, and the host's) or sleeps: awake, asleep, asleep, awake, … Its
readings enter the engine's event stream between steps, as in the server. Two times are compared, of the wall clock and
of the CPU (the whole process, sampler thread included); on a busy machine neighbours stretch both, through the memory
they share, so the sampler thread's own CPU time is told too. That one is all but free of noise, and it bounds what the
sampler can take from the engine's thread: only while it computes does it hold the interpreter's lock.

The fake library opens and reads its script file at each call, so a call costs more here than with a real driver whose
calls are cheap; what waits inside a driver waits outside the interpreter's lock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

from backend.bench import machine
from tests.nvml import library

ROOT = Path(__file__).resolve().parents[1]
SETTLE_S = 0.3  # before a block is timed: the sampler wakes up, or ends its last reading


class Bench:
    """The engine with its batch, and the sampler that is switched."""

    def __init__(self, model: str, batch: int, rate: float, threads: int):
        import torch

        torch.set_num_threads(threads)
        from backend.engine.build import build
        from backend.engine.request import SamplingParams
        from backend.models.loader import load
        from backend.telemetry import sampler as sampling

        loaded = load(model, dtype="float32", device="cpu")
        self.engine = build(loaded, {"max_running": batch, "prefix_cache": False}, lambda event: None)
        self.params = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
        lots = random.Random(0)
        self.prompts = [lots.choices(range(30_000), k=32) for _ in range(batch)]
        self.posted: deque = deque()
        self.readings, self.reading, self.sampler_cpu_s = 0, False, 0.0
        sampling.ASLEEP_S = 0.02  # wakes promptly when a block begins
        self.sampler = sampling.Sampler(
            self._take,
            clock=self.engine.now,
            busy=lambda: self.reading,
            used=("host",),
            fast_s=1 / rate,
        )
        self.sampler.start()

    def _take(self, event, t: float) -> None:
        """In the sampler's thread."""
        self.sampler_cpu_s = time.thread_time()
        self.posted.append((event, t))

    def block(self, steps: int, awake: bool) -> dict[str, float]:
        """Seconds that a decode step took, by the wall clock and of the process's CPU time; always the same steps."""
        self.reading = awake
        numbers = [self.engine.submit(prompt, self.params, id="x")[0].number for prompt in self.prompts]
        settled = time.perf_counter() + SETTLE_S
        while not all(request.decoding for request in self.engine.scheduler.running):
            self._step()
        time.sleep(max(0.0, settled - time.perf_counter()))
        before, own = self.readings, self.sampler_cpu_s
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        for number in numbers:
            self.engine.abort(number)
        return {
            "wall_s": wall / steps,
            "cpu_s": cpu / steps,
            "sampler_cpu_share": (self.sampler_cpu_s - own) / wall,
            "readings_per_s": (self.readings - before) / wall,
        }

    def _step(self) -> None:
        self.engine.step()
        while self.posted:
            event, t = self.posted.popleft()
            self.engine.report(event, t)
            self.readings += 1


def compare(bench: Bench, pairs: int, steps: int) -> list[dict]:
    bench.block(steps, awake=False)  # warms up
    found = []
    for number in range(pairs):
        order = (True, False) if number % 2 == 0 else (False, True)
        blocks = {awake: bench.block(steps, awake) for awake in order}
        found.append({"awake": blocks[True], "asleep": blocks[False]})
        print(f"\r{number + 1} of {pairs} pairs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def overhead(pairs: list[dict], what: str) -> dict[str, float]:
    """Median over the pairs of awake / asleep - 1, with its 95 % interval by resampling the pairs."""
    shares = [pair["awake"][what] / pair["asleep"][what] - 1 for pair in pairs]
    lots = random.Random(0)
    medians = sorted(statistics.median(lots.choices(shares, k=len(shares))) for _ in range(2000))
    return {"median": statistics.median(shares), "low": medians[50], "high": medians[1949]}


def render(report: dict) -> str:
    def words(found: dict[str, float]) -> str:
        return f"{found['median']:+.2%} (95 % interval {found['low']:+.2%} to {found['high']:+.2%})"

    settings, pairs = report["settings"], report["pairs"]
    step = statistics.median(pair["asleep"]["wall_s"] for pair in pairs)
    awake = {name: statistics.median(pair["awake"][name] for pair in pairs) for name in pairs[0]["awake"]}
    return (
        f"reading a fake {settings['machine']} at {settings['rate']:g} Hz, batch {settings['batch']}, "
        f"decode step {step * 1e3:.1f} ms, {len(pairs)} pairs, {awake['readings_per_s']:.1f} readings/s\n"
        f"  the sampler thread's own CPU time   {awake['sampler_cpu_share']:.2%} of a core\n"
        f"  CPU time of a step, whole process   {words(report['cpu'])}\n"
        f"  wall time of a step                 {words(report['wall'])}\n"
        f"  load average {report['load_average'][0]:.1f} to {report['load_average'][1]:.1f} on {report['cores']} cores"
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--machine", default="h100", choices=sorted(p.stem for p in library.MACHINES.glob("*.txt")))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=32, help="decode steps in a block")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5.0, help="readings a second, at most 10")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--out", type=Path, help="where to keep the report; default benchmarks/results/")
    options = parser.parse_args(words)
    if not library.COMPILER:
        raise SystemExit(library.NO_COMPILER)
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the server: threads that spin would count as CPU time
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(library.variables(options.machine, Path(folder)))
        load = [os.getloadavg()[0]]
        bench = Bench(options.model, options.batch, options.rate, options.threads)
        try:
            pairs = compare(bench, options.pairs, options.steps)
        finally:
            bench.sampler.close()
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "out")}
    report = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": settings,
        "load_average": [*load, os.getloadavg()[0]],
        "cores": len(os.sched_getaffinity(0)),
        "cpu": overhead(pairs, "cpu_s"),
        "wall": overhead(pairs, "wall_s"),
        "skipped_ticks": bench.sampler.skipped_ticks,
        "pairs": pairs,
    }
    print(json.dumps(report) if options.json else render(report))
    kept = options.out or ROOT / "benchmarks" / "results" / f"telemetry_overhead-{datetime.now():%Y%m%d-%H%M%S}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"kept in {kept}", file=sys.stderr)


if __name__ == "__main__":
    main()
