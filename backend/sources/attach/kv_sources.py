"""Where an engine publishes its KV events: from what it says about itself, or from what a person typed."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from backend.server.listen import is_loopback

ANYWHERE = {"", "*", "0.0.0.0", "::", "[::]"}  # noqa: S104  what publishers say when they listen everywhere
MAX_RANKS = 256


class BadEndpoint(ValueError):
    """An address that cannot be listened to; plain words."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    url: str  # tcp://host:port, as it is reached from here
    replay: str = ""  # the same of the socket that tells past batches again; "": there is none
    topic: str = ""  # "": all
    rank: int = 0  # of the data-parallel engine behind it, where its batches do not say
    bind: bool = False  # the publisher connects to us: vLLM does where its endpoint names one host


def typed(text: str, replay: str = "") -> Endpoint:
    """From a person: `tcp://host:port`, or `bind+tcp://host:port` to wait there. With a replay address after a comma.

    Raises BadEndpoint.
    """
    url, _, after = text.strip().partition(",")
    bind = url.startswith("bind+")
    url, replay = url.removeprefix("bind+").strip(), replay.strip() or after.strip()
    for address in filter(None, (url, replay)):
        if not _is_address(address):
            raise BadEndpoint(
                f"KV events come from an address like tcp://host:5557 or ipc:///path, not '{address[:80]}'"
            )
    if not url:
        raise BadEndpoint("KV events need an address like tcp://host:5557")
    return Endpoint(url=url, replay=replay, bind=bind)


def of_vllm(said: Any, server_url: str) -> list[Endpoint]:
    """From `GET /kv_event_sources`: an object by rank, a list, or a list named "sources". What makes no sense is left
    out. An engine of our own says "bound": it listens where it says, whatever the host."""
    if isinstance(said, dict) and isinstance(said.get("sources"), list):
        said = said["sources"]
    rows = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    found = []
    for place, row in list(rows)[:MAX_RANKS]:
        if not isinstance(row, dict) or not (url := reached(row.get("endpoint"), server_url)):
            continue
        rank = row.get("data_parallel_rank", place)
        found.append(
            Endpoint(
                url=url,
                replay=reached(row.get("replay_endpoint"), server_url),
                topic=_text(row.get("topic")),
                rank=int(rank) if str(rank).isdecimal() else 0,
                bind=row.get("bound") is not True and _waits_for_us(row.get("endpoint")),
            )
        )
    return found


def of_sglang(info: Any, server_url: str) -> tuple[list[Endpoint], int]:
    """(endpoints, tokens of a page or 0) from `GET /server_info`: its `kv_events`, or else its configuration."""
    if not isinstance(info, dict):
        return [], 0
    said = info.get("kv_events")
    if isinstance(said, dict) and isinstance(port := said.get("endpoint_port_base"), int):
        host = _text(said.get("endpoint_host"))
        base, replay, topic = f"tcp://{host or '*'}:{port}", "", _text(said.get("topic"))
        ranks, page = said.get("dp_size"), said.get("block_size")
    else:
        config = _object(info.get("kv_events_config"))
        if config.get("publisher") != "zmq":
            return [], 0
        base, replay = _text(config.get("endpoint")) or "tcp://*:5557", _text(config.get("replay_endpoint"))
        topic = _text(config.get("topic"))
        ranks, page = info.get("dp_size") if info.get("enable_dp_attention") else 1, info.get("page_size")
    ranks = ranks if isinstance(ranks, int) and 0 < ranks <= MAX_RANKS else 1
    found = [
        Endpoint(
            url=url,
            replay=reached(_shifted(replay, rank), server_url),
            topic=topic,
            rank=rank,
        )
        for rank in range(ranks)
        if (url := reached(_shifted(base, rank), server_url))
    ]
    return found, page if isinstance(page, int) and page > 0 else 0


def _waits_for_us(endpoint: Any) -> bool:
    """vLLM connects, instead of listening, to an endpoint of one host; from elsewhere only a loopback one says so for
    sure, for it also tells where `tcp://*:0` came to listen."""
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return False
    return is_loopback(endpoint[6:].rpartition(":")[0].strip("[]"))


def reached(endpoint: Any, server_url: str) -> str:
    """A publisher's address as seen from here: one that listens everywhere is where its server is. "" if none.

    A path (ipc://) is believed only of a server on this machine: another one has no business with our files.
    """
    if not isinstance(endpoint, str):
        return ""
    if endpoint.startswith("ipc:///"):
        return endpoint if is_loopback(urlsplit(server_url).hostname or "") else ""
    if not endpoint.startswith("tcp://"):
        return ""
    host, _, port = endpoint[6:].rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return ""
    if host in ANYWHERE:
        host = urlsplit(server_url).hostname or ""
        host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{port}" if host else ""


def _is_address(text: str) -> bool:
    if text.startswith("ipc://"):
        return len(text) > 6
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    return text.startswith("tcp://") and bool(host) and (port == "*" or (port.isdecimal() and int(port) < 65536))


def _shifted(endpoint: str, rank: int) -> str:
    """The port of a rank is the first one's plus the rank."""
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if base and port.isdecimal() else endpoint


def _object(value: Any) -> dict:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return {}
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""
