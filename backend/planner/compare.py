"""Two plans side by side: what is asked differently, what comes out, and which part of it explains the difference."""

from __future__ import annotations

from dataclasses import dataclass

from backend.planner.plan import Plan, Setup
from backend.planner.results import Result
from backend.planner.words import value_words

# name -> (label, larger is better)
MEASURES = {
    "concurrency": ("Sequences at once", True),
    "ceiling": ("Decode ceiling", True),
    "step": ("Decode step, at least", False),
    "ttft": ("TTFT, at least", False),
    "weights_per_gpu": ("Weights on each GPU", False),
    "kv_per_sequence_per_gpu": ("KV of a sequence on each GPU", False),
    "memory": ("Left for KV on each GPU", True),
    "cost": ("Output tokens, estimated", False),
}


@dataclass(frozen=True)
class Difference:
    """One measure of both. `ratio` is B / A; None where either has no value."""

    name: str
    label: str
    a: Result
    b: Result
    ratio: float | None
    better: str  # A, B or ""
    why: str


def inputs(a: Setup, b: Setup) -> list[tuple[str, str, str]]:
    """(what, in A, in B) for everything that is asked differently."""
    said = [_said(setup) for setup in (a, b)]
    return [(name, said[0][name], said[1][name]) for name in said[0] if said[0][name] != said[1][name]]


def _said(setup: Setup) -> dict[str, str]:
    return {
        "model": setup.name,
        "accelerator": setup.accelerator.name,
        "GPUs": f"{setup.gpus} (TP {setup.tp}, PP {setup.pp})",
        "weights": setup.weights.name,
        "KV cache": setup.kv.name,
        "context": f"{setup.context:,} tokens",
        "output": f"{setup.output:,} tokens",
        "batch": f"{setup.batch:,}",
        "shared prefix": f"{setup.shared_prefix:,} tokens",
        "price": f"{setup.usd_per_gpu_hour:g} $/GPU-hour",
    }


def differences(a: Plan, b: Plan) -> list[Difference]:
    found = []
    for name, (label, larger) in MEASURES.items():
        left, right = a[name], b[name]
        known = left.value is not None and right.value is not None
        ratio = right.value / left.value if known and left.value > 0 and right.value > 0 else None
        better = ""
        if ratio is not None and abs(ratio - 1) > 0.005:
            better = "B" if (ratio > 1) == larger else "A"
        elif (
            ratio is None and known and left.value != right.value
        ):  # what is free, or a budget below zero, has no ratio
            better = "B" if (right.value > left.value) == larger else "A"
        found.append(Difference(name, label, left, right, ratio, better, _why(name, a, b)))
    return found


def _why(name: str, a: Plan, b: Plan) -> str:
    """The part that changed most, in words."""
    if name in ("ceiling", "cost"):
        words = _moved(a["step"], b["step"])
        if a.running != b.running:
            words = "; ".join(filter(None, [f"{a.running:,} → {b.running:,} run at once", words]))
        prices = (a.setup.usd_per_gpu_hour, b.setup.usd_per_gpu_hour)
        if name == "cost" and prices[0] != prices[1]:
            words = "; ".join(filter(None, [f"a GPU-hour is {prices[0]:g} → {prices[1]:g} $", words]))
        if name == "cost" and a.setup.gpus != b.setup.gpus:
            words = "; ".join(filter(None, [f"{a.setup.gpus} → {b.setup.gpus} GPUs are paid", words]))
        return words
    if name == "concurrency":
        parts = [
            _changed("left for KV on each GPU", a["memory"], b["memory"]),
            _changed("a sequence takes", a["kv_per_sequence_per_gpu"], b["kv_per_sequence_per_gpu"]),
        ]
        return "; ".join(filter(None, parts))
    if name == "kv_per_sequence_per_gpu":
        return _changed("of one token", a["kv_per_token"], b["kv_per_token"])
    return _moved(a[name], b[name])


def _changed(what: str, a: Result, b: Result) -> str:
    if not a.value or a.value <= 0 or not b.value or abs(b.value / a.value - 1) < 0.005:
        return ""
    return f"{what} × {b.value / a.value:.3g}"


def _moved(a: Result, b: Result) -> str:
    """The term with the largest change, if there is one."""
    left, right = {t.name: t for t in a.terms}, {t.name: t for t in b.terms}
    moves = [(abs(right[n].value - left[n].value), n) for n in left if n in right]
    if not moves or max(moves)[0] <= 0.002 * max(abs(a.value or 0), abs(b.value or 0)):
        return ""
    name = max(moves)[1]
    before, after = abs(left[name].value), abs(right[name].value)  # of a budget most terms are taken off
    factor = f" (× {after / before:.3g})" if before else ""
    return f"mostly {name}: {value_words(before, left[name].unit)} → {value_words(after, right[name].unit)}{factor}"
