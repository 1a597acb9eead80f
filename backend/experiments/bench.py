"""The engine for the time of one experiment: its switches as the experiment wants them, put back at the end; requests
that enter together; what happened, as events on the engine's own clock."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from backend import events, fold
from backend.experiments import ExperimentError
from backend.sources.background import Background
from backend.sources.follow import reason
from backend.sources.remote import EngineClient, EngineError
from backend.workload.prompts import SYSTEM

TICK_S = 0.25  # without an event: the experiment may report, and be stopped
HOLD_S = 30.0  # while requests are sent
SILENCE_S = 60.0  # without an event while requests run: the engine is gone
IDLE_S = 10.0  # for what was aborted to be gone
PREFIX = "cmpl-"
TEXT_CHARACTERS = 400


@dataclass(frozen=True)
class Ask:
    """One request: token ids in, exactly `max_tokens` out (no stop token ends it)."""

    prompt: list[int]
    max_tokens: int
    user: str = ""


@dataclass
class Run:
    """What a set of requests did. `number_of` and `index_of` connect the engine's numbers with places in the list."""

    asks: Sequence[Ask]
    index_of: dict[int, int] = field(default_factory=dict)
    finished: dict[int, events.Finished] = field(default_factory=dict)  # by place

    @property
    def done(self) -> bool:
        return len(self.finished) == len(self.asks)


