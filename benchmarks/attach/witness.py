"""What a server says, read without anything of KVScope's own: to be held against what KVScope shows of it.

Metrics by prometheus_client's parser, whole, several times a second. KV events as raw messages, replayed by brute force
into a multiset.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import msgspec
import zmq
from prometheus_client.parser import text_string_to_metric_families

END = (1 << 64) - 1
MASK = (1 << 64) - 1


@dataclass
class Sample:
    t: float  # time.monotonic, when it was asked
    values: dict[str, float]  # by sample name, summed over labels
    buckets: dict[str, dict[float, float]]  # by histogram: bound -> how many are at most that


class Metrics(threading.Thread):
    """Asks every `every_s` until it is closed; a server that is gone is a gap in `samples`."""

    def __init__(self, url: str, every_s: float = 0.2):
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self._url, self._every_s = url, every_s
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.is_set():
            begin = time.monotonic()
            try:
                with urllib.request.urlopen(self._url, timeout=5) as answer:  # noqa: S310  its own server
                    self.samples.append(_sample(begin, answer.read().decode()))
            except OSError:
                pass
            self._done.wait(max(0.0, self._every_s - (time.monotonic() - begin)))

    def close(self) -> None:
        self._done.set()
        self.join()

    def between(self, begin: float, end: float) -> list[Sample]:
        return [sample for sample in self.samples if begin <= sample.t <= end]


def _sample(t: float, text: str) -> Sample:
    values: dict[str, float] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name.endswith("_bucket"):
                buckets[name.removesuffix("_bucket")][float(labels["le"])] += value
            else:
                values[name] += value
    return Sample(t, dict(values), {name: dict(rows) for name, rows in buckets.items()})


def quantile_bounds(before: Sample, after: Sample, histogram: str, share: float) -> tuple[float, float] | None:
    """The bucket that holds the quantile of what was observed in between; None when nothing was."""
    then, now = before.buckets.get(histogram, {}), after.buckets.get(histogram, {})
    grown = sorted((bound, count - then.get(bound, 0.0)) for bound, count in now.items())
    if not grown or grown[-1][1] <= 0:
        return None
    low = 0.0
    for bound, count in grown:
        if count >= share * grown[-1][1]:
            return low, bound
        low = bound
    return None


class Events(threading.Thread):
    """Raw messages of one publisher, and on request those that it can tell again."""

    def __init__(self, endpoint: str, replay: str):
        super().__init__(daemon=True)
        self.payloads: dict[int, bytes] = {}  # by sequence number
        self._replay = replay
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.is_set():
            if self._socket.poll(100):
                *_, seq, payload = self._socket.recv_multipart()
                self.payloads[int.from_bytes(seq, "big")] = payload
        self._socket.close(0)

    def close(self) -> None:
        self._done.set()
        self.join()
        self._context.destroy(0)

    def fill(self) -> int:
        """Asks for all batches again; how many of them had not been heard live."""
        socket, missed = self._context.socket(zmq.DEALER), 0
        socket.connect(self._replay)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while socket.poll(5000):
            *_, seq, payload = socket.recv_multipart()
            number = int.from_bytes(seq, "big")
            if number == END:
                break
            missed += number not in self.payloads
            self.payloads[number] = payload
        socket.close(0)
        return missed

    def replayed(self) -> Cache:
        cache = Cache()
        for number in sorted(self.payloads):
            cache.apply(self.payloads[number])
        return cache


@dataclass
class Cache:
    """What is cached after all events in order."""

    copies: Counter[str] = field(default_factory=Counter)  # by hash, as 16 hexadecimal digits
    parent: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    most: int = 0  # copies at once

    def apply(self, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload)
        for event in batch["events"] if isinstance(batch, dict) else batch[1]:
            if isinstance(event, list):  # before 0.26
                names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
                event = dict(zip(names, event, strict=False))
            if event["type"] == "AllBlocksCleared":
                self.cleared += 1
                self.copies.clear()
                continue
            hashes = [f"{number & MASK:016x}" for number in event["block_hashes"]]
            if event["type"] == "BlockRemoved":
                self.removed += len(hashes)
                self.copies.subtract(hashes)
                self.copies = +self.copies
                continue
            self.stored += len(hashes)
            above = event["parent_block_hash"]
            above, size = "" if above is None else f"{above & MASK:016x}", event["block_size"]
            for place, name in enumerate(hashes):
                self.copies[name] += 1
                self.parent[name] = above
                self.tokens[name] = event["token_ids"][place * size : (place + 1) * size]
                above = name
            self.most = max(self.most, self.copies.total())
