"""KVScope's engine without a server: one shape, its decode steps and prefills."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = 256  # tokens that each request of a decode batch has


class Ours:
    def __init__(self, config: dict[str, Any], device: str, dtype: str, kernels: dict[str, Any], **switches: Any):
        from backend.engine.build import build
        from backend.engine.kernels import Kernels
        from backend.models.loader import load

        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            self.loaded = load(folder, weights="random", dtype=dtype, device=device, say=lambda line: None)
        self.events: list = []
        switches = {"prefix_cache": False, **switches}
        self.engine = build(self.loaded, switches, self.events.append, Kernels(**kernels))
        self.notes = self.events[0].model.notes
        self.start_s = time.perf_counter() - start
        self.vocabulary = config["vocab_size"]

    def close(self) -> None:
        """The memory is free when this returns."""
        import gc

        import torch

        del self.engine, self.loaded
        gc.collect()
        torch.cuda.empty_cache()

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(3, self.vocabulary) for _ in range(count)]

    def answer(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """`count` greedy tokens for each prompt, all at once."""
        numbers = self._submit(prompts, count)
        said: dict[int, list[int]] = {number: [] for number in numbers}
        while not self.engine.idle:
            for delta in self.engine.step():
                said[delta.request] += delta.token_ids
        return [said[number] for number in numbers]

    def decode(self, batch: int, seconds: float = 1.5, prompt: int = PROMPT, least: int = 20) -> dict[str, Any]:
        """Steps in which `batch` requests decode and nobody does anything else."""
        numbers = self._submit([self.tokens(prompt, seed) for seed in range(batch)], self.engine.limit() - prompt)
        running = self.engine.scheduler.running
        while len(running) < batch or not all(request.decoding for request in running):
            self.engine.step()
        for _ in range(3):
            self.engine.step()
        self.events.clear()
        start = time.perf_counter()
        steps = 0
        while (now := time.perf_counter()) < start + seconds or steps < least:
            self.engine.step()
            steps += 1
        took, found = now - start, self._steps()
        for number in numbers:
            self.engine.abort(number)
        moved = [s.weight_bytes + s.kv_read_bytes + s.kv_write_bytes for s in found]
        parts = ("step_s", "schedule_s", "build_s", "forward_s", "sample_s", "output_s")
        times = {name.replace("_s", "_ms"): 1e3 * statistics.median(getattr(s, name) for s in found) for name in parts}
        return {
            "tokens_per_s": batch * steps / took,
            "steps": steps,
            **{name: round(value, 4) for name, value in times.items()},
            "bytes_per_s": statistics.median(m / s.step_s for m, s in zip(moved, found, strict=True)),
        }

    def prefill(self, length: int, repeats: int = 3) -> dict[str, Any]:
        """One prompt, nobody beside it; the first time, which compiles and warms up, does not count."""
        rates, times = [], []
        for number in range(repeats + 1):
            self.events.clear()
            self.answer([self.tokens(length, number)], 1)
            if number:
                found = self._steps()
                times.append(sum(s.step_s for s in found))
                rates.append(sum(s.flops for s in found) / times[-1])
        return {
            "ms": 1e3 * statistics.median(times),
            "tokens_per_s": length / statistics.median(times),
            "flops_per_s": statistics.median(rates),
            "steps": len(found),
        }

    def _submit(self, prompts: list[list[int]], count: int) -> list[int]:
        from backend.engine.request import SamplingParams

        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        return [self.engine.submit(prompt, params, id="x")[0].number for prompt in prompts]

    def _steps(self) -> list:
        from backend.events import Step

        return [event for event in self.events if isinstance(event, Step)]
