"""Part 1 of the GPU checks, with an engine: computed against measured bandwidth, joules a token, the sampler's cost."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import Check

# Shapes of Llama 3.2 1B, and of a tiny model for the rehearsal on a CPU.
LLAMA_1B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = LLAMA_1B | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 4096,
}  # fmt: skip
SECONDS = 5.0  # of decode at each batch size
BATCHES = (1, 8, 32, 128)


class Rig:
    """An engine with random weights, its steps, and a sampler whose readings stand on the engine's clock."""

    def __init__(self, device: str):
        import torch

        from backend.engine.build import build
        from backend.models.loader import load

        on_gpu = device.startswith("cuda")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(LLAMA_1B if on_gpu else TINY))
            loaded = load(folder, weights="random", dtype="bfloat16" if on_gpu else "float32", device=device)
        self.device, self.vocab = loaded.device, loaded.config.vocab_size
        self.events: list = []
        self.posted: deque = deque()
        switches = {"max_running": max(BATCHES), "prefix_cache": False}
        if not on_gpu:
            switches["num_blocks"] = 8192
        self.engine = build(loaded, switches, self.events.append)
        self.kv_bytes = self.events[0].model.kv_bytes_per_token
        self.torch = torch
        self.numbers: list[int] = []

    def sampler(self, rate: float):
        from backend.telemetry.sampler import Sampler
        from backend.telemetry.torch_device import used

        return Sampler(
            lambda event, t: self.posted.append((event, t)),
            clock=self.engine.now,
            used=used(self.device),
            fast_s=1 / rate,
            lease_s=600.0,
        )

    def fill(self, batch: int, prompt: int = 128) -> None:
        """A batch that decodes; prefill is done when this returns."""
        from backend.engine.request import SamplingParams

        for number in self.numbers:
            self.engine.abort(number)
        lots = random.Random(batch)
        params = SamplingParams(max_tokens=3500, temperature=0.0, ignore_eos=True)
        self.numbers = [
            self.engine.submit([lots.randrange(3, self.vocab) for _ in range(prompt)], params, id="x")[0].number
            for _ in range(batch)
        ]
        while not all(r.decoding for r in self.engine.scheduler.running) or len(self.engine.scheduler.running) < batch:
            self.step()

    def step(self) -> None:
        self.engine.step()
        while self.posted:
            self.engine.report(*self.posted.popleft())

    def steps_for(self, seconds: float) -> tuple[int, float]:
        """(steps, seconds they took)."""
        steps, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            self.step()
            steps += 1
        return steps, now - start

    def window(self, t0: float, t1: float) -> dict[str, Any]:
        """What `join` says of the device that the engine computes on, or of the first GPU in a rehearsal."""
        import dataclasses

        from backend import fold
        from backend.events import Step
        from backend.telemetry import join

        state = fold.State()
        for event in self.events:
            fold.apply(state, event)
        devices = state.devices.devices
        index = next((i for i, d in enumerate(devices) if d.used and d.kind == "gpu"), 0)
        rows = [join.row(e, self.kv_bytes) for e in self.events if isinstance(e, Step)]
        found = join.window(rows, state.samples, t0, t1, devices[index] if devices else None, index)
        return {phase: dataclasses.asdict(value) for phase, value in found.phases.items()}


@cache
def rig(device: str) -> Rig:
    return Rig(device)


def decode(device: str) -> dict[str, Any]:
    """Decode at growing batches: bytes the model must move against bytes that GPM counted; joules a token."""
    mine, rows = rig(device), []
    sampler = mine.sampler(5)
    sampler.watch()
    try:
        for batch in BATCHES if device.startswith("cuda") else (1, 4):
            mine.fill(batch)
            mine.steps_for(0.5)
            t0 = mine.engine.now()
            steps, seconds = mine.steps_for(SECONDS if device.startswith("cuda") else 2.0)
            found = mine.window(t0, mine.engine.now()).get("decode", {})
            rows.append(
                {"batch": batch, "steps_per_s": steps / seconds, "tokens_per_s": batch * steps / seconds, **found}
            )
    finally:
        sampler.close()
    words = [
        f"batch {row['batch']}: {row['tokens_per_s']:.0f} tok/s, computed {row.get('computed', 0) / 1e9:.0f} GB/s, "
        f"measured / computed {(row.get('ratio') or {}).get('value') or (row.get('ratio') or {}).get('reason')}"
        for row in rows
    ]
    return {"model": "Llama 3.2 1B shape, random weights, bfloat16", "rows": rows, "in_words": "; ".join(words)}


def prefill(device: str) -> dict[str, Any]:
    """Long prompts one after another: joules a token, and which roof."""
    mine = rig(device)
    sampler = mine.sampler(5)
    sampler.watch()
    try:
        t0 = mine.engine.now()
        end = time.perf_counter() + (SECONDS if device.startswith("cuda") else 1.0)
        while time.perf_counter() < end:
            mine.fill(4, prompt=2048 if device.startswith("cuda") else 256)
        found = mine.window(t0, mine.engine.now())
    finally:
        sampler.close()
    told = found.get("prefill", {})
    words = (
        f"{told.get('tokens', 0) / max(told.get('seconds', 0), 1e-9):.0f} tok/s, J/token {told.get('joules_per_token')}"
    )
    return {"phases": found, "in_words": words}


def overhead(device: str) -> dict[str, Any]:
    """Decode speed with the sampler at 5 and at 10 Hz against none, in turns."""
    mine = rig(device)
    mine.fill(1)
    mine.steps_for(0.5)
    speeds: dict[float, list[float]] = {0.0: [], 5.0: [], 10.0: []}
    for number in range(6):
        mine.fill(1)
        for rate in list(speeds) if number % 2 == 0 else list(speeds)[::-1]:
            sampler = mine.sampler(rate) if rate else None
            if sampler:
                sampler.watch()
            mine.steps_for(0.4)
            steps, seconds = mine.steps_for(1.5 if device.startswith("cuda") else 0.3)
            speeds[rate].append(steps / seconds)
            if sampler:
                sampler.close()
    medians = {rate: statistics.median(found) for rate, found in speeds.items()}
    cost = {rate: 1 - medians[rate] / medians[0.0] for rate in (5.0, 10.0)}
    return {"steps_per_s": speeds, "cost": cost, "in_words": f"cost at 5 Hz {cost[5.0]:.2%}, at 10 Hz {cost[10.0]:.2%}"}


CHECKS = [
    Check("decode", "computed against GPM bandwidth, joules a token, at growing batches", 50, decode),
    Check("prefill", "joules a token of prefill", 20, prefill),
    Check("overhead", "what does sampling at 5 and 10 Hz cost decode?", 40, overhead),
]
