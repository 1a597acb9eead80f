"""From a loaded model to an engine: check it, size the pool, say hello."""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import psutil
import torch

from backend.engine.config import EngineConfig, Limits, changed
from backend.engine.engine import Engine
from backend.engine.kernels import Kernels, choose, narrow
from backend.engine.runner import TorchRunner
from backend.engine.self_check import reference_logits, self_check
from backend.engine.shape import model_shape
from backend.engine.text import Text
from backend.events import DeviceInfo, Event, Hello
from backend.models.errors import ModelError

if TYPE_CHECKING:
    from backend.models.loader import LoadedModel

CPU_SHARE, GPU_SHARE = 0.25, 0.85  # of the memory that is free when the model has been loaded
MAX_AUTO_BLOCKS = 32_768  # more than this is more than a picture, or a demo, needs
# What one step may compute before those who decode have waited too long for it: about half a second on two CPU cores.
STEP_TOKENS = {"cpu": {"token_budget": 256, "chunk_size": 128}, "cuda": {"token_budget": 8192, "chunk_size": 2048}}


def build(loaded: LoadedModel, switches: dict, emit: Callable[[Event], None], kernels: Kernels = Kernels()) -> Engine:
    """`switches`: fields of EngineConfig; `num_blocks` absent or None sizes the pool from free memory.

    Replaces the attention of `loaded`, and where `kernels` says so its linear layers too. Raises ModelError when the
    model fails its self-check or no pool fits, ConfigError for switches that cannot be.
    """
    narrow(kernels, loaded)
    chosen = choose(kernels, loaded)
    loaded.computes_in = torch.float32 if chosen.widens else loaded.dtype
    # All that is read off the model's own layers comes before they are replaced.
    shape, info = model_shape(loaded), loaded.info()
    with chosen.widened(loaded.model):
        expected = reference_logits(loaded)
    info.notes += chosen.apply(loaded.model)
    kv_bytes_per_token = self_check(loaded, expected, **chosen.paths())
    switches = {k: v for k, v in switches.items() if v is not None}
    switches["max_model_len"] = min(switches.get("max_model_len", loaded.max_model_len), loaded.max_model_len)
    defaults = dict(STEP_TOKENS.get(loaded.device.type, {}))
    defaults["token_budget"] = max(defaults.get("token_budget", 0), switches.get("max_running", 0), 256)
    config = changed(EngineConfig(), {"num_blocks": 1, **defaults, **switches})
    if "num_blocks" not in switches:
        config = changed(config, {"num_blocks": _fitting_blocks(loaded, config, kv_bytes_per_token)})
    device = describe(loaded.device)
    limits = Limits(loaded.max_model_len, kv_bytes_per_token, device.memory_bytes)
    limits.check(config)
    runner = TorchRunner(loaded, **chosen.paths())
    engine = Engine(runner, Text(loaded.tokenizer), shape, config, emit, loaded.stop_ids, limits)
    info.notes += runner.notes
    info.kv_bytes_per_token = kv_bytes_per_token
    info.shape = msgspec.to_builtins(shape)
    engine.report(
        Hello(
            epoch=secrets.token_hex(6),
            wall_time=time.time() - engine.now(),
            model=info,
            device=device,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            config=msgspec.structs.asdict(config),
        )
    )
    return engine


def describe(device: torch.device) -> DeviceInfo:
    """The device in words and numbers, as the operating system or the driver names it."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceInfo(kind="cuda", name=properties.name, memory_bytes=properties.total_memory)
    return DeviceInfo(
        kind=device.type, name=_cpu_name(), threads=torch.get_num_threads(), memory_bytes=psutil.virtual_memory().total
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _fitting_blocks(loaded: LoadedModel, config: EngineConfig, kv_bytes_per_token: int) -> int:
    """Blocks for a share of the free memory, and at least one request's worth or a refusal."""
    if loaded.device.type == "cuda":
        free, share = torch.cuda.mem_get_info(loaded.device)[0], GPU_SHARE
    else:
        free, share = psutil.virtual_memory().available, CPU_SHARE
    block_bytes = kv_bytes_per_token * config.block_size
    blocks = min(int(free * share) // block_bytes, MAX_AUTO_BLOCKS)
    if blocks < 2:
        raise ModelError(
            f"{loaded.name}: {free / 2**30:.2f} GiB are free and a block of {config.block_size} tokens takes "
            f"{block_bytes / 2**20:.1f} MiB; free memory, or choose a smaller model"
        )
    return blocks
