"""How the engine's step grows: with the batch, with the context, with requests that have long gone; and what a step
costs beside its forward pass. `python benchmarks/engine_curves.py` prints four tables and keeps the JSON.

The bundled model for what the forward pass has a part in, a stub for what it has none in. Two minutes on quiet cores;
on busy ones figures are upper bounds, and the load average stands beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402

from backend.bench.figures import limit_of  # noqa: E402
from backend.bench.machine import describe, load_average  # noqa: E402
from backend.engine.build import build  # noqa: E402
from backend.engine.config import EngineConfig  # noqa: E402
from backend.engine.engine import Engine  # noqa: E402
from backend.engine.request import SamplingParams  # noqa: E402
from backend.engine.runner import TorchRunner  # noqa: E402
from backend.events import Step, encode  # noqa: E402
from backend.models.loader import load  # noqa: E402
from backend.planner.shape import ModelShape  # noqa: E402
from backend.telemetry.ceiling import measure  # noqa: E402

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 256, 512, 1024, 1536, 2048)
PARTS = ("schedule_s", "build_s", "sample_s", "output_s")
STUB_VOCABULARY = 512
STUB_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": STUB_VOCABULARY,
}  # fmt: skip


class Stub:
    """A model whose forward pass is a look-up of logits made beforehand: what is left is the engine."""

    def __init__(self, rows: int):
        self.config = SimpleNamespace(_attn_implementation="")
        self.logits = torch.randn(1, rows, STUB_VOCABULARY, generator=torch.Generator().manual_seed(0))

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def __call__(self, *, input_ids: torch.Tensor, logits_to_keep: torch.Tensor | int, **_) -> SimpleNamespace:
        kept = input_ids.shape[1] if isinstance(logits_to_keep, int) else len(logits_to_keep)
        return SimpleNamespace(logits=self.logits[:, :kept])


def stub_engine(rows: int, events: list, **config) -> Engine:
    loaded = SimpleNamespace(
        name="stub", model=Stub(rows), device=torch.device("cpu"), dtype=torch.float32, stop_ids=frozenset()
    )
    text = SimpleNamespace(decode=lambda ids: "".join(chr(97 + i % 26) for i in ids), piece=lambda i: chr(97 + i % 26))
    config = EngineConfig(max_running=rows, max_model_len=4096, **config)
    shape = ModelShape.from_config(STUB_CONFIG, dtype_bytes=4)
    return Engine(TorchRunner(loaded), text, shape, config, lambda event: events.append(event))


def prompt(rng: random.Random, tokens: int, vocabulary: int = STUB_VOCABULARY) -> list[int]:
    return [rng.randrange(vocabulary // 4, vocabulary) for _ in range(tokens)]


def fill(engine: Engine, rng: random.Random, batch: int, context: int, answer: int, vocabulary: int) -> None:
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        engine.submit(prompt(rng, context, vocabulary), params, id=str(number))


def decode_steps(engine: Engine, events: list, batch: int) -> list[dict]:
    """Runs the engine empty; parts of the steps in which all decode and nobody prefills, seconds."""
    found = []
    while not engine.idle:
        events.clear()
        start = time.perf_counter()
        said = engine.step()
        whole = time.perf_counter() - start
        step = next((e for e in events if isinstance(e, Step)), None)
        if step and not step.prefill and len(said) == batch:
            encoding = time.perf_counter()
            for event in events:
                encode(event)
            encoding = time.perf_counter() - encoding
            parts = {name: getattr(step, name) for name in (*PARTS, "forward_s", "attention_s", "step_s")}
            found.append(parts | {"events_s": max(0.0, whole - step.step_s) + encoding})
    return found


def medians(steps: list[dict]) -> dict:
    return {name: statistics.median(s[name] for s in steps) for name in steps[0]} | {
        "low_s": min(s["step_s"] for s in steps),
        "high_s": max(s["step_s"] for s in steps),
        "steps": len(steps),
    }


def batch_curve(engine: Engine, events: list, vocabulary: int, answer: int, rounds: int) -> list[dict]:
    """The same context, ever more requests; sizes take turns, so that a slow moment meets all of them."""
    rng, steps = random.Random(1), {n: [] for n in BATCHES}
    for _ in range(rounds):
        for batch in BATCHES:
            fill(engine, rng, batch, 128, answer, vocabulary)
            steps[batch] += decode_steps(engine, events, batch)
    return [{"batch": batch, **medians(found)} for batch, found in steps.items()]


def context_curve(engine: Engine, events: list, vocabulary: int, answer: int, batch: int, rounds: int) -> dict:
    rng, steps = random.Random(2), {n: [] for n in CONTEXTS}
    for _ in range(rounds):
        for context in CONTEXTS:
            fill(engine, rng, batch, context, answer, vocabulary)
            steps[context] += decode_steps(engine, events, batch)
    rows = [{"context": context + answer // 2, **medians(found)} for context, found in steps.items()]
    x, y = (np.array([row[name] for row in rows]) for name in ("context", "step_s"))
    slope, base = np.polyfit(x, y, 1)
    left = float(((y - (base + slope * x)) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    return {"batch": batch, "rows": rows, "base_s": base, "per_token_s": slope, "r_squared": 1 - left}


def soak(requests: int, at_once: int = 64) -> dict:
    """Short requests one after another through an engine with a small pool: its speed and memory at both ends. Speed
    is requests a second of CPU time, because other users of the machine take the wall's."""
    events: list = []
    engine = stub_engine(at_once, events, num_blocks=512)
    rng, process = random.Random(3), psutil.Process()
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    submitted = finished = 0
    marks, rss = [], []
    start = time.process_time()
    while finished < requests:
        while submitted < requests and submitted - finished < 2 * at_once:
            engine.submit(prompt(rng, 24), params, id=str(submitted))
            submitted += 1
        finished += sum(1 for delta in engine.step() if delta.finish_reason)
        events.clear()
        while len(marks) < 10 and finished >= (len(marks) + 1) * requests // 10:
            gc.collect()
            marks.append(time.process_time() - start)
            rss.append(process.memory_info().rss)
    tenths = [b - a for a, b in zip([0.0, *marks], marks, strict=False)]
    return {
        "requests": requests,
        "per_cpu_s_by_tenth": [requests / 10 / seconds for seconds in tenths],
        "rss_bytes_by_tenth": rss,
        "last_over_second": tenths[1] / tenths[-1],  # the first tenth also warms up
        "rss_growth_bytes": rss[-1] - rss[1],
    }


