"""KV cache events as vLLM and SGLang put them on the wire, in every layout that releases have used.

A message is msgpack, decoded without types: layouts differ by version (vLLM pull requests 16750, 19737, 27577, 33304,
37688, 40984, 42892), and what is not known here must not stop what is.

    batch          [ts, [events], rank] without or with the rank, or a map {ts, events, data_parallel_rank}
    event          an array with its tag first, or a map with "type"; later fields are appended: positions are stable
    hash           an integer (unsigned in vLLM, signed in SGLang) or bytes; here text, for 64 bits do not fit JSON
    replay         frames ["", topic, seq, payload] or, before 0.26, ["", seq, payload]; seq -1 ends it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

MAX_PAYLOAD = 64 << 20  # bytes; a step that stores a million tokens has less
MAX_HASHES = 1 << 20  # of one event
END = (1 << 64) - 1  # the sequence number that ends a replay, as unsigned

_MASK = (1 << 64) - 1
_decode = msgspec.msgpack.Decoder().decode


class Malformed(ValueError):
    """Bytes that are no batch of events."""


class Stored(msgspec.Struct, kw_only=True):
    """Blocks that became full and answer prefix look-ups, a chain: each is the parent of the next."""

    hashes: list[str]
    parent: str = ""  # of the first one; "": they begin a prompt
    tokens: list[int] = []  # of all of them; [] when they were not told, or not `block_size` for each
    block_size: int
    group: int = 0  # of layers that share block tables, in hybrid models
    medium: str = "GPU"
    session: str = ""
    plain: bool = True  # tokens alone make the hash: no adapter, salt or picture


class Removed(msgspec.Struct, kw_only=True):
    hashes: list[str]
    group: int = 0
    medium: str = "GPU"
    remaining: list[int] | None = None  # copies that are left of each, where it is told


class Cleared(msgspec.Struct):
    """The whole cache was emptied."""


KvEvent = Stored | Removed | Cleared


class Batch(msgspec.Struct, kw_only=True):
    t: float  # the engine's wall clock
    events: list[KvEvent]
    rank: int | None = None  # of the data-parallel engine that says it; None: not told
    malformed: int = 0  # events in it that could not be understood
    unknown: int = 0  # events of a kind that is not known here


def decode(payload: bytes) -> Batch:
    """Raises Malformed. Events in it that make no sense are counted, not raised."""
    if len(payload) > MAX_PAYLOAD:
        raise Malformed(f"a message of {len(payload)} bytes")
    try:
        found = _decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise Malformed(str(error)) from None
    if isinstance(found, dict):
        t, events = found.get("ts"), found.get("events")
        rank = found.get("data_parallel_rank", found.get("attn_dp_rank"))
    elif isinstance(found, list) and len(found) >= 2:
        t, events, rank = found[0], found[1], found[2] if len(found) > 2 else None
    else:
        raise Malformed("neither an array of two or more nor a map")
    if not isinstance(events, list) or isinstance(t, bool) or not isinstance(t, int | float):
        raise Malformed("no time or no list of events in it")
    batch = Batch(t=float(t), events=[], rank=rank if _is_index(rank) else None)
    for each in events:
        _add(batch, each)
    return batch


def frames(parts: Sequence[bytes]) -> tuple[int, bytes]:
    """(sequence number, payload) of a message's frames, live or from the replay. Raises Malformed."""
    if len(parts) < 2 or len(parts[-2]) != 8:
        raise Malformed(f"{len(parts)} frames, or none of 8 bytes where the sequence number should be")
    return int.from_bytes(parts[-2], "big"), parts[-1]


_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    "group_idx",
)
_REMOVED = ("block_hashes", "medium", "group_idx")


def _add(batch: Batch, said: Any) -> None:
    if isinstance(said, dict):
        tag, fields = said.get("type"), said
    elif isinstance(said, list) and said:
        tag = said[0]
        names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(tag if isinstance(tag, str) else "", ())
        fields = dict(zip(names, said[1:], strict=False))
    else:
        tag, fields = None, {}
    try:
        match tag:
            case "BlockStored":
                batch.events.append(_stored(fields))
            case "BlockRemoved":
                batch.events.append(_removed(fields))
            case "AllBlocksCleared":
                batch.events.append(Cleared())
            case str():
                batch.unknown += 1
            case _:
                batch.malformed += 1
    except Malformed:
        batch.malformed += 1


def _stored(fields: dict) -> Stored:
    hashes, size = _hashes(fields), fields.get("block_size")
    if not _is_index(size) or size == 0:
        raise Malformed("block_size")
    parent = fields.get("parent_block_hash")
    extra = fields.get("extra_keys")
    return Stored(
        hashes=hashes,
        parent="" if parent is None else _name(parent),
        tokens=_tokens(fields.get("token_ids"), size * len(hashes)),
        block_size=size,
        group=_group(fields),
        medium=_medium(fields),
        session=_text(fields.get("session_id")),
        plain=fields.get("lora_name") is None and fields.get("lora_id") is None and not _any_key(extra),
    )


def _removed(fields: dict) -> Removed:
    hashes, left = _hashes(fields), fields.get("remaining_copy_counts")
    told = isinstance(left, list) and len(left) == len(hashes) and all(map(_is_index, left))
    return Removed(hashes=hashes, group=_group(fields), medium=_medium(fields), remaining=left if told else None)


def _hashes(fields: dict) -> list[str]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or len(hashes) > MAX_HASHES:
        raise Malformed("block_hashes")
    return [_name(each) for each in hashes]


def _name(value: Any) -> str:
    """A hash as text; the same for one number signed and unsigned."""
    if isinstance(value, bytes) and value:
        return value.hex()
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value & _MASK:016x}"
    if isinstance(value, str) and value:
        return value[:128]
    raise Malformed("a hash that is neither a number nor bytes")


def _tokens(value: Any, count: int) -> list[int]:
    """[] when there is not one for each place. Pairs (of draft models) count by their first."""
    if not isinstance(value, list) or len(value) != count:
        return []
    tokens = [each[0] if isinstance(each, list) and each else each for each in value]
    return tokens if all(map(_is_index, tokens)) else []


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _group(fields: dict) -> int:
    group = fields.get("group_idx")
    return group if _is_index(group) else 0


def _medium(fields: dict) -> str:
    """GPU unless another one is told: the field is younger than the events."""
    return _MEDIA.get(medium := _text(fields.get("medium")).upper(), medium)


_MEDIA = {"": "GPU", "CPU_PINNED": "CPU", "HOST": "CPU", "STORAGE": "DISK"}


def _text(value: Any) -> str:
    return value[:64] if isinstance(value, str) else ""


def _any_key(extra: Any) -> bool:
    return isinstance(extra, list) and any(extra)
