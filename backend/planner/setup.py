"""One question to the planner: a model, an accelerator, a workload, each knob checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from backend.planner.accelerators import Accelerator
from backend.planner.arch import Architecture
from backend.planner.capacity import Reserve
from backend.planner.errors import PlannerError
from backend.planner.formats import KvFormat, WeightFormat

WHOLE = {  # name -> least and most that is believed
    "tp": (1, 1024),
    "pp": (1, 64),
    "context": (2, 1 << 24),
    "output": (1, 1 << 24),
    "batch": (1, 1 << 16),
    "shared_prefix": (0, 1 << 24),
    "gamma": (1, 64),
    "chunk": (1, 1 << 24),
}
REAL = {"usd_per_gpu_hour": (0, 1e6), "arrivals_per_s": (0, 1e9), "accept": (0, 0.999), "draft_cost": (0, 10)}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sequences of `context` tokens, of which the last `output` are generated, `batch` of them at once."""

    name: str
    arch: Architecture
    accelerator: Accelerator
    weights: WeightFormat
    kv: KvFormat
    tp: int = 1
    pp: int = 1
    context: int = 8192
    output: int = 256
    batch: int = 32
    shared_prefix: int = 0  # tokens that all prompts begin with
    usd_per_gpu_hour: float = 2.0
    arrivals_per_s: float = 0.0  # 0: not asked
    accept: float = 0.0  # of a draft's tokens; 0: no speculation
    gamma: int = 4
    draft_cost: float = 0.05  # of a draft's step, in steps of the model
    chunk: int = 2048
    reserve: Reserve = field(default_factory=Reserve)

    def __post_init__(self) -> None:
        for name, (least, most) in WHOLE.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise PlannerError(f"{name} must be a whole number from {least} to {most:,}, not {value!r}")
        for name, (least, most) in REAL.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise PlannerError(f"{name} must be a number from {least} to {most:g}, not {value!r}")
        if self.output >= self.context:
            raise PlannerError(f"of {self.context:,} tokens {self.output:,} cannot be generated: no prompt is left")
        if self.pp > len(self.arch.layers):
            raise PlannerError(f"{self.pp} pipeline stages for {len(self.arch.layers)} layers")
        if self.shared_prefix > self.context:
            raise PlannerError(f"a shared prefix of {self.shared_prefix:,} tokens in a context of {self.context:,}")

    @property
    def prompt(self) -> int:
        return self.context - self.output

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    def but(self, **changes) -> Setup:
        return dataclasses.replace(self, **changes)
