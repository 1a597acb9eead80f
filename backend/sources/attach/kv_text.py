"""What the blocks of a foreign engine say: its tokens as text, one call to its tokenizer a block, in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("kvscope.sources")

MAX_WAITING = 20_000  # blocks; the oldest lose their turn
AT_ONCE = 32  # that are told together
FAILURES = 3  # in a row, then token ids stand for the text

Detokenize = Callable[[list[int]], str]


def as_ids(tokens: list[int]) -> str:
    """Where nobody can read them."""
    return " ".join(map(str, tokens))


class Reader:
    """`tell(blocks)` gets [(ticket, text)] of what was given to `read`, newest first: it is what people look at."""

    def __init__(self, detokenize: Detokenize | None, tell: Callable[[list[tuple[object, str]]], None]):
        self.able = detokenize is not None
        self._detokenize, self._tell = detokenize, tell
        self._waiting: deque[tuple[object, list[int]]] = deque(maxlen=MAX_WAITING)
        self._wake, self._closed = threading.Condition(), False
        self._failures = 0
        self._thread: threading.Thread | None = None

    def read(self, blocks: list[tuple[object, list[int]]]) -> None:
        """From any thread; returns at once."""
        if not self.able:
            self._tell([(ticket, as_ids(tokens)) for ticket, tokens in blocks])
            return
        with self._wake:
            self._waiting.extend(blocks)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kv-text", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._waiting.clear()
            self._wake.notify()
        # Not joined: it may wait for the engine's answer, and what it says afterwards is heard by nobody.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                batch = [self._waiting.pop() for _ in range(min(AT_ONCE, len(self._waiting)))]
            told = [(ticket, self._text(tokens)) for ticket, tokens in batch]
            if not self._closed:
                self._tell(told)

    def _text(self, tokens: list[int]) -> str:
        if self._closed or not self.able:
            return as_ids(tokens)
        try:
            text = self._detokenize(tokens)
        except Exception as error:  # whatever the engine's HTTP does: the map goes on without text
            self._failures += 1
            if self._failures >= FAILURES:
                self.able = False
                log.info("the engine's /detokenize does not answer, token ids are shown instead: %s", error)
            return as_ids(tokens)
        self._failures = 0
        return text
