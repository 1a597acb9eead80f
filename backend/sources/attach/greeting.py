"""What is said of a foreign engine before and beside its numbers: who it is, in which cells its map is drawn."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from backend import events
from backend.sources.attach.canonical import BY_MEDIUM
from backend.sources.attach.detect import Found
from backend.sources.attach.journal import Own
from backend.sources.attach.kv_tree import CELL_TOKENS, GPU
from backend.sources.attach.meter import Reading


def hello(found: Found, reading: Reading, *, label: str, wall_time: float) -> events.Hello:
    """`label` stands for a model that the server does not name."""
    caching = reading.config.get("enable_prefix_caching", "")
    return events.Hello(
        epoch=uuid.uuid4().hex[:12],
        source=found.kind,
        evidence=reading.config.get("kvscope_evidence", "measured"),
        wall_time=wall_time,
        model=events.ModelInfo(
            name=found.model or label,
            dtype="",
            max_model_len=found.max_model_len,
            kv_bytes_per_token=token_bytes(reading),
            chat_template=found.chat,
        ),
        device=events.DeviceInfo(kind="unknown"),
        block_size=reading.block_size * per_cell(reading),
        num_blocks=reading.cells // per_cell(reading),
        config={"prefix_cache": caching == "True"} if caching else {},
    )


def values(found: Found, reading: Reading, own: Sequence[Own]) -> dict[str, events.Value]:
    """Used blocks in cells of the map; and of a server without metrics, at least what our `own` requests are."""
    used, several = reading.values["used_blocks"], per_cell(reading)
    if used.value is not None and several > 1:
        note = f"in cells of {several} blocks; {used.note}"
        cells = msgspec.structs.replace(used, value=float(-(-used.value // several)), quality="derived", note=note)
        return reading.values | {"used_blocks": cells}
    if found.metrics_url:
        return reading.values
    running = sum(one.t_first is not None for one in own)
    note = "only requests that were sent from here: the server tells nothing of others"
    return reading.values | {
        name: events.Value(value=float(count), quality="derived", note=note)
        for name, count in (("running", running), ("waiting", len(own) - running))
    }


def cached(kv: Any) -> dict[str, events.Value]:
    """Tokens that are cached, by medium. `kv`: `kv_events.KvEvents`; {} without one, or while it hears nobody."""
    if kv is None or kv.state == "off":
        return {}
    live = kv.state == "live"
    note = "tokens of all blocks whose hash is stored there, copies counted" + ("" if live else f"; {kv.words}")
    return {
        f"{BY_MEDIUM}{medium.lower()}": events.Value(
            value=float(tokens), name="KV events", quality="measured" if live else "derived", note=note
        )
        for medium, tokens in ({GPU: 0} | kv.media()).items()
    }


def per_cell(reading: Reading) -> int:
    """Blocks that share a cell of the map: an engine may have blocks of one token, a million of them."""
    return max(1, CELL_TOKENS // reading.block_size) if reading.block_size else 1


def token_bytes(reading: Reading) -> int:
    """Of a token's keys and values; 0 where the engine's memory is no whole number of tokens, and so not all used.

    vLLM tells the memory that it was given, also where it was told to make fewer blocks of it: then it says nothing.
    """
    if reading.config.get("num_gpu_blocks_override", "None") not in ("None", ""):
        return 0
    try:
        memory, tokens = (int(reading.config[f"kv_cache_{name}"]) for name in ("memory_bytes", "size_tokens"))
    except (KeyError, ValueError):
        return 0
    return memory // tokens if tokens > 0 and memory % tokens == 0 else 0
