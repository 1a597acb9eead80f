"""transformers on the same shapes: `generate` with a growing cache, with a static one and compiled, and its continuous
batching. What is timed is decoding: a run of many tokens less one of a single token."""

from __future__ import annotations

import random
import time
from typing import Any


class Theirs:
    def __init__(self, config: dict[str, Any], device: str, dtype: str):
        import torch
        import transformers

        from backend.models.randomised import FastNoise

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        made = transformers.AutoConfig.for_model(**config)
        self.device, self.vocabulary = torch.device(device), config["vocab_size"]
        with torch.no_grad(), self.device, FastNoise(self.device):
            self.model = transformers.AutoModelForCausalLM.from_config(
                made, attn_implementation="sdpa", dtype=getattr(torch, dtype)
            ).eval()

    def prompts(self, batch: int, length: int) -> list[list[int]]:
        draw = random.Random(batch)
        return [[draw.randrange(3, self.vocabulary) for _ in range(length)] for _ in range(batch)]

    def generate(self, batch: int, prompt: int, count: int, static: bool = False) -> dict[str, Any]:
        """static: a cache of fixed size, for which `generate` compiles the model on a GPU."""
        import torch

        ids = torch.tensor(self.prompts(batch, prompt), device=self.device)

        def seconds(tokens: int) -> float:
            start = time.perf_counter()
            with torch.inference_mode():
                self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                    do_sample=False, pad_token_id=0, eos_token_id=None,
                    **({"cache_implementation": "static"} if static else {}),
                )  # fmt: skip
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        warm_up = seconds(count)  # the static cache has the length of this run, and is compiled for it
        if static:
            seconds(count)
        # Of like length, so that a static cache stays the one that was compiled for.
        whole = seconds(count)
        first = 0.0 if static else seconds(1)
        steps = count if static else count - 1
        if whole <= first:
            raise RuntimeError(
                f"{count} tokens took no longer than one ({whole:.3f} s): the machine is too busy to tell"
            )
        return {
            "tokens_per_s": batch * steps / (whole - first),
            "step_ms": 1e3 * (whole - first) / steps,
            "warm_up_s": round(warm_up, 1),
            "note": "prefill included" if static else "",
        }

    def continuous(self, batch: int, prompt: int, count: int) -> dict[str, Any]:
        """Decode speed from when everybody has a token until the first one has all of them, by its own time stamps."""
        import torch
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        on_gpu, page = self.device.type == "cuda", 256  # its default, under a name that changed
        generation = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(
            num_blocks=batch * -(-(prompt + count) // page) + 8,
            max_batch_tokens=max(8192, batch),
            allow_block_sharing=False,
        )
        if not on_gpu and hasattr(batching, "auto_switch_to_flash"):
            batching.auto_switch_to_flash = False
        with torch.inference_mode():
            results = self.model.generate_batch(
                self.prompts(batch, prompt), generation_config=generation, continuous_batching_config=batching,
                record_timestamps=True, warmup=on_gpu,
            )  # fmt: skip
        stamps = [list(result.timestamps) for result in results.values()]
        if len(stamps) < batch or any(len(times) < count for times in stamps):
            raise RuntimeError(f"{len(stamps)} of {batch} requests answered, the shortest with {min(map(len, stamps))}")
        begin, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
        told = sum(begin < t <= end for times in stamps for t in times)
        return {"tokens_per_s": told / (end - begin), "step_ms": 1e3 * (end - begin) * batch / told}
