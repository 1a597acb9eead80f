"""The planner against the real engine on this machine: does a step take what its measured ceilings let expect?

    python -m benchmarks.modelled_against_engine [--rounds 2] [--out FILE]

Measures the ceilings (before and after: the higher ones count, a ceiling is what was reached), asks the planner for the
estimate and its band of the same model, formats, batch and context, and lets the engine take those steps. Decodes at
batches 1 to 32 and several contexts, prompts alone. Prompts before decodes are not computed: the pool is filled with
numbers instead, since a decode step reads as many bytes whatever they are; that, and nothing else, is how 32 sequences
of 1,024 tokens are measured in seconds. Two to three minutes on two quiet cores; exits 1 when a point is outside.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil
import torch

from backend.bench.machine import describe, load_average
from backend.engine.build import build
from backend.engine.engine import Engine
from backend.engine.request import SamplingParams
from backend.engine.runner import StepResult
from backend.engine.scheduler import Plan
from backend.events import Step
from backend.models import find
from backend.models.loader import load
from backend.planner import machine, plan
from backend.planner.accelerators import Accelerator
from backend.planner.config import parse
from backend.planner.formats import kv_format, weight_format
from backend.planner.results import Result
from backend.telemetry import ceiling

RESULTS = Path(__file__).resolve().parent / "results"
BATCHES, CONTEXTS, PROMPTS = (1, 2, 4, 8, 16, 32), (128, 512, 1024), (128, 512, 2048)
SKIPPED_STEPS = 2  # the first ones of a batch: memory is touched for the first time
STEPS = 14  # measured of each batch, context and round
BLOCK = 16


def measured_ceilings(device: str, dtype: str, earlier: ceiling.Ceilings | None = None) -> ceiling.Ceilings:
    """Now; of an earlier measurement those that were higher."""
    found = ceiling.measure(device, dtype, rounds=5)
    if earlier is None:
        return found
    pairs = {name: (getattr(found, name), getattr(earlier, name)) for name in ("read", "matmul")}
    higher = {name: max(both, key=lambda roof: roof.value) for name, both in pairs.items()}
    return msgspec.structs.replace(found, **higher)


class Uncomputed:
    """A runner whose prompts take no time: their K and V are whatever the pool was filled with."""

    def __init__(self, runner):
        self._runner, self._execute = runner, runner.execute

    @torch.inference_mode()
    def __enter__(self) -> None:
        for pools in self._runner.cache.layers.values():
            for pool in pools:
                pool.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        self._runner.execute = self._or_nothing

    def __exit__(self, *_) -> None:
        self._runner.execute = self._execute

    def _or_nothing(self, planned: Plan) -> StepResult:
        if all(count == 1 and request.computed for request, count in planned.work.items()):
            return self._execute(planned)
        self._runner._tables.update(planned.moved)
        complete = [r for r, count in planned.work.items() if r.computed + count == r.known]
        return StepResult(complete, [1000] * len(complete), None, build_s=0.0, forward_s=0.0, sample_s=0.0)


def run(engine: Engine, events: list, batch: int, prompt: int, answer: int, rng: random.Random) -> list[Step]:
    """All steps of `batch` requests that start together."""
    vocabulary = engine.runner.loaded.config.vocab_size
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        engine.submit([rng.randrange(vocabulary) for _ in range(prompt)], params, id=str(number))
    events.clear()
    while not engine.idle:
        engine.step()
    return [event for event in events if isinstance(event, Step)]


def predict(setup: plan.Setup, what: str) -> Result:
    return plan.make(setup)["step_estimate" if what == "decode" else "ttft_estimate"]


def point(what: str, batch: int, context: int, seconds: list[float], setup: plan.Setup) -> dict:
    """A row of the report: milliseconds."""
    found = predict(setup, what)
    low, middle, high = (1e3 * value for value in (found.low, found.value, found.high))
    measured = 1e3 * statistics.median(seconds)
    return {
        "what": what, "batch": batch, "context": context, "low_ms": low, "expected_ms": middle, "high_ms": high,
        "bound_ms": 1e3 * sum(term.value for term in found.terms[:2]) if what == "decode" else None,
        "measured_ms": measured, "fastest_ms": 1e3 * min(seconds), "slowest_ms": 1e3 * max(seconds),
        "steps": len(seconds), "inside": low <= measured <= high,
    }  # fmt: skip


def render(report: dict) -> str:
    read, matmul = report["read_bytes_per_s"] / 1e9, report["matmul_flops_per_s"] / 1e9
    lines = [
        f"{report['model']}, stored in {report['dtype']}, computed in {report['computes_in']}, {report['threads']} "
        f"threads; ceilings: {read:.1f} GB/s read, {matmul:.0f} GFLOP/s; load average "
        f"{report['load_average'][0]:.1f} before, {report['load_average'][1]:.1f} after",
        "",
        f"{'':>8}{'batch':>6}{'context':>9}{'predicted ms':>30}{'measured ms':>13}{'fastest':>9}{'slowest':>9}",
    ]
    for row in report["points"]:
        band = f"{row['low_ms']:.1f} … {row['expected_ms']:.1f} … {row['high_ms']:.1f}"
        lines.append(
            f"{row['what']:>8}{row['batch']:>6}{row['context']:>9}{band:>30}{row['measured_ms']:>13.1f}"
            f"{row['fastest_ms']:>9.1f}{row['slowest_ms']:>9.1f}  {'inside' if row['inside'] else 'OUTSIDE'}"
        )
    for what in ("decode", "prefill"):
        own = [row["inside"] for row in report["points"] if row["what"] == what]
        lines.append(f"{what}: {sum(own)} of {len(own)} inside the band")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", help="what weights are stored in; default: what the engine chooses")
    parser.add_argument("--rounds", type=int, default=2, help="every batch and context takes its turn in each")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    loads = [load_average()]
    loaded = load(wanted.model, dtype=wanted.dtype)
    events: list = []
    answer = STEPS + SKIPPED_STEPS + 1
    most = BATCHES[-1] * -(-(CONTEXTS[-1] + answer) // BLOCK) + 8
    switches = {
        "max_running": BATCHES[-1], "prefix_cache": False, "num_blocks": most, "block_size": BLOCK,
        "token_budget": BATCHES[-1] * CONTEXTS[-1], "chunk_size": max(PROMPTS),
        "max_model_len": max(*PROMPTS, *CONTEXTS) + answer + 1,
    }  # fmt: skip
    engine = build(loaded, switches, events.append)
    device, computes_in = str(loaded.device), str(loaded.computes_in or loaded.dtype).removeprefix("torch.")
    roofs = measured_ceilings(device, computes_in)
    rng, taken = random.Random(5), {}
    run(engine, events, 2, 64, 4, rng)  # warm, and the pool has its layers
    for _ in range(wanted.rounds):
        with Uncomputed(engine.runner):
            for context in CONTEXTS:
                for batch in BATCHES:
                    steps = run(engine, events, batch, context, answer, rng)
                    alone = [s.step_s for s in steps if not s.prefill and len(s.decode or range(batch)) == batch]
                    taken.setdefault(("decode", batch, context), []).extend(alone[SKIPPED_STEPS:])
        for prompt in PROMPTS:
            (step, *_) = run(engine, events, 1, prompt, 1, rng)
            taken.setdefault(("prefill", 1, prompt), []).append(step.step_s)
    roofs = measured_ceilings(device, computes_in, roofs)
    loads.append(load_average())
    part: Accelerator | None = machine.from_ceilings(msgspec.to_builtins(roofs), psutil.virtual_memory().total)
    if part is None:
        raise SystemExit("the ceilings that were measured make no accelerator")
    form = str(loaded.dtype).removeprefix("torch.")
    config = json.loads((find.path(wanted.model) / "config.json").read_text(encoding="utf-8"))
    base = plan.Setup(
        name=loaded.name, arch=parse(config), accelerator=part, weights=weight_format(form), kv=kv_format(form)
    )
    points = []
    for (what, batch, context), seconds in sorted(taken.items(), key=lambda entry: (entry[0][0], *entry[0][2:0:-1])):
        # A prompt alone, its first token included; a decode in the middle of those that were measured.
        length, said = (context + 1, 1) if what == "prefill" else (context + SKIPPED_STEPS + STEPS // 2, 1)
        points.append(point(what, batch, context, seconds, base.but(batch=batch, context=length, output=said)))
    report = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe(), "model": loaded.name,
        "dtype": form, "computes_in": computes_in, "threads": torch.get_num_threads(), "load_average": loads,
        "read_bytes_per_s": roofs.read.value, "matmul_flops_per_s": roofs.matmul.value,
        "ceilings": msgspec.to_builtins(roofs), "points": points,
    }  # fmt: skip
    print(render(report))
    kept = wanted.out or RESULTS / f"modelled-engine-{datetime.now():%Y%m%d-%H%M%S}.json"
    kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"kept in {kept}", file=sys.stderr)
    return 0 if all(row["inside"] for row in points) else 1


if __name__ == "__main__":
    sys.exit(main())