class Bench:
    """`with Bench(client, switches) as bench:`; raises ExperimentError for an engine that is at work, not there, or
    refuses the switches. Whatever happens inside, the switches are put back."""

    def __init__(self, client: EngineClient, switches: Mapping[str, Any]):
        self.client, self._wanted = client, dict(switches)
        self.strangers = 0  # requests of others that came in meanwhile
        self.machine: dict[str, Any] = {}
        self.alphabet: list[int] = []  # token ids of ordinary text, to make prompts from
        self.state = fold.State()  # of the engine, as the events tell it
        self.before: dict[str, Any] = {}
        self._background: Background | None = None
        self._posts: list[concurrent.futures.Future[None]] = []
        self._lines: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._places: dict[str, tuple[Run, int]] = {}  # by API id
        self._runs: dict[int, Run] = {}  # by the engine's number
        # One for all, since making one costs more than a request; a request waits for the engine, never for another.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=HOLD_S),  # many at once, and the machine may be busy
            limits=httpx.Limits(max_connections=None),
            headers=client.headers,
            trust_env=False,
        )

    def __enter__(self) -> Bench:
        state = self._ask(self.client.state)
        if state["requests"]:
            raise ExperimentError(
                f"the engine is at work on {len(state['requests'])} requests: stop the users and what else runs, and "
                "start again"
            )
        self.before = dict(state["config"])
        self.machine = {"model": state["model"], "device": state["device"]}
        if state["device"].get("kind") == "modelled":
            self.machine["modelled"] = state["model"]["notes"][0]
        # Before the switches change: a short context takes no long text.
        self.alphabet = sorted(set(self._ask(self.client.tokenize, SYSTEM[:TEXT_CHARACTERS])))
        self._background = Background("kvscope-experiment")
        try:
            self._follow(state["counters"]["events"])
            self.configure(self._wanted)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._background.close()  # closes connections, which the engine takes for an abort
        with contextlib.suppress(EngineError):  # a dead engine has no switches to put back
            self.client.hold(0)
            until = time.monotonic() + IDLE_S
            while self.client.state()["requests"] and time.monotonic() < until:
                time.sleep(0.05)
            self.client.configure(self.before)

    def configure(self, changes: Mapping[str, Any]) -> None:
        """On top of what it was before the experiment."""
        self._ask(self.client.configure, {**self.before, **changes})

    def reset(self) -> None:
        self._ask(self.client.reset)

    def ceilings(self, measure: bool = True) -> dict[str, Any] | None:
        """Measured ceilings of the device; with `measure`, now, when nobody did before. None when there are none."""
        try:
            return self.client.ceilings() or (self.client.measure_ceilings() if measure else None)
        except EngineError:
            return None

    def hold(self, seconds: float, at_step: int = 0) -> int:
        return self._ask(self.client.hold, seconds, at_step)

    def send(self, asks: Sequence[Ask]) -> Run:
        """Sends all; they may enter in any order. `start` sends them so that they enter together and in order."""
        run = Run(asks)
        for index, ask in enumerate(asks):
            number = uuid.uuid4().hex
            self._places[PREFIX + number] = (run, index)
            body = {
                "prompt": ask.prompt,
                "max_tokens": ask.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "priority": index,  # so the order is this one, whichever connection was the fastest
                "user": ask.user or f"experiment {index + 1}",
            }
            self._posts.append(self._background.run(self._post(number, body)))
        return run

    def start(self, asks: Sequence[Ask], *, pause_after: int = 0) -> Run:
        """Sends all into one step. Their order is that of the list, so the same list makes the same schedule.

        `pause_after`: so many steps are made, then none before the next `hold`.
        """
        steps = self.hold(HOLD_S)
        run = self.send(asks)
        until = time.monotonic() + HOLD_S
        while len(run.index_of) < len(asks):
            if self._next(TICK_S) is None and time.monotonic() > until:
                raise ExperimentError(f"the engine has not taken {len(asks)} requests within {HOLD_S:.0f} s")
        self.hold(HOLD_S if pause_after else 0, steps + pause_after)
        return run

    def watch(self, run: Run) -> Iterator[events.Event | None]:
        """Events until all of `run` has finished; None when nothing came for a moment."""
        heard = time.monotonic()
        while not run.done:
            event = self._next(TICK_S)
            if event is not None:
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENCE_S:
                raise ExperimentError(f"the engine has said nothing for {SILENCE_S:.0f} s")
            yield event

    # ---- events --------------------------------------------------------------------------------------------------

    def _next(self, timeout_s: float) -> events.Event | None:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(line, Exception):
            raise ExperimentError(f"the engine is gone: {line}")
        try:
            event = events.decode(line)
        except msgspec.DecodeError as error:
            raise ExperimentError(f"the engine says what this version does not understand: {error}") from None
        if isinstance(event, events.Hello):
            raise ExperimentError("the engine was started anew")
        if isinstance(event, events.Fault):
            raise ExperimentError(event.message)
        fold.apply(self.state, event)
        if isinstance(event, events.Queued):
            run, index = self._places.get(event.id, (None, 0))
            if run is None:
                self.strangers += 1
            else:
                run.index_of[event.request] = index
                self._runs[event.request] = run
        elif isinstance(event, events.Finished) and event.request in self._runs:
            if event.reason not in ("length", "stop"):
                raise ExperimentError(f"a request ended by {event.reason} {event.message}".strip())
            run = self._runs[event.request]
            run.finished[run.index_of[event.request]] = event
        return event

    def _follow(self, since: int) -> None:
        connected: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._background.run(self._listen(since, connected))
        try:
            connected.result(IDLE_S)
        except (EngineError, concurrent.futures.TimeoutError) as error:
            raise ExperimentError(f"cannot follow the engine: {error}") from None

    async def _listen(self, since: int, connected: concurrent.futures.Future[None]) -> None:
        url, query = f"{self.client.url}/engine/events", {"follow": "1", "since": str(since)}
        try:
            async with self._http.stream("GET", url, params=query) as answer:
                if not answer.is_success:
                    raise EngineError(reason(answer.status_code, await answer.aread()))
                connected.set_result(None)
                async for line in answer.aiter_lines():
                    if line:
                        self._lines.put(line.encode())
            raise EngineError("it ended its stream of events")
        except (httpx.HTTPError, EngineError) as error:
            if connected.done():
                self._lines.put(error)
            else:
                connected.set_exception(EngineError(str(error) or type(error).__name__))

    async def _post(self, number: str, body: dict[str, Any]) -> None:
        try:
            answer = await self._http.post(
                f"{self.client.url}/v1/completions", json=body, headers={"x-request-id": number}
            )
            if not answer.is_success:
                self._lines.put(EngineError(reason(answer.status_code, answer.content)))
        except httpx.HTTPError as error:
            self._lines.put(EngineError(str(error) or type(error).__name__))

    @staticmethod
    def _ask(question, *content):
        try:
            return question(*content)
        except EngineError as error:
            raise ExperimentError(str(error)) from None


def prompts(alphabet: Sequence[int], count: int, length: int, seed: int) -> list[list[int]]:
    """Different prompts; the i-th is the same in every run with this seed, whatever `count` is."""
    made = []
    for i in range(count):
        lots = random.Random(f"{seed} {i}")
        made.append([lots.choice(alphabet) for _ in range(length)])
    return made
