"""The time of any engine step, prompts and decodes together: the bound, and what servers make of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from backend.planner import served
from backend.planner.accelerators import Accelerator
from backend.planner.arch import Architecture
from backend.planner.formats import KvFormat, WeightFormat
from backend.planner.kvcache import kv_model
from backend.planner.roofline import arithmetic, span_flops
from backend.planner.step import NOTHING, StepCost
from backend.planner.weights import read_bytes

Efficiency = Literal["bound", "fast", "typical", "slow"]


class StepTime(NamedTuple):
    """Seconds. `bound_s` is the larger of the two sides; `estimate_s` what is to be expected."""

    memory_s: float
    arithmetic_s: float
    estimate_s: float

    @property
    def bound_s(self) -> float:
        return max(self.memory_s, self.arithmetic_s)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A model on `tp` accelerators. `efficiency`: where in the band of measured servers it stands; "bound": nowhere."""

    arch: Architecture
    weights: WeightFormat
    kv: KvFormat
    accelerator: Accelerator
    tp: int = 1
    efficiency: Efficiency = "typical"

    def step(self, spans: Sequence[tuple[int, int]], sampled_rows: int) -> StepTime:
        """`spans`: (new tokens, tokens of that sequence already in the cache), as in `planner.step.step_cost`.

        Bytes and FLOPs of one GPU. The estimate is never below the bound.
        """
        tokens = sum(new for new, _ in spans)
        if not tokens:
            return StepTime(0.0, 0.0, 0.0)
        memory_s = self._bytes(spans, tokens) / self.accelerator.bandwidth_bytes_per_s
        rate = self._rate
        arithmetic_s = self._flops(spans, tokens, sampled_rows) / rate if rate else 0.0
        bound_s = max(memory_s, arithmetic_s)
        if self.efficiency == "bound":
            return StepTime(memory_s, arithmetic_s, bound_s)
        middle = served.step_s(
            self.arch, self.accelerator, self.tp,
            memory_s=memory_s, arithmetic_s=arithmetic_s, tokens=tokens, prompts=tokens > len(spans),
        )  # fmt: skip
        return StepTime(memory_s, arithmetic_s, max(bound_s, self._place(tokens > len(spans)) * middle))

    @property
    def front_s(self) -> float:
        """What a request has behind it when the engine hears of it."""
        return 0.0 if self.efficiency == "bound" else self._place(True) * served.costs(self.arch).front_s

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the whole group."""
        return round(kv_model(self.arch, self.kv).slot_bytes_per_token)

    def step_cost(self, spans: Iterable[tuple[int, int]], sampled_rows: int) -> StepCost:
        """Of the whole group, as `planner.step.step_cost` counts it; activations, which are small, are left out."""
        spans = list(spans)
        tokens = sum(new for new, _ in spans)
        if not tokens:
            return NOTHING
        cache, head = kv_model(self.arch, self.kv), self.arch.head
        beside = [span_flops(self.arch, new, before, decode=new == 1) for new, before in spans]
        return StepCost(
            2 * (self.arch.active_matmul_parameters - head) * tokens
            + 2 * head * sampled_rows
            + sum(states for _, states in beside),
            sum(attention for attention, _ in beside),
            round(read_bytes(self.arch, self.weights, tokens)),
            round(sum(cache.bytes(before + new) for new, before in spans)),
            round(cache.slot_bytes_per_token * tokens),
            0,
        )

    def _bytes(self, spans: Iterable[tuple[int, int]], tokens: int) -> float:
        cache = kv_model(self.arch, self.kv, self.tp)
        return read_bytes(self.arch, self.weights, tokens, self.tp) + sum(cache.bytes(o + n) for n, o in spans)

    def _flops(self, spans: Iterable[tuple[int, int]], tokens: int, sampled_rows: int) -> float:
        body = self.arch.active_matmul_parameters - self.arch.head
        beside = sum(sum(span_flops(self.arch, n, o, decode=n == 1)) for n, o in spans)
        return (2 * body * tokens + 2 * self.arch.head * sampled_rows + beside) / self.tp

    @cached_property
    def _rate(self) -> float | None:
        return arithmetic(self.accelerator, self.weights)[1]

    def _place(self, prompts: bool) -> float:
        """In the band, times its middle."""
        paid = served.costs(self.arch)
        ends = (paid.prompt_fast, paid.prompt_slow) if prompts else (paid.fast, paid.slow)
        return {"fast": ends[0], "typical": 1.0, "slow": ends[1]}[self.efficiency]
