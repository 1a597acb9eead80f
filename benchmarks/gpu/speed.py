"""Part 2 of the GPU checks: how fast are the fast paths, what does each of them buy, and how fast are others?"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.alone import note, rows
from benchmarks.gpu.ours import Ours
from benchmarks.gpu.shapes import SHAPES, on_gpu, shape
from benchmarks.gpu_check import Check

BATCHES = (1, 8, 32, 128, 256)
LENGTHS = (512, 2048, 8192)
REHEARSAL = {"batches": (1, 3), "lengths": (16, 32), "prompt": 8, "seconds": 0.05, "tokens": 6}  # on a CPU


def _dtype(device: str) -> str:
    return "bfloat16" if on_gpu(device) else "float32"


def _speed(name: str, device: str) -> dict[str, Any]:
    """Decode at every batch, prefill at every length."""
    small = {} if on_gpu(device) else REHEARSAL
    batches, lengths = small.get("batches", BATCHES), small.get("lengths", LENGTHS)
    switches = {"max_running": max(batches)} | ({} if on_gpu(device) else {"num_blocks": 256})
    mine = Ours(shape(name, device), device, _dtype(device), {}, **switches)
    seconds = {key: small[key] for key in ("seconds", "prompt") if key in small} | ({"least": 5} if small else {})
    cases = [{"decode": batch} for batch in batches] + [{"prefill": length} for length in lengths]

    def measure(decode: int = 0, prefill: int = 0) -> dict[str, Any]:
        return mine.decode(decode, **seconds) if decode else mine.prefill(prefill, 1 if small else 3)

    told = rows(cases, measure)
    words = ", ".join(
        f"{'batch' if 'decode' in r else 'prefill'} {r.get('decode') or r['prefill']}: "
        + (f"{r['tokens_per_s']:.0f} tok/s" if "tokens_per_s" in r else r.get("failed") or r["skipped"])
        for r in told
    )
    return {"shape": name, "start_s": round(mine.start_s, 1), "notes": mine.notes, "rows": told, "in_words": words}


def qwen(device: str) -> dict[str, Any]:
    return _speed("Qwen3-0.6B", device)


def llama_1b(device: str) -> dict[str, Any]:
    return _speed("Llama-3.2-1B", device)


def llama_8b(device: str) -> dict[str, Any]:
    return _speed("Llama-3-8B", device)


PATHS = {
    "all on": {},
    "no CUDA graphs": {"cuda_graphs": False},
    "torch's attention": {"attention": "reference"},
}


def switches(device: str) -> dict[str, Any]:
    """What each fast path buys: the same decode steps with it and without."""
    small, made = ({} if on_gpu(device) else REHEARSAL), {}
    seconds = {"seconds": small.get("seconds", 1.0), "prompt": small.get("prompt", 256)} | (
        {"least": 5} if small else {}
    )
    told: list[dict] = []
    for name, paths in PATHS.items():
        more = {"max_running": 32} if on_gpu(device) else {"max_running": 4, "num_blocks": 256}
        made = Ours(shape("Llama-3.2-1B", device), device, _dtype(device), paths, **more)
        cases = [{"paths": name, "decode": batch} for batch in (small.get("batches") or (1, 32))]
        told += rows(cases, lambda paths, decode, made=made: made.decode(decode, **seconds))
        note({"rows": told})
        made.close()
    words = "; ".join(f"{r['paths']}, {r['decode']}: {r.get('step_ms') or r.get('failed')} ms" for r in told)
    return {"shape": "Llama-3.2-1B", "rows": told, "in_words": words}


# ---- beside transformers -------------------------------------------------------------------------------------------


def _beside(device: str, wanted: list[tuple[str, str, int]]) -> dict[str, Any]:
    """(shape, way, batch) in this order, each shape's model made once."""
    from benchmarks.gpu.theirs import Theirs

    small = {} if on_gpu(device) else REHEARSAL
    count, prompt = small.get("tokens", 64), small.get("prompt", 256)
    made: dict[str, Theirs] = {}

    def measure(shape_name: str, way: str, batch: int) -> dict[str, Any]:
        if shape_name not in made:
            made.clear()
            made[shape_name] = Theirs(shape(shape_name, device), device, _dtype(device))
        peer = made[shape_name]
        if way == "continuous":
            return peer.continuous(batch, prompt, count)
        return peer.generate(batch, prompt, count, static=way == "static, compiled")

    cases = [{"shape_name": name, "way": way, "batch": batch if on_gpu(device) else min(batch, 3)}
             for name, way, batch in wanted]  # fmt: skip
    told = rows(cases, measure, each_s=8.0)
    words = "; ".join(
        f"{r['shape_name']} {r['way']} {r['batch']}: "
        + (f"{r['tokens_per_s']:.0f} tok/s" if "tokens_per_s" in r else r.get("failed") or r["skipped"])
        for r in told
    )
    return {"rows": told, "in_words": words}


def transformers_plain(device: str) -> dict[str, Any]:
    shapes = [("Llama-3-8B", "continuous", 256), ("Llama-3-8B", "dynamic", 1), ("Llama-3-8B", "continuous", 32)]
    small = [(name, way, batch) for name in list(SHAPES)[1::-1]
             for way, batch in (("dynamic", 1), ("dynamic", 32), ("continuous", 32), ("continuous", 256))]  # fmt: skip
    return _beside(device, shapes + small)


def transformers_compiled(device: str) -> dict[str, Any]:
    return _beside(device, [("Llama-3.2-1B", "static, compiled", 1), ("Llama-3.2-1B", "static, compiled", 32)])


CHECKS = [
    Check("llama-3-8b", "decode and prefill of the Llama 3 8B shape", 45, llama_8b, alone=True),
    Check(
        "transformers", "transformers' generate and continuous batching beside it", 45, transformers_plain, alone=True
    ),
    Check("switches", "what does each fast path buy?", 30, switches, alone=True),
    Check("llama-3.2-1b", "decode and prefill of the Llama 3.2 1B shape", 20, llama_1b, alone=True),
    Check("qwen3-0.6b", "decode and prefill of the Qwen3 0.6B shape", 20, qwen, alone=True),
    Check("compiled", "generate with a static cache, compiled", 30, transformers_compiled, alone=True),
]
