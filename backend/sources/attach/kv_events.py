"""A foreign engine's KV events, followed: its map of cached blocks, its prefix tree, what was missed.

    kv = KvEvents(endpoints, num_blocks=63, detokenize=ask_the_engine)
    kv.start(publish)      # Resident and Sealed events, from a thread of its own
    kv.state, kv.words     # live | partial | gap | off, and why in plain words
    kv.table_of(tokens)    # cells of a request of our own, inferred from its tokens

Subscribed first, then replayed: what comes live meanwhile waits and is told apart by its number. Positions on the map
are the dashboard's, not the GPU's; which request holds a block, and blocks that are not full, are told by no engine.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from backend.events import Event, Resident, Sealed
from backend.sources.attach.kv_cells import Cell, Change
from backend.sources.attach.kv_decode import Batch, Cleared, Malformed, decode
from backend.sources.attach.kv_link import Link
from backend.sources.attach.kv_order import Verdict
from backend.sources.attach.kv_sources import Endpoint
from backend.sources.attach.kv_text import Detokenize, Reader
from backend.sources.attach.kv_tree import Counts, Residency

log = logging.getLogger("kvscope.sources")

RECHECK_S = 1.0  # after a connection was made: batches between the replay and the subscription are asked for once more
POLL_S = 0.25
JOIN_S = 5.0
Publish = Callable[[Event], None]


class KvEvents:
    """`num_blocks`: cells of the map; 0 until it is known, see `resize`. `detokenize`: token ids as text, may raise."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        num_blocks: int = 0,
        detokenize: Detokenize | None = None,
        wall: Callable[[], float] = time.time,
    ):
        self.endpoints = list(endpoints)
        self._residency = Residency(num_blocks, keep_tokens=True)
        self._reader = Reader(detokenize, self._read)
        self._wall = wall
        self._lock = threading.RLock()  # around the residency, the links' order, and what is published about them
        self._links: list[Link] = []
        self._problem = ""
        self._since = 0.0  # wall clock, when we began to listen
        self._publish: Publish = lambda event: None
        self._stop = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self, publish: Publish) -> None:
        """Listens from now on. `publish` is called from another thread."""
        self._publish, self._since = publish, self._wall()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Harmless when closed already, or never started."""
        if not self._stop.is_set():
            self._stop.set()
            self._waker.close()  # the thread's end becomes readable
        self._reader.close()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    # ---- look ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return self._said()[0]

    @property
    def words(self) -> str:
        return self._said()[1]

    @property
    def counts(self) -> Counts:
        with self._lock:
            return dataclasses.replace(self._residency.counts)

    @property
    def block_size(self) -> int:
        """Tokens of the engine's own block; 0: not known yet."""
        return self._residency.block_size

    def media(self) -> dict[str, int]:
        """Tokens that are resident, by medium: GPU, CPU, DISK."""
        with self._lock:
            return self._residency.media()

    def resident(self) -> dict[str, int]:
        """Copies on the GPU by hash."""
        with self._lock:
            return {name: count for (_, _, name), count in self._residency.resident().items()}

    def table_of(self, tokens: Sequence[int]) -> list[int]:
        """Cells of the full blocks of a prompt and answer of our own. Inferred from their content, not told."""
        with self._lock:
            return self._residency.table_of(tokens)

    def resize(self, num_blocks: int) -> None:
        """How many blocks the engine has, now that it is known."""
        with self._lock:
            if num_blocks != self._residency.cells.count:
                self._residency.cells.resize(num_blocks)
                self._tell(self._residency.everything())

    def announce(self) -> None:
        """Tells the whole map again, for a hub that has begun a new epoch."""
        with self._lock:
            self._tell(self._residency.everything())

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        try:
            for endpoint in self.endpoints:
                try:
                    self._links.append(Link(context, endpoint))
                except zmq.ZMQError as error:
                    self._problem = f"{endpoint.url} cannot be listened to: {error}"
            self._listen()
        except Exception as error:  # a mistake of ours must not pass for an engine that is silent
            log.exception("following KV events failed")
            self._problem = f"internal error: {type(error).__name__}: {error}"
        finally:
            for link in self._links:
                link.close()
                link.connected = False
            context.destroy(linger=0)
            self._woken.close()

    def _listen(self) -> None:
        poller, owner = zmq.Poller(), {}
        poller.register(self._woken, zmq.POLLIN)
        for link in self._links:
            for heard in (link.live, link.monitor):
                poller.register(heard, zmq.POLLIN)
                owner[heard] = link
        recheck: dict[Link, float] = {}
        while self._links and not self._stop.is_set():
            ready = [owner[heard] for heard, _ in poller.poll(POLL_S * 1e3) if heard in owner]
            for link in dict.fromkeys(ready):
                if link.turned():
                    self._catch_up(link, from_start=True)
                    link.connected = True
                    recheck[link] = time.monotonic() + RECHECK_S
                self._drain(link)
            for link in [link for link, due in recheck.items() if due <= time.monotonic()]:
                del recheck[link]
                if link.answered:
                    self._catch_up(link, from_start=False)

    def _drain(self, link: Link) -> None:
        for _ in range(1000):  # then the others have their turn
            try:
                message = link.receive()
                if message is None:
                    return
                seq, payload = message
                batch = decode(payload)
            except Malformed:
                with self._lock:
                    self._residency.counts.malformed += 1
                continue
            self._hear(link, seq, batch)

    def _hear(self, link: Link, seq: int, batch: Batch) -> None:
        order = link.order
        verdict = order.judge(seq, batch.t)
        if verdict is Verdict.RESTART:
            self._begin_anew(link)
            verdict = order.judge(seq, batch.t)
        if verdict is Verdict.AHEAD:
            self._catch_up(link, from_start=False, before=seq)
        if seq > order.last:
            self._take(link, seq, batch, live=True)
        else:
            order.live = max(order.live, seq)

    def _catch_up(self, link: Link, *, from_start: bool, before: int | None = None) -> None:
        """Asks for what is missing. From the start when a connection was made: then it may be another publisher's."""
        if link.mute and not from_start:
            return
        order = link.order
        known = order.last >= 0
        replayed = link.replay(0 if from_start else order.last + 1, self._stop.is_set)
        if replayed is None:
            return
        batches = []
        for seq, payload in replayed:
            try:
                batches.append((seq, decode(payload)))
            except Malformed:
                with self._lock:
                    self._residency.counts.malformed += 1
        if from_start and known:
            there = dict(batches).get(order.last)
            newest = batches[-1][0] if batches else -1
            if newest < order.last or (there is not None and there.t != order.last_t):
                self._begin_anew(link)
        for seq, batch in batches:
            if seq > order.last and (before is None or seq < before):
                self._take(link, seq, batch, live=False)

    def _begin_anew(self, link: Link) -> None:
        """The publisher was started again: its cache is empty."""
        with self._lock:
            link.order.restart()
            self._tell(self._residency.clear(link.endpoint.rank if len(self._links) > 1 else None))

    def _take(self, link: Link, seq: int, batch: Batch, *, live: bool) -> None:
        with self._lock:
            link.order.take(seq, batch.t, live=live)
            change = self._residency.apply(batch, link.endpoint.rank)
            if any(isinstance(event, Cleared) for event in batch.events):
                link.order.whole()
            self._tell(change)

    # ---- out -----------------------------------------------------------------------------------------------------

    def _tell(self, change: Change) -> None:
        """Under the lock, so that events leave in the order in which things happened."""
        if change:
            stored = [cell.slot for cell in change.stored]
            self._publish(Resident(stored=stored, removed=change.removed, cleared=change.cleared))
        if change.stored:
            self._publish(Sealed(blocks=[_meaning(cell) for cell in change.stored]))
        told = [*change.stored, *change.grown]
        readable = [(cell, list(tokens)) for cell in told if (tokens := self._residency.take_tokens(cell))]
        if readable:
            self._reader.read(readable)

    def _read(self, blocks: list[tuple[Cell, str]]) -> None:
        """What cells say, from the reader's thread."""
        with self._lock:
            here = [(cell, text) for cell, text in blocks if self._residency.cells.holds(cell)]
            if here:
                meanings, texts = [_meaning(cell) for cell, _ in here], [text for _, text in here]
                self._publish(Sealed(blocks=meanings, texts=texts))

    def _said(self) -> tuple[str, str]:
        """State and words."""
        with self._lock:
            links, counts = list(self._links), self._residency.counts
            if self._problem:
                return "off", self._problem
            if not self.endpoints:
                return "off", "this engine publishes no KV events"
            if self._stop.is_set():
                return "off", "no longer listening"
            silent = [link.name for link in links if not link.connected]
            if silent and all(link.order.joined is None for link in links):
                return "off", f"waiting for a publisher at {', '.join(silent)}"
            since = time.strftime("%H:%M:%S", time.localtime(self._since))
            faults = [f"no connection to {', '.join(silent)}: shown is what was there"] if silent else []
            lost = sum(last - first + 1 for link in links for first, last in link.order.gaps)
            if lost:
                faults.append(f"{lost} batches of events are lost: blocks may be missing or shown too long")
            late = [link for link in links if link.order.partial or (link.order.joined is None and not link.answered)]
            if late:
                why = (
                    "the engine does not replay older events"
                    if not all(link.answered for link in late)
                    else "the engine keeps only its newest events"
                )
                faults.append(f"partial since {since}: blocks cached before are not known, {why}")
            if counts.forgotten:
                faults.append(f"{counts.forgotten} of the oldest hashes were forgotten: there are too many")
            if counts.malformed:
                faults.append(f"{counts.malformed} messages or events could not be understood")
            if not faults:
                return "live", "KV events are followed from the first on"
            return "gap" if lost or silent else "partial", "; ".join(faults)


def _meaning(cell: Cell) -> tuple[int, str, str, int, int]:
    return cell.slot, cell.name, cell.parent, 0, cell.position
