"""What a batch costs: the time of a decode step, and the tokens it gives, against the number of requests in it."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from backend.events import Step
from backend.experiments import Experiment, ExperimentError, Number, Partial, Progress, Result
from backend.experiments.bench import Ask, Bench, prompts
from backend.experiments.percentiles import percentiles
from backend.sources.remote import EngineClient

NAME = "batch sweep"
MOST_BATCH = 256
SKIPPED_STEPS = 2  # the first ones after the prompts: memory is touched for the first time
PROMPT_TOKENS = 512  # of all prompts, that a step computes beside the decoding ones
DECODED = 3  # column of the folded state's series: tokens decoded in a step
HALF = 0.5
WORDS = {
    "flops": "FLOPs",
    "weight_bytes": "weight bytes",
    "kv_read_bytes": "KV read bytes",
    "kv_write_bytes": "KV write bytes",
    "activation_bytes": "activation bytes",
}
TEXT_RULE = (
    "In the text that this repeats, with another model on another machine: 45.4 ms at batch 1, 74.8 ms at batch 8, "
    "1.65 × the time for 4.86 × the tok/s."
)
KNEE_RULE = (
    "Knee: the largest batch up to which doubling the batch still raises tok/s by √2 or more (the exponent of "
    "tok/s against batch stays at ½ or above)."
)
BOUND_RULE = (
    "Lower bound: the larger of bytes ÷ {whose} read bandwidth and FLOPs ÷ {whose} matmul rate, both counted for the "
    "very steps that are shown (weights once a step, K and V once a sequence)."
)


@dataclass(frozen=True)
class Settings:
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (64, 256)  # tokens in the cache when measuring begins
    steps: int = 12  # decode steps measured for a point
    seed: int = 0
    measure_roof: bool = True  # the device's ceilings, for the lower bound, when nobody has measured them yet

    def check(self) -> None:
        if not self.batches or not all(1 <= b <= MOST_BATCH for b in self.batches):
            raise ExperimentError(f"batch sizes must be between 1 and {MOST_BATCH}")
        if not self.contexts or not all(2 <= c <= 100_000 for c in self.contexts):
            raise ExperimentError("contexts must be between 2 and 100,000 tokens")
        if not 3 <= self.steps <= 1000:
            raise ExperimentError("steps measured for a point must be between 3 and 1,000")


def sweep(client: EngineClient, settings: Settings) -> Experiment:
    settings.check()
    batches, contexts = sorted(set(settings.batches)), sorted(set(settings.contexts))
    output = _output(settings, contexts[-1], batches[-1])
    points: list[dict[str, Any]] = []
    with Bench(client, _switches(client, batches, contexts, output)) as bench:
        yield Progress(0, 1, None, "measuring the ceilings of the device, if nobody has")
        roof, alphabet = bench.ceilings(settings.measure_roof), bench.alphabet
        limit = _memory_limits(bench, contexts, settings.steps + SKIPPED_STEPS + 2)
        cost = [(c, b) for c in contexts for b in batches]
        total, done, started = sum(_price(c, b) for c, b in cost), 0.0, time.monotonic()
        for context in contexts:
            texts = prompts(alphabet, batches[-1], context, settings.seed + context)
            for batch in batches:
                left = (time.monotonic() - started) * (total - done) / done if done else None
                yield Progress(done, total, left, f"batch {batch}, context {context}")
                # The i-th prompt is the same in every batch: the prefix cache spares computing it again, and no two
                # requests of a batch share a block, so each reads K and V of its own.
                run = bench.start([Ask(text, _output(settings, context, batch)) for text in texts[:batch]])
                steps = []
                for event in bench.watch(run):
                    if isinstance(event, Step) and not event.prefill and bench.state.series[-1][DECODED] == batch:
                        steps.append(event)
                    elif event is None:
                        yield Progress(done, total, left, f"batch {batch}, context {context}")
                measured = steps[SKIPPED_STEPS : SKIPPED_STEPS + settings.steps]
                if measured:
                    points.append(_point(context, batch, measured, roof))
                done += _price(context, batch)
                yield Partial(_result(points, settings, bench, roof, limit))
    return _result(points, settings, bench, roof, limit)


def _switches(client: EngineClient, batches: Sequence[int], contexts: Sequence[int], output: int) -> dict[str, Any]:
    return {
        "policy": "continuous",
        "allocator": "paged",
        "kv_cache": True,
        "prefix_cache": True,
        "preemption": "recompute",
        "max_running": batches[-1],
        "max_waiting": max(1024, batches[-1]),
        "token_budget": PROMPT_TOKENS + batches[-1],
        "chunk_size": PROMPT_TOKENS,
        "block_size": 16,
        "num_blocks": batches[-1] * _blocks(contexts[-1] + output) + 1,
        "max_model_len": max(contexts) + output,
    }


def _output(settings: Settings, context: int, batch: int) -> int:
    """Tokens that each request says: enough for all to be decoding together, though the prompts take several steps."""
    return settings.steps + SKIPPED_STEPS + 2 + -(-batch * context // PROMPT_TOKENS)


def _blocks(tokens: int) -> int:
    return -(-tokens // 16)


def _price(context: int, batch: int) -> float:
    """Roughly what a point costs, for the time left: its new prompts, and steps that grow with the batch."""
    return 8.0 + batch * (1 + context / 32)


def _point(context: int, batch: int, steps: list[Step], roof: dict | None) -> dict[str, Any]:
    seconds = [step.step_s for step in steps]
    middle = statistics.median(seconds)
    low, high = percentiles(seconds, (10, 90))
    bounds = [bound(step, roof) for step in steps] if roof else []
    mean = {name: statistics.fmean(getattr(step, name) for step in steps) for name in WORDS}
    return {
        "prompt (tokens)": context,
        "context (tokens)": context + SKIPPED_STEPS + len(steps) // 2,
        "batch": batch,
        "step (ms)": middle * 1e3,
        "p10 step (ms)": low * 1e3,
        "p90 step (ms)": high * 1e3,
        "lower bound (ms)": statistics.median(bounds) * 1e3 if bounds else None,
        "tok/s": batch / middle,
        "tok/s per user": 1 / middle,
        "steps": len(steps),
        **{f"{WORDS[name]} a step": value for name, value in mean.items()},
    }


def bound(step: Step, roof: dict[str, Any]) -> float:
    """Seconds that this step takes at least on a device with these measured ceilings."""
    moved = step.weight_bytes + step.kv_read_bytes + step.kv_write_bytes + step.activation_bytes
    return max(moved / roof["read"]["value"], step.flops / roof["matmul"]["value"])


def bound_rule(roof: dict[str, Any]) -> str:
    stated = roof["read"].get("evidence") == "data sheet"
    return BOUND_RULE.format(whose="the data sheet's" if stated else "measured")


def _memory_limits(bench: Bench, contexts: Sequence[int], output: int) -> dict[int, int]:
    """Requests of a context that the pool holds, as it was before the experiment."""
    size, blocks = bench.before["block_size"], bench.before["num_blocks"]
    return {context: blocks // -(-(context + output) // size) for context in contexts}


def knee(curve: Sequence[tuple[int, float]]) -> int | None:
    """Largest batch up to which tok/s grows at least with the root of the batch; None with fewer than two points."""
    if len(curve) < 2:
        return None
    best = curve[0][0]
    for (b0, r0), (b1, r1) in itertools.pairwise(curve):
        if math.log(r1 / r0) < HALF * math.log(b1 / b0):
            break
        best = b1
    return best


def ridge_batch(point: dict[str, Any], roof: dict[str, Any]) -> float | None:
    """Batch at which computing takes as long as moving, at this context; None: at no batch, memory stays the limit."""
    batch = point["batch"]
    flops = point["FLOPs a step"] / batch
    own = sum(point[f"{kind} bytes a step"] for kind in ("KV read", "KV write", "activation")) / batch
    read, matmul = roof["read"]["value"], roof["matmul"]["value"]
    saved = flops / matmul - own / read
    return point["weight bytes a step"] / read / saved if saved > 0 else None


def _result(points: list[dict], settings: Settings, bench: Bench, roof: dict | None, limits: dict[int, int]) -> Result:
    table = pd.DataFrame(points)
    notes = [
        TEXT_RULE,
        KNEE_RULE,
        bound_rule(roof) if roof else "No lower bound: the device's ceilings have not been measured.",
    ]
    if any((point["lower bound (ms)"] or 0) > point["step (ms)"] for point in points):
        notes.append(
            "Some steps were faster than their lower bound: the ceilings were measured while the machine was busy. "
            "Measure the roofs again, on the page Phases, when it is quiet."
        )
    if bench.strangers:
        notes.append(f"{bench.strangers} requests of others came in meanwhile: these numbers are not clean.")
    marks, numbers, said = [], [], []
    for index, context in enumerate(sorted(set(settings.contexts))):
        curve = [point for point in points if point["prompt (tokens)"] == context]
        if not curve:
            continue
        found = knee([(p["batch"], p["tok/s"]) for p in curve])
        ridge = ridge_batch(curve[-1], roof) if roof else None
        marks.append(
            {
                "prompt (tokens)": context,
                "knee (batch)": found,
                "KV memory holds (batch)": limits[context],
                "ridge (batch)": ridge,
            }
        )
        said.append(_marks_in_words(context, found, limits[context], ridge, bool(roof)))
        one, eight = (next((p for p in curve if p["batch"] == b), None) for b in (1, 8))
        if index == 0 and one and eight:
            ratio = eight["step (ms)"] / one["step (ms)"]
            source = f"medians of {eight['steps']} decode steps at {one['context (tokens)']} tokens of context"
            numbers += [
                Number(
                    "a step at batch 8 costs", ratio, "×", "measured", f"step(8) ÷ step(1), {source}",
                    "the text: 1.65 ×",
                ),
                Number(
                    "and gives", 8 / ratio, "× tok/s", "measured", f"8 × step(1) ÷ step(8), {source}",
                    "the text: 4.86 ×",
                ),
            ]  # fmt: skip
        if index == 0:
            numbers.append(Number("knee", found, "requests", "measured", KNEE_RULE))
            best = max(curve, key=lambda p: p["tok/s"])
            numbers.append(
                Number("most tok/s", best["tok/s"], f"tok/s at {best['batch']}", "measured", "batch ÷ median step time")
            )
    return Result(
        NAME, table, numbers, said + notes, {"marks": pd.DataFrame(marks)}, asdict(settings), dict(bench.machine)
    )  # fmt: skip


def _marks_in_words(context: int, found: int | None, limit: int, ridge: float | None, roof: bool) -> str:
    """Also those that lie beside the picture."""
    words = [f"knee at {found}"] if found else []
    words.append(f"KV memory, as it was set before the run, holds {limit:,}")
    if ridge is not None:
        words.append(f"ridge at {ridge:.1f}, from where on computing takes longer than moving bytes")
    elif roof:
        words.append("no ridge: at this context moving bytes takes longer at any batch")
    return f"Batches at {context:,} tokens of context: {'; '.join(words)}."
