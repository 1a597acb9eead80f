"""From the times of tokens to the figures people compare, and the limit that the machine sets for them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from backend.bench.workload import Workload
from backend.planner.shape import ModelShape
from backend.planner.step import step_cost


@dataclass(frozen=True)
class Run:
    """One job of one engine in one round."""

    output_tok_s: float  # all output tokens / time until the last of them
    ttft_s: float  # median over requests
    tpot_s: float  # median over requests of (last - first) / (tokens - 1)
    decode_tok_s: float  # requests / tpot_s: the rate while all of them decode
    prompt_tok_s: float  # all prompt tokens / time until the last request got its first token
    whole_s: float  # until the last token


def run_of(requests: Sequence[dict], prompt_tokens: int = 0) -> Run:
    """`requests`: [{"times": […]}], seconds since all of them arrived. Raises ValueError when one got no token."""
    if any(not r["times"] for r in requests):
        raise ValueError("a request got no token")
    tokens = sum(len(r["times"]) for r in requests)
    tpots = [(r["times"][-1] - r["times"][0]) / (len(r["times"]) - 1) for r in requests if len(r["times"]) > 1]
    tpot = statistics.median(tpots) if tpots else float("nan")
    return Run(
        output_tok_s=tokens / max(r["times"][-1] for r in requests),
        ttft_s=statistics.median(r["times"][0] for r in requests),
        tpot_s=tpot,
        decode_tok_s=len(requests) / tpot,
        prompt_tok_s=prompt_tokens / max(r["times"][0] for r in requests),
        whole_s=max(r["times"][-1] for r in requests),
    )


@dataclass(frozen=True)
class Limit:
    """The fastest that a decode step of `batch` sequences with `context` tokens each can be on this machine."""

    batch: int
    context: int
    bytes: int  # weights once, KV read and written; activations may stay in a cache and are left out
    flops: int
    memory_s: float
    compute_s: float

    @property
    def read_roof_tok_s(self) -> float:
        """What the measured weight-read bandwidth allows."""
        return self.batch / self.memory_s

    @property
    def limit_tok_s(self) -> float:
        """What bandwidth and matmul rate together allow."""
        return self.batch / max(self.memory_s, self.compute_s)

    @property
    def bound_by(self) -> str:
        return "bandwidth" if self.memory_s >= self.compute_s else "compute"


def limit_of(shape: ModelShape, batch: int, context: int, read_bytes_per_s: float, flops_per_s: float) -> Limit:
    cost = step_cost(shape, [(1, context - 1)] * batch, batch)
    moved = cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes
    return Limit(batch, context, moved, cost.flops, moved / read_bytes_per_s, cost.flops / flops_per_s)


def least_s(shape: ModelShape, work: Workload, read_bytes_per_s: float, flops_per_s: float) -> float:
    """No engine on this machine does all of `work` in less time: every prompt token once, a common prefix once for all,
    weights once a step, everyone's own K and V and those of a common prefix once a step, and reading fully hidden
    behind computing, or the other way round."""
    steps = [(work.prefills(), len(work.requests)), *((spans, len(spans)) for spans in work.decodes())]
    costs = [step_cost(shape, spans, rows) for spans, rows in steps]
    moved = sum(c.weight_bytes + c.kv_read_bytes + c.kv_write_bytes for c in costs)
    # The arithmetic of a step counts a prefix for each of those who attend to it; a cache may keep it between them.
    again = sum(max(0, sum(before > 0 for _, before in spans) - 1) for spans, _ in steps)
    moved -= again * work.prefix_tokens * shape.kv_bytes_per_token
    return max(moved / read_bytes_per_s, sum(c.flops for c in costs) / flops_per_s)


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def times(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def as_dict(self) -> dict:
        return asdict(self)


# output: text of the new tokens, counters, the step's event; events: encoding and handing out, after the step.
STEP_PARTS = ("schedule_s", "build_s", "forward_s", "sample_s", "output_s", "events_s")


def decode_breakdown(steps: Sequence[dict], batch: int) -> dict[str, float] | None:
    """Median seconds of each part of the steps in which `batch` requests decode and none prefills; None: no such step.

    `steps`: Step events as JSON objects, fields at their default left out.
    """
    pure = [s for s in steps if not s.get("prefill") and s.get("rows") == batch]
    if not pure:
        return None
    parts = {name: statistics.median(s.get(name, 0.0) for s in pure) for name in STEP_PARTS}
    whole = statistics.median(s.get("step_s", 0.0) + s.get("events_s", 0.0) for s in pure)
    return {"step_s": whole, **parts, "rest_s": max(0.0, whole - sum(parts.values())), "steps": len(pure)}


def same_answers(answers: dict[str, list[list[int]]], reference: str) -> dict[str, tuple[int, int]]:
    """For each engine: (requests whose tokens equal the reference engine's, requests)."""
    expected = answers[reference]
    return {
        name: (sum(a == b for a, b in zip(found, expected, strict=True)), len(expected))
        for name, found in answers.items()
        if name != reference
    }