def overhead(batch: int, answer: int) -> dict:
    """A decode step of `batch` requests whose forward pass takes no time. The vocabulary is small: reading logits
    belongs to memory bandwidth, and is in the bundled model's sample_s."""
    events: list = []
    engine = stub_engine(batch, events, num_blocks=batch * 16, token_budget=batch * 16, chunk_size=64)
    fill(engine, random.Random(4), batch, 64, answer, STUB_VOCABULARY)
    steps = decode_steps(engine, events, batch)
    found = medians(steps)
    return {
        "batch": batch,
        **found,
        "around_forward_s": statistics.median(around(step) for step in steps),
        "around_forward_low_s": min(around(step) for step in steps),
    }


def around(step: dict) -> float:
    """Scheduling, building inputs, sampling and events."""
    return sum(step[name] for name in ("schedule_s", "build_s", "sample_s", "events_s"))


def render(report: dict) -> str:
    lines = [f"load average {report['load_average'][0]:.1f} before, {report['load_average'][1]:.1f} after", ""]
    titles = ("step ms", "lowest", "forward", "schedule", "build", "sample", "output", "events")
    names = ("step_s", "low_s", "forward_s", "schedule_s", "build_s", "sample_s", "output_s", "events_s")
    widths = (10, 9, 9, 10, 8, 8, 8, 8)
    head = " " * 9 + "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))

    def row(label: str, found: dict) -> str:
        return f"{label:>9}" + "".join(f"{found[n] * 1e3:>{w}.2f}" for n, w in zip(names, widths, strict=True))

    curve = report.get("batch")
    if curve:
        lines += ["decode step by batch, context 128 (ms)", head, *(row(str(r["batch"]), r) for r in curve)]
        lines += [
            f"8 at once take {report['step_ratio_8_to_1']:.2f} x the step of one (at most 1.65); by what this machine "
            f"reads and multiplies at best, {report['limit_ratio_8_to_1']:.2f} x"
        ]
        share = report["around_forward_share_at_32"]
        lines += [f"schedule, build, sample and events: {share:.1%} of a step at 32 (at most 10 %)", ""]
    context = report.get("context")
    if context:
        lines += [f"decode step by context, {context['batch']} at once (ms)", head]
        lines += [row(str(r["context"]), r) for r in context["rows"]]
        lines += [
            f"{context['base_s'] * 1e3:.2f} ms + {context['per_token_s'] * 1e6:.2f} µs a token of context, "
            f"R² {context['r_squared']:.3f}",
            "",
        ]
    stub = report["overhead"]
    lines += [f"{stub['batch']} requests, a forward pass that takes no time (ms)", head, row("", stub)]
    lines += [
        f"schedule, build, sample and events: {stub['around_forward_s'] * 1e6:.0f} µs "
        f"(lowest {stub['around_forward_low_s'] * 1e6:.0f}; at most 300)",
        "",
    ]
    end = report["soak"]
    lines += [
        f"{end['requests']} short requests: the last tenth at {end['last_over_second']:.2f} x the speed of the second, "
        f"resident memory {end['rss_growth_bytes'] / 2**20:+.1f} MiB in between"
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--requests", type=int, default=10_000, help="of the soak")
    parser.add_argument("--stub-only", action="store_true", help="only what needs no model")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    before = load_average()
    torch.set_num_threads(wanted.threads)
    report: dict = {"machine": describe(), "started": datetime.now(UTC).isoformat(timespec="seconds")}
    report |= {"model": wanted.model, "dtype": wanted.dtype, "threads": wanted.threads}
    report["overhead"] = overhead(256, 200)
    report["soak"] = soak(wanted.requests)
    if not wanted.stub_only:
        loaded = load(wanted.model, dtype=wanted.dtype)
        torch.set_num_threads(wanted.threads)
        vocabulary, events = loaded.config.vocab_size, []
        # Prompts in one step: what is looked at are the decodes after them.
        switches = {"max_running": 64, "prefix_cache": False, "token_budget": 16_384, "chunk_size": 4096}
        engine = build(loaded, switches, lambda event: events.append(event))
        batch_curve(engine, events, vocabulary, 4, 1)  # warm
        report["batch"] = batch_curve(engine, events, vocabulary, wanted.answer, wanted.rounds)
        step = {row["batch"]: row for row in report["batch"]}
        report["step_ratio_8_to_1"] = step[8]["step_s"] / step[1]["step_s"]
        roofs = measure("cpu", "float32", rounds=5)  # which the compiled kernels compute in
        one, eight = (
            limit_of(engine.shape, batch, 128 + wanted.answer // 2, roofs.read.value, roofs.matmul.value)
            for batch in (1, 8)
        )
        report["limit_ratio_8_to_1"] = max(eight.memory_s, eight.compute_s) / max(one.memory_s, one.compute_s)
        report["around_forward_share_at_32"] = around(step[32]) / step[32]["step_s"]
        report["context"] = context_curve(engine, events, vocabulary, wanted.answer, 4, wanted.rounds)
    report["load_average"] = [before, load_average()]
    print(render(report))
    kept = wanted.out or ROOT / "benchmarks" / "results" / f"curves-{datetime.now():%Y%m%d-%H%M%S}.json"
    kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"kept in {kept}", file=sys.stderr)


if __name__ == "__main__":
    main()
