"""The engine's switches. Policies are switches because people compare them."""

from __future__ import annotations

import re
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
    kv_cache: bool = True  # off: every step computes all that a request knows anew, and keeps nothing
    preemption: Literal["recompute", "swap"] = "recompute"
    allocator: Literal["paged", "reserve", "first-fit"] = "paged"
    max_model_len: Annotated[int, Meta(ge=2)] = 8192
    max_waiting: Annotated[int, Meta(ge=1)] = 1024  # queue bound; beyond it a submit is refused


class ConfigError(ValueError):
    """A switch that does not exist, or a value that it cannot take; the message names both."""

    def __init__(self, message: str, switch: str):
        super().__init__(message)
        self.switch = switch


MAX_BLOCKS = 2**20
MAX_POOL_SHARE = 0.9  # of the device's memory


class Limits(msgspec.Struct, frozen=True):
    """What the model and the device allow. 0: not known, not checked."""

    max_model_len: int = 0
    kv_bytes_per_token: int = 0
    memory_bytes: int = 0

    def check(self, config: EngineConfig) -> None:
        """Raises ConfigError for a pool that would end the process instead of a request, or a context too long."""
        if self.max_model_len and config.max_model_len > self.max_model_len:
            raise ConfigError(
                f"max_model_len {config.max_model_len}: the model has a context of {self.max_model_len} tokens",
                "max_model_len",
            )
        if config.num_blocks > MAX_BLOCKS:
            raise ConfigError(f"num_blocks {config.num_blocks}: at most {MAX_BLOCKS}", "num_blocks")
        pool_bytes = config.num_blocks * config.block_size * self.kv_bytes_per_token
        if self.memory_bytes and pool_bytes > MAX_POOL_SHARE * self.memory_bytes:
            raise ConfigError(
                f"num_blocks {config.num_blocks} of {config.block_size} tokens: {pool_bytes / 2**30:.1f} GiB, but the "
                f"device has {self.memory_bytes / 2**30:.1f} GiB in all; at most {MAX_POOL_SHARE:.0%} of it",
                "num_blocks",
            )


def changed(config: EngineConfig, changes: dict) -> EngineConfig:
    """The configuration with `changes` applied. Raises ConfigError with the field and what it allows."""
    known = msgspec.structs.asdict(config)
    for name in changes:
        if name not in known:
            raise ConfigError(f"unknown switch '{name}'; known: {', '.join(sorted(known))}", name)
    try:
        new = msgspec.convert({**known, **changes}, EngineConfig)
    except msgspec.ValidationError as error:
        place = re.search(r"`\$\.(\w+)`", str(error))
        raise ConfigError(str(error), place[1] if place else next(iter(changes), "")) from None
    if new.max_running > new.token_budget:
        raise ConfigError(
            f"token_budget ({new.token_budget}) must be at least max_running ({new.max_running}): "
            "each running request needs one token a step",
            "token_budget",
        )
    _check_together(new)
    return new


def _check_together(config: EngineConfig) -> None:
    """Raises ConfigError for switches that would be ignored, or could not work, beside each other."""
    if config.allocator != "paged" and config.prefix_cache:
        raise ConfigError(
            f"allocator {config.allocator} keeps each request in one piece of memory, so no block can be shared: "
            "switch prefix_cache off with it",
            "allocator",
        )
    if config.kv_cache:
        return
    for switch, wanted in (("prefix_cache", False), ("allocator", "paged"), ("preemption", "recompute")):
        if getattr(config, switch) != wanted:
            raise ConfigError(
                f"without a KV cache there are no blocks to share, to place or to swap: {switch} must be "
                f"{'off' if wanted is False else wanted}",
                switch,
            )
    if config.token_budget < config.max_model_len:
        raise ConfigError(
            f"without a KV cache a step computes a whole sequence: token_budget ({config.token_budget}) must be at "
            f"least max_model_len ({config.max_model_len})",
            "token_budget",
        )
