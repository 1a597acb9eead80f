"""A runner that computes nothing: it says how long the step would take, waits that long, and speaks a fixed text."""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.config import EngineConfig
from backend.engine.modelled.clock import ModelledClock
from backend.engine.runner import StepResult
from backend.engine.scheduler import Plan
from backend.planner.mixed import Machine


class ModelledRunner:
    """`words`: token ids of the text that every answer repeats, each request from a place of its own.

    `swap_bytes_per_s`: between the accelerator and the host's memory; `kv_bytes_per_token`: of one GPU.
    """

    def __init__(
        self,
        machine: Machine,
        clock: ModelledClock,
        words: Sequence[int],
        *,
        seed: int = 0,
        kv_bytes_per_token: float = 0.0,
        swap_bytes_per_s: float = 0.0,
    ):
        self.machine, self.clock, self.words, self.seed = machine, clock, words, seed
        self.kv_bytes_per_token, self.swap_bytes_per_s = kv_bytes_per_token, swap_bytes_per_s

    def configure(self, config: EngineConfig) -> None:
        self.block_size = config.block_size

    def move(self, plan: Plan) -> None:
        blocks = sum(len(blocks) for _, blocks in [*plan.swap_outs, *plan.swap_ins])
        if blocks and self.swap_bytes_per_s:
            self.clock.spend(blocks * self.block_size * self.kv_bytes_per_token / self.swap_bytes_per_s)

    def execute(self, plan: Plan) -> StepResult:
        spans = [(count, request.computed) for request, count in plan.work.items()]
        complete = [r for r, count in plan.work.items() if r.computed + count == r.known]
        seconds = self.machine.step(spans, len(complete)).estimate_s
        self.clock.spend(seconds)
        said = [self.words[(self.seed + r.number * 7 + r.output_tokens) % len(self.words)] for r in complete]
        return StepResult(complete, said, None, build_s=0.0, forward_s=seconds, sample_s=0.0)
