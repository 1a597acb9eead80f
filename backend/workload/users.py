"""Synthetic users: each thinks, asks, waits for the answer, and begins again. They live in the page's process and know
the engine only through its HTTP API, as anybody does.

They ask for whole answers, not for streams: what the answers say is watched through the engine's events anyway, and
taking in 64 streams token by token would cost this process and the engine's more than the rest of the page does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

import httpx
import msgspec

from backend.sources.background import Background
from backend.sources.follow import reason
from backend.sources.remote import EngineError
from backend.workload.prompts import output_tokens, question, system_prompt

MAX_USERS = 256
STOP_S = 1.0
AFTER_ERROR_S = (0.5, 2.0)


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How users behave; may change while they are at it, and counts from the next question on."""

    shared_prompt: bool = True  # all begin with the same long system prompt
    break_prefix: bool = False  # with a line of their own on top of it
    think_s: tuple[float, float] = (0.2, 2.0)
    output_tokens: tuple[int, int] = (16, 160)
    chat: bool = True  # the model has a chat template


class Counts(msgspec.Struct, kw_only=True):
    users: int = 0
    sent: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    last_error: str = ""


class Users:
    """`get_url`: where the engine listens, None while it does not. Methods may be called from any thread.

    `send(path, body)`: asks and returns when the answer has ended, or raises EngineError. It stands in
    for a plain POST where the engine itself tells nothing of single requests, so that who asks must tell.
    """

    def __init__(
        self,
        background: Background,
        get_url: Callable[[], str | None],
        headers: Mapping[str, str] | None = None,
        *,
        seed: int = 0,
        send: Callable[[str, Mapping], Awaitable[None]] | None = None,
    ):
        self._background, self._get_url, self._headers, self._seed = background, get_url, dict(headers or {}), seed
        self._told_by = send
        self.habits = Habits()
        self._counts = Counts()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._http: httpx.AsyncClient | None = None

    @property
    def counts(self) -> Counts:
        return msgspec.structs.replace(self._counts, users=len(self._tasks))

    def start(self, count: int, habits: Habits | None = None) -> None:
        """As many users as `count`, however many there are. Counters begin anew when there were none."""
        if habits is not None:
            self.habits = habits
        if not self._tasks:
            self._counts = Counts()
        self.set_count(count)

    def set_count(self, count: int) -> None:
        """More users join at once; those too many leave, and what they asked is aborted."""
        self._background.run(self._set_count(max(0, min(count, MAX_USERS)))).result(STOP_S + 4)

    def stop(self) -> None:
        """Returns when all are gone and nothing of theirs is in flight here."""
        self.set_count(0)

    async def _set_count(self, count: int) -> None:
        if self._http is None:
            # Without limits: a user waits for the engine, never for another user's connection.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_USERS)
            timeout = httpx.Timeout(None, connect=3.0)
            self._http = httpx.AsyncClient(timeout=timeout, limits=limits, headers=self._headers, trust_env=False)
        for user in range(1, count + 1):
            if user not in self._tasks:
                self._tasks[user] = asyncio.create_task(self._live(user, self._http))
        leaving = [self._tasks.pop(user) for user in list(self._tasks) if user > count]
        for task in leaving:
            task.cancel()  # closes its connection, which the engine takes for an abort
        if leaving:
            await asyncio.wait(leaving, timeout=STOP_S)
        if not self._tasks and self._http is not None:
            http, self._http = self._http, None
            await http.aclose()

    async def _live(self, user: int, http: httpx.AsyncClient) -> None:
        lots = random.Random(f"{self._seed} {user}")
        await asyncio.sleep(lots.uniform(0, min(1.0, self.habits.think_s[1])))  # not all in one step
        while True:
            path, body = ask(user, lots, self.habits)
            if not await self._send(http, path, body):
                await asyncio.sleep(lots.uniform(*AFTER_ERROR_S))
            await asyncio.sleep(lots.uniform(*self.habits.think_s))

    async def _send(self, http: httpx.AsyncClient, path: str, body: dict) -> bool:
        counts = self._counts
        url = self._get_url()
        if url is None:
            counts.failed += 1
            counts.last_error = "the engine is not running"
            return False
        counts.sent += 1
        counts.in_flight += 1
        try:
            problem = await self._ask(http, url, path, body)
        finally:
            counts.in_flight -= 1
        if problem:
            counts.failed += 1
            counts.last_error = problem
            return False
        counts.done += 1
        return True

    async def _ask(self, http: httpx.AsyncClient, url: str, path: str, body: dict) -> str:
        """ "" when it was answered, else why not."""
        if self._told_by is not None:
            try:
                await self._told_by(path, body)
            except EngineError as error:
                return str(error)
            return ""
        try:
            response = await http.post(url + path, json=body)
        except httpx.HTTPError as error:
            return f"cannot reach the engine: {error or type(error).__name__}"
        return "" if response.is_success else reason(response.status_code, response.content)


def ask(user: int, lots: random.Random, habits: Habits) -> tuple[str, dict]:
    """(path, body) of a user's next request."""
    text = question(lots)
    wanted = {
        "user": f"user {user}",
        "max_tokens": output_tokens(lots, *habits.output_tokens),
        "temperature": 0.8,
        "seed": lots.getrandbits(31),
    }
    system = system_prompt(user, broken=habits.break_prefix) if habits.shared_prompt else ""
    if not habits.chat:
        return "/v1/completions", {"prompt": f"{system}\n\nQuestion: {text}\nAnswer:".lstrip(), **wanted}
    messages = [{"role": "system", "content": system}] if system else []
    return "/v1/chat/completions", {"messages": [*messages, {"role": "user", "content": text}], **wanted}
