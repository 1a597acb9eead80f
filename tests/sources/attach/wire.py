"""KV events as engines put them on the wire, in each layout, and a publisher with real sockets."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import zmq
from hypothesis import strategies as st

from backend.sources.attach.kv_sources import Endpoint

RECORDED = Path(__file__).resolve().parents[2] / "data" / "attach" / "kv_events_64_blocks.rawhex"
pack = msgspec.msgpack.Encoder().encode
END = (-1).to_bytes(8, "big", signed=True)


def recorded() -> list[bytes]:
    """What a real vLLM 0.32 with 63 usable blocks of 32 tokens said while it preempted and evicted."""
    return [bytes.fromhex(line) for line in RECORDED.read_text().split()]


def stored(*hashes, parent=None, size=4, tokens=None, **more) -> dict:
    """Tokens of a block follow from its hash, unless they are given."""
    if tokens is None:
        tokens = [(h if isinstance(h, int) else h[0]) * 7 % 50_000 + i for h in hashes for i in range(size)]
    event = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": size, "lora_id": None, "medium": "GPU"} | more


def removed(*hashes, **more) -> dict:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | more


CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: dict | list, t: float = 1.0, rank: int | None = 0) -> bytes:
    return pack([t, list(events), rank])


# Anything that msgpack can say, with the words of KV events in it.
ITEMS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=9)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "GPU", ""]),
    lambda inner: st.lists(inner, max_size=8)
    | st.dictionaries(st.sampled_from(["type", "block_hashes", "token_ids", "block_size", "ts", "events"]), inner),
    max_leaves=25,
)  # fmt: skip


class Publisher:
    """A PUB and a ROUTER socket on free loopback ports; keeps the newest `keep` batches for replay."""

    def __init__(
        self, *, replay: bool = True, topic_in_replay: bool = True, keep: int = 10_000, after: Publisher | None = None
    ):
        """`after`: at the addresses of one that has ended."""
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.bind(after.url if after else "tcp://127.0.0.1:*")
        self.url = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.sent: list[tuple[int, bytes]] = []
        self.next = 0
        self.keep, self.topic_in_replay = keep, topic_in_replay
        self.asked: list[int] = []
        self.router, self.replay_url, self._thread, self._ended = None, "", None, threading.Event()
        if replay:
            self.router = self.context.socket(zmq.ROUTER)
            self.router.bind(after.replay_url if after else "tcp://127.0.0.1:*")
            self.replay_url = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._thread = threading.Thread(target=self._answer, daemon=True)
            self._thread.start()

    def endpoint(self, **more) -> Endpoint:
        return Endpoint(url=self.url, replay=self.replay_url, **more)

    def send(self, body: bytes, *, seq: int | None = None, lose: bool = False) -> None:
        """`lose`: remembered for the replay, not published."""
        seq = self.next if seq is None else seq
        self.next = seq + 1
        self.sent = [*self.sent, (seq, body)][-self.keep :]
        if not lose:
            self.pub.send_multipart([b"kv-events", seq.to_bytes(8, "big"), body])

    def _answer(self) -> None:
        while not self._ended.is_set():
            if not self.router.poll(20):
                continue
            who, _, begin = self.router.recv_multipart()
            first = int.from_bytes(begin, "big")
            self.asked.append(first)
            topic = [b"kv-events"] if self.topic_in_replay else []
            for seq, body in self.sent:
                if seq >= first:
                    self.router.send_multipart([who, b"", *topic, seq.to_bytes(8, "big"), body])
            self.router.send_multipart([who, b"", *([b""] if topic else []), END, b""])
        self.router.close(0)

    def close(self) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join(5)
        self.pub.close(0)
        self.context.term()
