"""One source in, many viewers out. The hub folds events, keeps their recent lines, and hands both to whoever asks.

In the engine's process the engine publishes events from its own thread: a deque append, and one wake-up of the event
loop for all that a step says. Encoding happens later, on the loop. In the UI's process a follower ingests the lines
that the engine's hub encoded; they are kept as they came. Pictures live on lines, so decoding and folding can wait
until somebody asks for the state, or until there is enough to do: at once, it costs a fraction of what it does step by
step, each time with caches that others have filled meanwhile.

A viewer is a cursor into the history, not a queue: one that is slow finds more lines behind its cursor and gets them in
one frame, one that has fallen out of the history gets a snapshot. Nothing here grows with the number of viewers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, get_args

import msgspec

from backend import events, fold, prefix_tree
from backend.history import Entry, History
from backend.texts import Heard, Texts

Result = TypeVar("Result")

WATCHED_S = 0.001  # from an event to the pump that handles it, so that one pump serves all events of a step
UNWATCHED_S = 0.05  # the same while nobody looks: folding in bigger batches leaves the engine alone
OVERLAP_S = 2.0  # what a frame of `frame` tells again
TREE_S = 0.5
TREE_SHARE = 20  # times as long as making it took: at most 5 % of the time
LATE_EVENTS = 48  # folded at the latest when so many wait: about a millisecond
HELD_EVENTS = 4096  # published events that may wait where no event loop runs

Reading = dict[int, Heard]  # the requests a viewer reads along with, and how far it is in each


class _Head(msgspec.Struct):
    """What every line has, whatever its type."""

    type: str
    seq: int = 0
    t: float = 0.0


def _tag(kind: type[events.Event]) -> str:
    return kind.__struct_config__.tag


_HELLO, _SNAPSHOT = _WHOLE = tuple(map(_tag, (events.Hello, events.Snapshot)))
# Not text, which a browser asks for, and nothing that it would not know.
_SHOWN = frozenset(map(_tag, get_args(events.AnyEvent))) - set(map(_tag, events.TEXT_CHANNEL))
_STEP, _BEHIND = _tag(events.Step), b',"schedule_s":'
_encode = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(_Head).decode


class Hub:
    def __init__(self, *, max_lines: int = 20_000, max_bytes: int = 16 * 2**20, max_characters: int = 32 * 2**20):
        self._state = fold.State()
        self._late: list[events.Event | bytes] = []  # heard, not in the state and the texts yet
        self._seq = 0  # of the newest event heard
        self._gaps = 0
        self._history = History(max_lines, max_bytes)
        self._texts = Texts(max_characters)
        self._inbox: deque[events.Event] = deque()
        self._lock = threading.RLock()  # around state, history and texts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = False  # a pump is on its way
        self._listeners: dict[asyncio.AbstractEventLoop, set[asyncio.Event]] = {}
        self._told: set[asyncio.AbstractEventLoop] = set()  # loops that are being woken
        self._tree: tuple[float, int, dict] = 0.0, -1, {}  # when it may be made anew, of which state it is, the tree
        self._deltas: dict[int | None, str] = {}  # cursor -> what came since, shared by the viewers there

    # ---- in ------------------------------------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Names the loop that pumps, by default the running one. Who listens attaches its own if there is none."""
        self._loop = loop or asyncio.get_running_loop()
        self._due = bool(self._inbox)
        if self._due:
            self._loop.call_soon_threadsafe(self._schedule)

    def publish(self, event: events.Event) -> None:
        """Takes an event over, from any thread, at next to no cost. It is the hub's from now on."""
        self._inbox.append(event)
        if self._due:
            return
        if self._loop is None:
            if len(self._inbox) >= HELD_EVENTS:
                self.pump()
            return
        self._due = True
        try:
            self._loop.call_soon_threadsafe(self._schedule)
        except RuntimeError:  # the loop is closed: from here on as if there had been none
            self._loop, self._due = None, False

    def ingest(self, *lines: bytes) -> None:
        """Takes in lines of another hub, from any thread. They are kept as they are.

        Raises fold.NewerSchema; msgspec.DecodeError for a line that is no JSON object with a type, or a state that is
        none.
        """
        with self._lock:
            for line in lines:
                head = _decode_head(line)
                try:
                    self._take(head.type, head.seq, head.t, line, line)
                except UnicodeDecodeError as error:
                    raise msgspec.DecodeError(str(error)) from None
        self._wake()
        self._keep_up()

    def pump(self) -> None:
        """Takes in what was published. Callable from anywhere; the loop calls it by itself."""
        self._due = False
        inbox = self._inbox
        if not inbox:
            return
        with self._lock:
            while inbox:
                event = inbox.popleft()
                _round(event)
                self._take(_tag(type(event)), event.seq, event.t, events.encode(event), event)
        self._wake()
        self._keep_up()

    # ---- look ----------------------------------------------------------------------------------------------------

    @property
    def gaps(self) -> int:
        """How often numbers were missing between two events, ever."""
        return self._gaps

    def read(self, function: Callable[[fold.State], Result]) -> Result:
        """`function(state)` while nothing moves. It must be short, and keep nothing of the state but copies."""
        with self._lock:
            self._catch_up()
            return function(self._state)

    def snapshot(self) -> events.Snapshot:
        """The state as an event; its content is encoded already and belongs to the caller."""
        with self._lock:
            self._catch_up()
            return events.Snapshot(seq=self._state.seq, t=self._state.t, state=msgspec.Raw(_encode(self._state)))

    @property
    def before(self) -> int:
        """Number of the event before the oldest line that is left: `lines_since` knows all after it."""
        return self._history.before

    def lines_since(self, seq: int, epoch: str = "") -> list[bytes] | None:
        """All lines after number `seq` of `epoch` ("": of the present one); None when some are gone."""
        with self._lock:
            self.pump()
            cursor = self._cursor_after(seq, epoch)
            return None if cursor is None else [entry.line for entry in self._history.since(cursor)]

    def text(self, request: int, heard: Heard = Heard()) -> tuple[dict | None, Heard]:
        with self._lock:
            self._catch_up()
            return self._texts.tail(request, heard)

    def block(self, block: int) -> dict | None:
        with self._lock:
            self._catch_up()
            return self._texts.block(block, self._state)

    def table(self, request: int, inferred: Sequence[int] | None = None) -> dict | None:
        """See `Texts.table`."""
        with self._lock:
            self._catch_up()
            return self._texts.table(request, self._state, inferred)

    def tree(self) -> dict:
        """The prefix tree, see `prefix_tree.picture`; not the caller's to change. Made anew at most every TREE_S, and
        less often where that is dear: it is made under the lock."""
        with self._lock:
            self._catch_up()
            begin, (due, seq, told) = time.monotonic(), self._tree
            if begin >= due and seq != self._state.seq:
                told = prefix_tree.picture(self._texts, self._state)
                end = time.monotonic()
                self._tree = end + max(TREE_S, TREE_SHARE * (end - begin)), self._state.seq, told
            return told

    # ---- out -----------------------------------------------------------------------------------------------------

    def delta(self, cursor: int | None, reading: Reading | None = None) -> tuple[int, str]:
        """(next cursor, JSON array of events) for a viewer: what came since `cursor`, or a snapshot.

        None as cursor asks for a snapshot. "" instead of an array: nothing that a picture shows. `reading` is updated.
        """
        with self._lock:
            self.pump()
            if cursor is not None and not self._history.first <= cursor <= self._history.next:
                cursor = None  # fell out
            if cursor not in self._deltas:
                self._deltas[cursor] = self._content(cursor)
            content = self._deltas[cursor]
            if reading:
                self._catch_up()
                content = ",".join(filter(None, [content, *self._read_along(reading)]))
            return self._history.next, f"[{content}]" if content else ""

    def frame(
        self,
        cursor: int | None = None,
        *,
        watch: Iterable[int] = (),
        block: int | None = None,
        table: int | None = None,
        inferred: Sequence[int] | None = None,
    ) -> tuple[int, bytes]:
        """Like `delta`, for a viewer that is shown only some of its frames, as with reruns of a page.

        Each frame reaches back over the last OVERLAP_S (a fold skips what it knows) and begins with
        {"type": "since", "seq": n}: all that happened after n is in it. A viewer behind n needs a frame of cursor None.
        Answers what the viewer asked last: the whole text of requests it reads, a block, a block table.
        """
        with self._lock:
            self._catch_up()
            parts = [self._content(None)] if cursor is None or cursor < self._history.first else self._recent(cursor)
            parts += self._read_along({request: Heard() for request in watch})
            answers = [
                None if block is None else self._texts.block(block, self._state),
                None if table is None else self._texts.table(table, self._state, inferred),
            ]
            parts += [_encode(answer).decode() for answer in answers if answer is not None]
            return self._history.next, f"[{','.join(parts)}]".encode()

    async def follow(self, since: int | None = None, epoch: str = "") -> AsyncIterator[list[bytes]]:
        """Batches of lines, for ever, as they come: those after number `since` of `epoch`, or a snapshot first.

        With a snapshot come unnumbered text events, so that what requests said before is known too.
        """
        with self.listening() as changed:
            with self._lock:
                self.pump()
                cursor = None if since is None else self._cursor_after(since, epoch)
            while True:
                changed.clear()
                with self._lock:
                    self.pump()
                    entries = None if cursor is None else self._history.since(cursor)
                    lines = self._story() if entries is None else [entry.line for entry in entries]
                    cursor = self._history.next
                if lines:
                    yield lines
                else:
                    await changed.wait()

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set whenever there is something new."""
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self.attach(loop)
        changed = asyncio.Event()
        self._listeners.setdefault(loop, set()).add(changed)
        try:
            yield changed
        finally:
            self._listeners[loop].discard(changed)
            if not self._listeners[loop]:
                del self._listeners[loop]

    # ---- inside --------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        self._loop.call_later(WATCHED_S if self._listeners else UNWATCHED_S, self.pump)

    def _catch_up(self) -> None:
        """Under the lock: the state and the texts are of now."""
        self.pump()
        self._fold_late()

    def _keep_up(self) -> None:
        """After the listeners were told: their frames need no state."""
        if len(self._late) >= LATE_EVENTS:
            with self._lock:
                self._fold_late()

    def _fold_late(self) -> None:
        late, self._late = self._late, []
        state, apply, hear = self._state, fold.apply, self._texts.hear
        for event in late:
            if type(event) is bytes:
                try:
                    event = events.decode_lazily(event)
                except msgspec.DecodeError:  # of a kind that is not known here (a newer engine's), or broken: counted
                    state.seq = max(state.seq, _decode_head(event).seq)
                    continue
            apply(state, event)
            hear(event, state)

    def _take(self, kind: str, seq: int, t: float, line: bytes, event: events.Event | bytes) -> None:
        """Under the lock: remember, fold what says everything anew. `event`: the line will do."""
        picture, whole = _picture(kind, line), kind in _WHOLE
        if whole and event is line:
            event = events.decode(line)
        if seq and not whole:
            if seq <= self._seq:
                return  # told twice
            self._gaps += seq != self._seq + 1
            self._seq = seq
        self._late.append(event)
        if whole:
            self._fold_late()
            self._seq = self._state.seq
        if self._deltas:
            self._deltas.clear()
        if kind == _SNAPSHOT:
            self._history.skip(self._state.seq)  # nothing leads from the lines before to this state
            return
        if kind == _HELLO:
            self._history.restart(seq - 1)  # what came before is void
        if seq:
            self._history.append(Entry(seq, t, line, picture))

    def _wake(self) -> None:
        """Tells the listeners, from whatever thread."""
        for loop in tuple(self._listeners):
            if loop in self._told:
                continue
            self._told.add(loop)
            try:
                loop.call_soon_threadsafe(self._tell, loop)
            except RuntimeError:  # closed with listeners left
                self._told.discard(loop)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        self._told.discard(loop)
        for changed in self._listeners.get(loop, ()):
            changed.set()

    def _cursor_after(self, seq: int, epoch: str) -> int | None:
        if epoch and epoch != self._state.epoch:
            return None
        return self._history.cursor_after(seq)

    def _content(self, cursor: int | None) -> str:
        entries = None if cursor is None else self._history.since(cursor)
        if entries is None:
            return events.encode(self.snapshot()).decode()
        return ",".join(entry.picture for entry in entries if entry.picture)

    def _recent(self, cursor: int) -> list[str]:
        """Pictures from OVERLAP_S before now, or from `cursor` if that is earlier."""
        parts, index, begin, since = [], self._history.next, self._state.t - OVERLAP_S, 0
        for entry in self._history.newest_first():
            if index <= cursor and entry.t < begin and entry.picture:
                since = entry.seq
                break
            index -= 1
            if entry.picture:
                parts.append(entry.picture)
        else:
            since = self._history.before
        parts.append(f'{{"type":"since","seq":{since}}}')
        return parts[::-1]

    def _story(self) -> list[bytes]:
        """All that is known, for someone who starts to follow now."""
        self._catch_up()
        return [events.encode(event) for event in (self.snapshot(), *self._texts.replay())]

    def _read_along(self, reading: Reading) -> list[str]:
        told = []
        for request, heard in reading.items():
            message, reading[request] = self._texts.tail(request, heard)
            if message is not None:
                told.append(_encode(message).decode())
        return told


def _picture(kind: str, line: bytes) -> str | None:
    """An event as a browser gets it: of a step not what stands behind the figures that pictures need."""
    if kind == _STEP:
        end = line.find(_BEHIND)
        return line.decode() if end < 0 else f"{line[:end].decode()}}}"
    return line.decode() if kind in _SHOWN else None


def _round(event: events.Event) -> None:
    """Times to the microsecond: finer figures mean nothing and double the length of a line."""
    event.t = round(event.t, 6)
    for name in _TIMES.get(type(event), ()):
        value = getattr(event, name)
        if value is not None:
            setattr(event, name, round(value, 6))


_TIMES = {
    events.Step: ("step_s", "schedule_s", "build_s", "forward_s", "sample_s", "output_s"),
    events.Finished: ("queue_s", "ttft_s", "tpot_s", "e2e_s"),
}
