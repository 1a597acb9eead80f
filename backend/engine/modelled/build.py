"""From two catalogue rows to an engine: a model, and accelerators that are not here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from backend.engine.config import ConfigError, EngineConfig, Limits, changed
from backend.engine.engine import Engine
from backend.engine.modelled.clock import ModelledClock
from backend.engine.modelled.engine import ModelledEngine
from backend.engine.modelled.runner import ModelledRunner
from backend.engine.text import Text
from backend.events import DeviceInfo, Event, Hello, ModelInfo
from backend.models import chat
from backend.models.errors import ModelError
from backend.planner import accelerators, catalogue
from backend.planner.capacity import Reserve, memory_budget
from backend.planner.errors import PlannerError
from backend.planner.formats import kv_format, weight_format
from backend.planner.kvcache import kv_model, per_token
from backend.planner.mixed import Efficiency, Machine
from backend.planner.roofline import arithmetic
from backend.planner.weights import checkpoint, read_bytes
from backend.telemetry.ceiling import Ceilings, data_sheet

MAX_AUTO_BLOCKS = 32_768  # more than this is more than a picture needs
STEP_TOKENS = {"token_budget": 8192, "chunk_size": 8192}  # vLLM's on such accelerators: a prompt may fill a step
DEFAULT_CONTEXT = 8192
WORDS = (
    " No model computes this text: its pace is what the planner expects, its blocks and its queue are the engine's own."
)
SPEEDS = (0.01, 100.0)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Names as the planner's catalogues know them."""

    model: str
    gpu: str
    tp: int = 1
    weights: str = "bf16"
    kv: str = "bf16"
    efficiency: Efficiency = "typical"
    speed: float = 1.0
    seed: int = 0

    def machine(self) -> tuple[catalogue.CatalogueModel, Machine]:
        """Raises ModelError in the planner's words."""
        if not SPEEDS[0] <= self.speed <= SPEEDS[1]:
            raise ModelError(f"speed {self.speed:g}: modelled time passes {SPEEDS[0]:g} to {SPEEDS[1]:g} times as fast")
        if not 1 <= self.tp <= 1024:
            raise ModelError(f"tp {self.tp}: from 1 to 1,024 accelerators")
        try:
            model = catalogue.find(self.model)
            return model, Machine(
                arch=model.architecture,
                weights=weight_format(self.weights),
                kv=kv_format(self.kv),
                accelerator=accelerators.find(self.gpu),
                tp=self.tp,
                efficiency=self.efficiency,
            )
        except PlannerError as error:
            raise ModelError(str(error)) from None


@dataclass
class ModelledModel:
    """What the server asks of a loaded model, of one that is not loaded."""

    name: str
    tokenizer: Any
    max_model_len: int
    vocab: int
    notes: list[str]
    roofs: Ceilings | None  # of the data sheet
    stop_ids: frozenset[int] = frozenset()
    device: torch.device = field(default_factory=lambda: torch.device("meta"))  # nothing is computed
    dtype: torch.dtype = torch.bfloat16
    config: Any = field(init=False)

    def __post_init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=self.vocab)

    @cached_property
    def chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return chat.encode_chat(self.tokenizer, messages, self.name)


