"""One sequence decodes with each kind of KV cache: transformers' own two, and this project's blocks.

In:  {"model": name or folder, "weights": real | random, "dtype": …, "threads": n, "jobs": [
         {"name": …, "kind": dynamic | static | paged, "kernels": {…}, "context": n, "steps": n, "reserve": n}, …]}
Out: {"job": name, "step_s": [seconds], "cache_bytes": n} one a job

The order is the first line; when stdin ends after it, whoever asked is gone, and this process ends too.
"""

import json
import os
import sys
import threading
import time

import torch
import transformers
from transformers import DynamicCache, StaticCache

from backend.engine.build import build
from backend.engine.kernels import Kernels
from backend.engine.request import SamplingParams
from backend.events import Step
from backend.models.loader import load

WARM_UP = 3  # steps that are not counted


def prompt(loaded, tokens: int) -> list[int]:
    vocab = loaded.config.get_text_config().vocab_size
    return torch.randint(vocab // 10, vocab // 2, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def with_cache(loaded, job: dict) -> tuple[list[float], int]:
    """Seconds a step of a plain loop over the model's own forward, and the bytes that its cache holds at the end."""
    model = loaded.model
    model.set_attn_implementation("sdpa")
    config = model.config.get_text_config()
    if job["kind"] == "static":
        cache = StaticCache(config=config, max_cache_len=job["reserve"])
    else:
        cache = DynamicCache(config=config)
    ids = torch.tensor([prompt(loaded, job["context"])], device=loaded.device)
    times = []
    for _ in range(job["steps"] + WARM_UP + 1):  # the first is the prefill
        start = time.perf_counter()
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1:].argmax(-1)
        ids.tolist()  # on a GPU, this is when it is done
        times.append(time.perf_counter() - start)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return times[1 + WARM_UP :], held


def paged(loaded, job: dict) -> tuple[list[float], int]:
    """The same through the engine: whole steps, with scheduling and sampling."""
    events = []
    tokens = job["context"] + job["steps"] + WARM_UP + 1
    engine = build(loaded, {"num_blocks": tokens // 16 + 2, "max_running": 1}, events.append, Kernels(**job["kernels"]))
    params = SamplingParams(max_tokens=job["steps"] + WARM_UP + 1, temperature=0.0, ignore_eos=True)
    engine.submit(prompt(loaded, job["context"]), params, id="one")
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.pool.used_count)
    steps = [event.step_s for event in events if isinstance(event, Step) and event.flops and not event.prefill]
    return steps[WARM_UP:], most * engine.config.block_size * engine.shape.kv_bytes_per_token


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    transformers.utils.logging.disable_progress_bar()
    for job in order["jobs"]:
        loaded = load(
            order["model"], dtype=order["dtype"], weights=order["weights"]
        )  # anew: the engine replaces layers of the model
        torch.set_num_threads(order["threads"])
        step_s, held = (paged if job["kind"] == "paged" else with_cache)(loaded, job)
        print(json.dumps({"job": job["name"], "step_s": step_s, "cache_bytes": held}), file=out, flush=True)


if __name__ == "__main__":
    main()
