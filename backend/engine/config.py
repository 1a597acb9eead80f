"""The engine's switches. Policies are switches because people compare them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class EngineConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16  # tokens a block holds
    num_blocks: Annotated[int, Meta(ge=1)] = 1024
    max_running: Annotated[int, Meta(ge=1, le=1024)] = 64  # requests in the batch
    token_budget: Annotated[int, Meta(ge=1)] = 2048  # tokens computed in one step, at most
    chunk_size: Annotated[int, Meta(ge=1)] = 512  # prompt tokens of one request in a step, while others are there
    policy: Literal["continuous", "static"] = "continuous"
    prefix_cache: bool = True
    preemption: Literal["recompute"] = "recompute"
    allocator: Literal["paged"] = "paged"
    max_model_len: Annotated[int, Meta(ge=2)] = 8192
    max_waiting: Annotated[int, Meta(ge=1)] = 1024  # queue bound; beyond it a submit is refused


class ConfigError(ValueError):
    """A switch that does not exist, or a value that it cannot take; the message names both."""


def changed(config: EngineConfig, changes: dict) -> EngineConfig:
    """The configuration with `changes` applied. Raises ConfigError with the field and what it allows."""
    known = msgspec.structs.asdict(config)
    for name in changes:
        if name not in known:
            raise ConfigError(f"unknown switch '{name}'; known: {', '.join(sorted(known))}")
    try:
        new = msgspec.convert({**known, **changes}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    if new.max_running > new.token_budget:
        raise ConfigError(
            f"token_budget ({new.token_budget}) must be at least max_running ({new.max_running}): "
            "each running request needs one token a step"
        )
    return new
