"""Part 2 of the GPU checks: are the fast paths right on this machine?

Each check runs in a process of its own: a kernel that reads where it must not ends all work on the GPU in its process.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.gpu.alone import rows
from benchmarks.gpu.ours import Ours
from benchmarks.gpu.shapes import FAMILIES, on_gpu
from benchmarks.gpu_check import Check

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def kernels(device: str) -> dict[str, Any]:
    """Triton's kernels as they are compiled here, in random batches of ten kinds, and the speed at which they read."""
    import torch

    from backend.engine.gpu import paged

    where = torch.device(device)
    kinds = [
        {"dtype": dtype, "heads": heads, "kv_heads": kv_heads, "dim": dim, **extra}
        for dtype, heads, kv_heads, dim, extra in (
            ("bfloat16", 32, 8, 128, {}), ("bfloat16", 16, 8, 128, {}), ("bfloat16", 32, 8, 64, {}),
            ("float16", 9, 3, 64, {}), ("float32", 8, 8, 80, {}), ("bfloat16", 8, 4, 256, {"softcap": 50.0}),
            ("bfloat16", 64, 8, 64, {"sinks": True, "window": 128}), ("bfloat16", 4, 1, 256, {"window": 512}),
            ("float16", 32, 32, 96, {}), ("float32", 4, 2, 16, {"softcap": 5.0, "window": 8}),
        )
    ]  # fmt: skip
    # Triton's interpreter takes seconds for what is large, and knows no products in bfloat16.
    kinds = kinds if on_gpu(device) else kinds[-1:]
    told = rows(kinds, lambda **kind: _compare(paged, where, **kind))
    worst = max((row.get("worst", 0.0) / TOLERANCE[row["dtype"]] for row in told), default=0.0)
    wrong = [row for row in told if row.get("failed") or row.get("worst", 0.0) > TOLERANCE[row["dtype"]]]
    speed = []
    if on_gpu(device):
        tiles = [
            {"batch": batch, "context": context, "tile": tile}
            for batch, context in ((1, 8192), (32, 2048), (256, 1024)) for tile in (32, 64, 128)
        ]  # fmt: skip
        speed = rows(tiles, lambda **case: _reading(paged, where, **case))
    best = {
        f"{batch} × {context}": max(
            (f"{row['bytes_per_s'] / 1e9:.0f} GB/s, tile {row['tile']}", row["bytes_per_s"])
            for row in speed if (row["batch"], row["context"]) == (batch, context) and "bytes_per_s" in row
        )[0]
        for batch, context in {(row["batch"], row["context"]) for row in speed if "bytes_per_s" in row}
    }  # fmt: skip
    found = {"rows": told, "reading": speed, "in_words": f"worst error {worst:.2f} of what is allowed; reads {best}"}
    return found | ({"failed": f"{len(wrong)} of {len(told)} kinds are wrong: {wrong[0]}"} if wrong else {})


def _compare(paged, where, dtype, heads, kv_heads, dim, window=None, softcap=None, sinks=False) -> dict[str, Any]:
    import torch

    rng, worst, batches = random.Random(f"{dtype}{heads}{dim}"), 0.0, 8 if where.type == "cuda" else 1
    number = getattr(torch, dtype)
    sink = torch.randn(heads, device=where).to(number) if sinks else None
    for _ in range(batches):
        most = 3000 if where.type == "cuda" else 60
        lengths = [rng.randint(2, most), *(rng.choice([0, 1, rng.randint(1, most)]) for _ in range(2))]
        block, longest = 16, max([*lengths, 1])
        widest = -(-longest // block)
        tables = torch.randperm(3 * widest, device=where).reshape(3, widest).int()
        k, v = (torch.randn(3 * widest * block, kv_heads, dim, device=where).to(number) for _ in range(2))
        q = torch.randn(3, heads, dim, device=where).to(number)
        got = paged.decode(
            q, k, v, torch.arange(3, device=where), tables, torch.tensor(lengths, device=where), block, dim**-0.5,
            longest=longest, window=window, softcap=softcap, sinks=sink, splits=rng.choice([None, 1, 5]),
        )  # fmt: skip
        for row, length in enumerate(lengths):
            if not length:
                worst = max(worst, float(got[row].abs().max()))
                continue
            offsets = torch.arange(block, device=where)
            slots = (tables[row, :, None].long() * block + offsets).flatten()[:length][-(window or length) :]
            keys, values = (x[slots].double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            scores = torch.einsum("hd,lhd->hl", q[row].double(), keys) * dim**-0.5
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = torch.cat([scores, sink.double()[:, None]], -1) if sinks else scores
            want = torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, : len(slots)], values)
            worst = max(worst, float((got[row].double() - want).abs().max()))
    return {"worst": worst, "batches": batches}


def _reading(paged, where, batch: int, context: int, tile: int) -> dict[str, Any]:
    """Attention of a Llama 3 8B layer: bytes of K and V over the time of one launch."""
    import torch

    heads, kv_heads, dim, block = 32, 8, 128, 16
    widest = context // block
    tables = torch.randperm(batch * widest, device=where).reshape(batch, widest).int()
    k, v = (torch.randn(batch * context, kv_heads, dim, device=where, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, heads, dim, device=where, dtype=torch.bfloat16)
    lengths, order = torch.full((batch,), context, device=where), torch.arange(batch, device=where)

    def launch() -> None:
        paged.decode(q, k, v, order, tables, lengths, block, dim**-0.5, longest=context, tile=tile)

    for _ in range(3):
        launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        launch()
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 20e3
    return {"us": round(1e6 * seconds, 1), "bytes_per_s": 2 * k.nbytes / seconds}


def equality(device: str) -> dict[str, Any]:
    """Greedy float32 tokens with every fast path on, against the model's own eager attention."""
    return _summed(rows([{"family": name} for name in FAMILIES], lambda family: _equal(FAMILIES[family], device)))


def _equal(config: dict[str, Any], device: str, count: int = 12) -> dict[str, Any]:
    import torch

    # On a CPU the fast paths replace layers, and the model could no longer say what it said before.
    paths = {} if on_gpu(device) else {"attention": "reference", "linear": "plain", "fusion": "plain"}
    mine = Ours(config, device, "float32", paths, max_running=6, num_blocks=256, block_size=8, chunk_size=16)
    prompts = [mine.tokens(length, length) for length in (3, 9, 17, 30, 41)]
    answers = mine.answer(prompts, count)
    model, differs = mine.loaded.model, 0
    model.set_attn_implementation("eager")
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer[:-1]], device=mine.loaded.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        chosen = logits.gather(-1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
        # What floats tie may fall either way; from there on both see the same tokens again.
        differs += int((logits.max(-1).values - chosen > 1e-3).sum())
    return {"tokens": count * len(prompts), "differ": differs, "notes": mine.notes[-2:]}


def _summed(told: list[dict]) -> dict[str, Any]:
    words = "; ".join(f"{r['family']}: {r.get('failed') or r.get('skipped') or r['differ']}" for r in told)
    bad = [row["family"] for row in told if row.get("failed") or row.get("differ")]
    found = {"rows": told, "in_words": f"tokens that differ: {words}"}
    return found | ({"failed": f"not equal: {', '.join(bad)} ({words})"} if bad else {})


CHECKS = [
    Check("kernels", "do Triton's kernels, compiled here, agree with plain arithmetic?", 30, kernels, alone=True),
    Check("equality", "greedy float32 tokens with every fast path on: the model's own?", 30, equality, alone=True),
]