def build(
    wanted: Wanted, switches: dict, emit: Callable[[Event], None], tokenizer: Any
) -> tuple[Engine, ModelledModel]:
    """`switches` as in `backend.engine.build.build`; `tokenizer` cuts text and joins it, as the model's own would.

    Raises ModelError for what is not in the catalogues or does not fit, ConfigError for switches that cannot be.
    """
    row, machine = wanted.machine()
    arch = machine.arch
    each = kv_model(arch, machine.kv, machine.tp).slot_bytes_per_token
    try:
        shape = arch.shape(max(1, round(machine.weights.of("mlp") / 8)), max(1, round(machine.kv.bits / 8)))
    except PlannerError:  # layers of several kinds: the planner counts them, a `ModelShape` cannot say them
        shape = None
    context = min(arch.context or DEFAULT_CONTEXT, switches.get("max_model_len") or 1 << 30)
    switches = {k: v for k, v in switches.items() if v is not None} | {"max_model_len": context}
    defaults: dict[str, Any] = dict(STEP_TOKENS)
    if not each:  # a state cannot be taken up at a block's end: nothing is cached, and only so many states fit
        most = _states(row.name, machine)
        defaults |= {"prefix_cache": False, "max_running": min(EngineConfig().max_running, most)}
        if switches.get("max_running", 0) > most:
            raise ConfigError(
                f"max_running {switches['max_running']}: {most:,} states fit {_where(machine)}", "max_running"
            )
    config = changed(EngineConfig(), {"num_blocks": 1, **defaults, **switches})
    fitting, note = _blocks(row.name, machine, each, config.block_size)
    if "num_blocks" not in switches:
        config = changed(config, {"num_blocks": min(fitting, MAX_AUTO_BLOCKS)})
    elif config.num_blocks > fitting:
        raise ConfigError(f"num_blocks {config.num_blocks}: {note}", "num_blocks")
    accelerator = machine.accelerator
    clock = ModelledClock(wanted.speed)
    model = ModelledModel(
        name=row.key,
        tokenizer=tokenizer,
        max_model_len=context,
        vocab=len(tokenizer),
        notes=_notes(wanted, machine, note),
        roofs=_roofs(machine),
    )
    runner = ModelledRunner(
        machine, clock, tokenizer.encode(WORDS, add_special_tokens=False), seed=wanted.seed,
        kv_bytes_per_token=each, swap_bytes_per_s=accelerator.pcie_bytes_per_s or 0.0,
    )  # fmt: skip
    engine = ModelledEngine(
        runner, Text(tokenizer), shape or machine, config, emit, limits=Limits(context), clock=clock
    )
    engine.front_s, engine.front_wait_s = machine.front_s, machine.front_s / wanted.speed
    clock.idle = lambda: engine.idle
    first = arch.kv_layers[0] if arch.kv_layers else None
    growing = per_token(arch, machine.kv).value
    engine.report(
        Hello(
            epoch=secrets.token_hex(6),
            source="modelled",
            evidence="modelled",
            wall_time=time.time() - engine.now(),
            model=ModelInfo(
                name=row.name, family=arch.model_type, weights="modelled", dtype=machine.weights.name,
                layers=len(arch.layers), hidden=arch.hidden, heads=first.heads if first else 0,
                kv_heads=getattr(first, "kv_heads", 1) if first else 0,
                head_dim=getattr(first, "k_dim", first.v_dim) if first else 0,
                vocab=arch.vocab, parameters=arch.parameters,
                weight_bytes=int(checkpoint(arch, machine.weights).value),
                step_weight_bytes=int(read_bytes(arch, machine.weights, 1)), kv_bytes_per_token=int(growing),
                max_model_len=context, chat_template=model.chat_template, notes=model.notes,
                shape=msgspec.to_builtins(shape) if shape else {},
            ),
            device=DeviceInfo(
                kind="modelled", name=_where(machine), memory_bytes=accelerator.memory_bytes * machine.tp
            ),
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            config=msgspec.structs.asdict(config),
        )
    )  # fmt: skip
    return engine, model


def _roofs(machine: Machine) -> Ceilings | None:
    """Of the whole group: what a step's bytes and FLOPs, which are the whole model's, are held against. None where no
    rate of arithmetic is known."""
    rate = arithmetic(machine.accelerator, machine.weights)[1]
    if rate is None:
        return None
    bandwidth = machine.accelerator.bandwidth_bytes_per_s * machine.tp
    return data_sheet(_where(machine), machine.weights.name, bandwidth, rate * machine.tp)


def _where(machine: Machine) -> str:
    return f"{machine.tp} × {machine.accelerator.name}" if machine.tp > 1 else machine.accelerator.name


def _blocks(name: str, machine: Machine, each: float, block_size: int) -> tuple[int, str]:
    """How many fit beside the weights, and the words for it. Raises ModelError when none does."""
    if not each:
        size = kv_model(machine.arch, machine.kv, machine.tp).state_bytes / 2**20
        return MAX_AUTO_BLOCKS, (
            f"No keys and values: a state of {size:,.0f} MiB for each sequence, whatever its length, and "
            f"{_states(name, machine):,} fit beside the weights. Blocks only count tokens here"
        )
    budget = memory_budget(machine.arch, machine.weights, machine.accelerator, Reserve(), tp=machine.tp).value
    fitting = int(max(0.0, budget) // (each * block_size))
    if fitting < 2:
        raise ModelError(_too_large(name, machine, budget))
    return (
        fitting,
        f"{fitting:,} blocks of {block_size} tokens fit beside the weights ({budget / 2**30:,.1f} GiB a GPU)",
    )


def _states(name: str, machine: Machine) -> int:
    """How many sequences without keys and values fit beside the weights. Raises ModelError when none does."""
    budget = memory_budget(machine.arch, machine.weights, machine.accelerator, Reserve(), tp=machine.tp).value
    most = int(budget // kv_model(machine.arch, machine.kv, machine.tp).state_bytes)
    if most < 1:
        raise ModelError(_too_large(name, machine, budget))
    return most


def _too_large(name: str, machine: Machine, budget: float) -> str:
    return (
        f"{name} does not fit {_where(machine)}: {budget / 2**30:,.1f} GiB a GPU are left for KV; "
        "take more of them (--tp), smaller weights (--dtype fp8), or another one"
    )


def _notes(wanted: Wanted, machine: Machine, room: str) -> list[str]:
    where = {
        "bound": "the bound itself",
        "fast": "the fast end of",
        "slow": "the slow end of",
        "typical": "the middle of",
    }
    band = where[machine.efficiency] + (" what servers measured" if machine.efficiency != "bound" else "")
    speed = "" if wanted.speed == 1 else f", {wanted.speed:g} times as fast"
    return [
        f"Modelled: step times are {band} for {_where(machine)}{speed}. The answers' text means nothing.",
        f"{room}; text is cut into tokens by another model's tokenizer",
    ]
