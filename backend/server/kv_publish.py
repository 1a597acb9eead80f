"""Our KV cache's events for tools that listen to vLLM: routers, indexers, and the dashboard attached from elsewhere.

vLLM's wire since 0.26: a PUB socket with [topic, number, msgpack], events as maps, one batch a step that had any; a
ROUTER socket that tells the newest batches again. Blocks are stored when they are full and hashed, removed when a
cached one is evicted. ZeroMQ has no key and no TLS, and the batches hold the prompts' token ids: loopback unless told
otherwise.

The engine's thread pays for a look at the event, and for a slice of token ids where a block became full. All else
happens in a thread of its own.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from backend import events

log = logging.getLogger("kvscope.server")

TOPIC = "kv-events"
KEPT_BATCHES = 10_000  # for replay, as vLLM keeps by default
KEPT_BYTES = 64 << 20  # of them
MAX_WAITING = 100_000  # batches; beyond, the thread has died or the machine stands still
ANSWER_S = 0.1  # a question for replay may wait so long
END = (-1).to_bytes(8, "big", signed=True)

Content = tuple[list[int], bytes]  # token ids of a block, namespace of its hash
Look = Callable[[int, int, int], Content]  # (request, begin, end)
_pack = msgspec.msgpack.Encoder().encode


def hash64(digest: str) -> int:
    """A content hash as vLLM tells it by default: the last 64 bits, unsigned."""
    return int(digest, 16) & (1 << 64) - 1


class Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """Nothing is left out: readers of array and map alike find each field."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = "GPU"
    group_idx: int = 0


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class Ledger:
    """Facts of the engine in, KV events out. Ours name blocks, vLLM's only hashes: it knows which block has which."""

    def __init__(self) -> None:
        self._hash_of: dict[int, int] = {}
        self._block_size = 0

    def told(self, event: events.Event, contents: list[Content]) -> list[Stored | Removed | Cleared]:
        """`contents`: of each block, where `event` says that blocks were sealed."""
        match event:
            case events.Step():
                return self._evicted(event)
            case events.Sealed():
                return self._sealed(event, contents)
            case events.Configured() | events.Hello():
                self._block_size = event.block_size
                return self._cleared()
            case events.Cleared():
                return self._cleared()
        return []

    def _cleared(self) -> list[Cleared]:
        if not self._hash_of:
            return []
        self._hash_of.clear()
        return [Cleared()]

    def _evicted(self, step: events.Step) -> list[Removed]:
        """A block that is given out anew loses what it held."""
        gone = []
        for op in step.ops:
            given = op[2:] if op[0] == "alloc" else op[3:4] if op[0] == "copy" else ()
            gone += [self._hash_of.pop(block) for block in given if block in self._hash_of]
        return [Removed(gone)] if gone else []

    def _sealed(self, sealed: events.Sealed, contents: list[Content]) -> list[Stored]:
        """Neighbours in a request go together: each is the parent of the next."""
        told: list[Stored] = []
        before: tuple[int, str] = 0, ""  # request and hash of the block before
        for (block, digest, parent, request, _), (ids, salt) in zip(sealed.blocks, contents, strict=True):
            self._hash_of[block] = hash64(digest)
            if not (told and parent and before == (request, parent)):
                told.append(Stored([], hash64(parent) if parent else None, [], self._block_size, extra_keys=[]))
            told[-1].block_hashes.append(hash64(digest))
            told[-1].token_ids.extend(ids)
            told[-1].extra_keys.append([salt.decode(errors="replace")] if salt and not parent else None)
            before = request, digest
        return told


class KvPublisher:
    """Binds at once; raises OSError, with the address, where it cannot."""

    def __init__(self, endpoint: str, replay: str = ""):
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER) if replay else None
        self.endpoint, self.replay = "", ""
        try:
            self.endpoint = _bind(self._pub, endpoint)
            if self._router is not None:
                self.replay = _bind(self._router, replay)
        except OSError:
            self._close_sockets()
            raise
        self._look: Look = lambda request, begin, end: ([], b"")
        self._block_size = 0
        self._inbox: queue.SimpleQueue[tuple[events.Event, list[Content]] | None] = queue.SimpleQueue()
        self._ledger = Ledger()
        self._batch: list[Any] = []
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = self._next = 0
        self._thread = threading.Thread(target=self._run, name="kv-publisher", daemon=True)

    def sources(self) -> list[dict[str, Any]]:
        """For GET /kv_event_sources, as vLLM answers it."""
        return [
            {
                "data_parallel_rank": 0,
                "endpoint": self.endpoint,
                "replay_endpoint": self.replay or None,
                "topic": TOPIC,
                "bound": True,  # ours: vLLM would connect to an address of one host, this one listens there
            }
        ]

    def start(self, look: Look) -> None:
        """`look` is asked in the engine's thread only, for requests that it has."""
        self._look = look
        self._thread.start()

    def take(self, event: events.Event) -> None:
        """From the engine's thread."""
        kind = type(event)
        if kind is events.Step:
            if event.ops or event.sealed:
                self._inbox.put((event, []))
        elif kind is events.Sealed:
            size = self._block_size
            self._inbox.put((event, [self._look(number, at, at + size) for *_, number, at in event.blocks]))
        elif kind is events.Cleared or kind is events.Hello or (kind is events.Configured and event.rebuilt):
            if kind is not events.Cleared:
                self._block_size = event.block_size
            self._inbox.put((event, []))

    def close(self) -> None:
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(2 * ANSWER_S + 1)
        else:
            self._close_sockets()

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                if self._router is not None and self._router.poll(0):
                    self._answer()
                try:
                    taken = self._inbox.get(timeout=ANSWER_S)
                except queue.Empty:
                    continue
                if taken is None:
                    return
                self._tell(*taken)
        except Exception:  # a mistake of ours: listeners see silence, the engine goes on
            log.exception("publishing KV events ended")
        finally:
            self._close_sockets()

    def _tell(self, event: events.Event, contents: list[Content]) -> None:
        self._batch += self._ledger.told(event, contents)
        if isinstance(event, events.Step) and event.sealed:
            return  # what it sealed is told next, and belongs to the same step
        if not self._batch:
            return
        payload = _pack([time.time(), self._batch, 0])
        self._batch = []
        self._pub.send_multipart([TOPIC.encode(), self._next.to_bytes(8, "big"), payload])
        self._kept.append((self._next, payload))
        self._kept_bytes += len(payload)
        self._next += 1
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self) -> None:
        """[who, "", first number] is answered with all since, then number -1."""
        asked = self._router.recv_multipart()
        if len(asked) != 3 or len(asked[2]) != 8:
            return
        who, first, topic = asked[0], int.from_bytes(asked[2], "big"), TOPIC.encode()
        for number, payload in self._kept:
            if number >= first:
                self._router.send_multipart([who, b"", topic, number.to_bytes(8, "big"), payload])
        self._router.send_multipart([who, b"", b"", END, b""])

    def _close_sockets(self) -> None:
        self._pub.close(0)
        if self._router is not None:
            self._router.close(0)
        self._context.term()


def _bind(socket: zmq.Socket, address: str) -> str:
    """Where it listens then: the port is chosen here for one that ends in :0."""
    try:
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
        socket.bind(address)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{address}: {error.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
