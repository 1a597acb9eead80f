"""The open-loop client: every request goes out when it is due, whether or not the ones before it were answered.

Times are counted from the planned arrival, so that a stall of the server (or of this client) shows in the latency of
all who came meanwhile instead of in fewer of them. Arrivals are timers of the event loop: run it in `punctual.loop`, or
they are up to a millisecond late.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

import msgspec

from backend.workload.http11 import Broken, Http
from backend.workload.job import Answer, End, Job, Said, Tick
from backend.workload.stream import AnswerStream, NoAnswer
from backend.workload.words import text, words_for

LEAD_S = 0.05  # before the first arrival
TICK_S = 0.1
METRICS_S = 1.0
MAX_IN_FLIGHT = 4_000  # connections; what arrives beyond is counted as failed, and the run is over-saturated anyhow
MAX_METRICS = 8 << 20
MAX_MESSAGE = 300

RUNNING = re.compile(rb"^(?:vllm:num_requests_running|sglang:num_running_reqs)(?:\{[^\n]*\})? ([0-9.e+]+)", re.M)
WAITING = re.compile(rb"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{[^\n]*\})? ([0-9.e+]+)", re.M)


def body_of(job: Job, number: int) -> bytes:
    """The request as JSON."""
    target = job.target
    _, input_tokens, output_tokens = job.requests[number]
    words = words_for(input_tokens, target.tokens_per_word, target.overhead_tokens)
    prompt = job.prefix + text(f"{job.salt} {number}", words)
    said = {"messages": [{"role": "user", "content": prompt}]} if target.endpoint == "chat" else {"prompt": prompt}
    wanted = {"model": target.model, "max_tokens": output_tokens, "stream": True}
    return msgspec.json.encode({**said, **wanted, "stream_options": {"include_usage": True}, **job.extra})


class Client:
    """One run. `say` hears Ticks, Answers and one End, in this loop's thread."""

    def __init__(self, job: Job, say: Callable[[Said], None]):
        self.job, self._say = job, say
        self._arrived = self._left = 0
        self._queue: tuple[float | None, float | None] = (None, None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._all_arrived = asyncio.Event()
        self._next: asyncio.Handle | None = None  # the next arrival
        self._start = 0.0

    def stop(self) -> None:
        """No more arrivals; what is in flight is cut off. From the loop's thread."""
        self._stop.set()

    async def run(self) -> None:
        http = Http(self.job.target.url, self.job.target.headers)
        self._start = time.perf_counter() + LEAD_S
        watching = [asyncio.create_task(self._tick()), asyncio.create_task(self._ask_queue(http))]
        self._prepare(http, 0)
        try:
            await self._until_done()
        finally:
            self._next.cancel()
            for task in [*watching, *self._tasks]:
                task.cancel()
            await asyncio.gather(*watching, *self._tasks, return_exceptions=True)
            http.close()
        self._say(self._now_tick())
        self._say(End(t=self._now(), stopped=self._arrived < len(self.job.requests), clock_s=self._start))

    async def _until_done(self) -> None:
        stop = asyncio.create_task(self._stop.wait())
        try:
            arrived = asyncio.create_task(self._all_arrived.wait())
            await asyncio.wait((stop, arrived), return_when=asyncio.FIRST_COMPLETED)
            arrived.cancel()
            end = time.perf_counter() + self.job.drain_s
            while self._tasks and not stop.done() and (left := end - time.perf_counter()) > 0:
                await asyncio.wait((stop, *self._tasks), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    def _prepare(self, http: Http, number: int) -> None:
        """Its body now, itself when it is due."""
        loop = asyncio.get_running_loop()
        if number == len(self.job.requests):
            self._next = loop.call_soon(self._all_arrived.set)
            return
        body, due = body_of(self.job, number), self._start + self.job.requests[number][0]
        self._next = loop.call_later(due - time.perf_counter(), self._arrive, http, number, body)

    def _arrive(self, http: Http, number: int, body: bytes) -> None:
        task = asyncio.create_task(self._ask(http, number, body))
        self._arrived += 1
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._next = asyncio.get_running_loop().call_soon(self._prepare, http, number + 1)  # after this one is sent

    async def _ask(self, http: Http, number: int, body: bytes) -> None:
        at, wanted_input, wanted_output = self.job.requests[number]
        answer = Answer(
            number=number,
            arrival_s=at,
            sent_s=self._now(),
            end_s=0.0,
            state="failed",
            wanted_input=wanted_input,
            wanted_output=wanted_output,
        )
        try:
            if len(self._tasks) > MAX_IN_FLIGHT:
                raise NoAnswer(f"not sent: {MAX_IN_FLIGHT:,} requests were in flight")
            stream = AnswerStream(answer, self._now)
            async with asyncio.timeout(self.job.timeout_s):
                await http.ask("POST", self.job.target.path, body, stream.head, stream.data)
            stream.end()
            answer.state = "ok"
        except NoAnswer as error:
            answer.message = str(error)[:MAX_MESSAGE]
            if answer.code == 429:
                answer.state = "refused"
        except Broken as error:
            answer.message = str(error)[:MAX_MESSAGE]
        except TimeoutError:
            answer.message = f"not answered within {self.job.timeout_s:g} s"
        except asyncio.CancelledError:
            answer.state, answer.message = "cut", "still in flight when the run ended"
        finally:
            answer.end_s = self._now()
            self._left += 1
            self._say(answer)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._say(self._now_tick())

    def _now_tick(self) -> Tick:
        running, waiting = self._queue
        return Tick(
            t=self._now(),
            arrived=self._arrived,
            left=self._left,
            in_flight=self._arrived - self._left,
            running=running,
            waiting=waiting,
        )

    async def _ask_queue(self, http: Http) -> None:
        """The server's own view of its queue, where its /metrics has one under a name that we know."""
        while True:
            found, body = [], bytearray()

            def take(data: bytes, body: bytearray = body) -> None:
                if len(body) < MAX_METRICS:
                    body += data

            try:
                await http.ask("GET", "/metrics", b"", lambda code, headers: None, take)
                found = [[float(value) for value in pattern.findall(body)] for pattern in (RUNNING, WAITING)]
            except (Broken, ValueError):
                pass  # a server that is gone is told by its requests
            if found and not all(found):
                return  # it has none
            self._queue = (sum(found[0]), sum(found[1])) if found else (None, None)
            await asyncio.sleep(METRICS_S)

    def _now(self) -> float:
        return round(time.perf_counter() - self._start, 6)
