"""Requests of our own at a foreign engine, told as events: what their client hears, and nothing that it cannot know.

Used within one event loop. Words are gathered for FLUSH_S, so that many fast streams make few events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container

import msgspec

from backend import events

FLUSH_S = 0.05
MAX_PROMPT = 200_000  # characters that are kept for the screen


class Own(msgspec.Struct, kw_only=True):
    """One request. Times in seconds of the journal's clock."""

    request: int
    t_sent: float
    id: str = ""
    user: str = ""
    prompt: str = ""
    max_tokens: int = 0
    taken: bool = False
    prompt_tokens: int = 0  # 0: not told yet
    cached_tokens: int = 0
    told: int = 0  # tokens of the answer so far, by the engine's `usage`
    ids: int = 0  # the same, counted by token ids
    pieces: int = 0  # pieces of the stream with words in them, each of one token or more
    token_ids: list[int] = []  # of prompt and answer, where the engine tells them
    prompt_ids: int = 0  # how many of them are the prompt's
    t_first: float | None = None
    t_last: float | None = None
    queue_s: float | None = None  # as the engine told it
    reason: str = ""
    ended: bool = False

    @property
    def output_tokens(self) -> int:
        """By the best that is known: pieces are only a lower bound."""
        return self.told or self.ids or self.pieces

    @property
    def tpot_s(self) -> float | None:
        """From the first word to the last, by tokens: pieces of a stream are no tokens."""
        if self.t_first is None or self.t_last is None or self.output_tokens < 2:
            return None
        return (self.t_last - self.t_first) / (self.output_tokens - 1)


class Journal:
    """`publish(event)` stamps and passes on; `clock` is the one that events are stamped with."""

    def __init__(self, publish: Callable[[events.Event], None], clock: Callable[[], float] = time.monotonic):
        self._publish, self.clock = publish, clock
        self._count = 0
        self._moved: dict[int, Own] = {}
        self._said: list[tuple[int, str]] = []
        self._due: asyncio.TimerHandle | None = None
        self.live: dict[int, Own] = {}

    def begin(self, id: str, prompt: str, *, t_sent: float, user: str = "", max_tokens: int = 0) -> Own:
        """It was sent. Until `taken` it may be refused, or wait where nobody sees it."""
        self._count += 1
        own = Own(
            request=self._count, t_sent=t_sent, id=id, user=user, prompt=prompt[:MAX_PROMPT], max_tokens=max_tokens
        )
        self.live[own.request] = own
        self._tell(own)
        return own

    def retell(self, known: Container[int]) -> None:
        """Live requests that are not `known`: a new epoch has forgotten them. What they said before it is gone."""
        for own in self.live.values():
            if own.request in known:
                continue
            self._tell(own)
            if own.taken:
                row = own.request, own.prompt_tokens, own.output_tokens, own.t_first
                self._publish(events.Heard(t=self.clock(), requests=[row]))

    def _tell(self, own: Own) -> None:
        self._publish(
            events.Queued(
                t=own.t_sent, request=own.request, id=own.id, user=own.user, prompt_tokens=0, max_tokens=own.max_tokens
            )
        )
        if own.prompt:
            self._publish(events.Prompt(request=own.request, pieces=[own.prompt]))

    def taken(self, own: Own) -> None:
        """The engine began to answer: from here on it is in there, told at once."""
        own.taken = True
        self._publish(events.Heard(t=self.clock(), requests=[(own.request, 0, 0, None)]))

    def say(self, own: Own, text: str) -> None:
        """A piece came. The first that is not empty counts as the first token: others may only name a role."""
        if text:
            own.t_last = self.clock()
            own.t_first = own.t_last if own.t_first is None else own.t_first
            self._said.append((own.request, text))
        self._move(own)

    def end(self, own: Own, reason: str, message: str = "") -> None:
        if own.ended:
            return
        own.ended, own.reason = True, reason
        self.flush()
        self.live.pop(own.request, None)
        now = self.clock()
        self._publish(
            events.Finished(
                t=now,
                request=own.request,
                reason=reason,
                message=message[:400],
                prompt_tokens=own.prompt_tokens,
                cached_tokens=own.cached_tokens,
                output_tokens=own.output_tokens,
                queue_s=own.queue_s,
                ttft_s=None if own.t_first is None else own.t_first - own.t_sent,
                tpot_s=own.tpot_s,
                e2e_s=now - own.t_sent,
            )
        )

    def flush(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        moved, said = self._moved, self._said
        self._moved, self._said = {}, []
        if moved:
            rows = [(o.request, o.prompt_tokens, o.output_tokens, o.t_first) for o in moved.values()]
            self._publish(events.Heard(t=self.clock(), requests=rows))
        if said:
            self._publish(events.Tokens(t=self.clock(), step=0, texts=said))

    def _move(self, own: Own) -> None:
        self._moved[own.request] = own
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(FLUSH_S, self._flushed)

    def _flushed(self) -> None:
        self._due = None
        self.flush()
