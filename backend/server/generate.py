"""From a checked request to its answer: submit, listen, answer whole or chunk by chunk."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from backend.engine.request import Delta
from backend.server import stream
from backend.server.answers import Choice, Dialect, usage_of
from backend.server.errors import ApiError, JSONResponse, bad_request, unavailable
from backend.server.schema import MAX_SEQUENCES, Generate

if TYPE_CHECKING:
    from backend.engine.loop import Stream
    from backend.server.host import EngineHost

log = logging.getLogger("kvscope.server")

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Prompt:
    ids: list[int]
    echo: str = ""


@dataclass
class Job:
    """The engine's requests behind one HTTP request, `n` a prompt."""

    id: str
    model: str
    n: int
    streams: list[Stream] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, prompt: Prompt, streams: list[Stream], wants_ids: bool) -> None:
        for engine_stream in streams:
            self.streams.append(engine_stream)
            self.choices.append(Choice(len(self.choices), engine_stream.request, prompt.ids, prompt.echo, wants_ids))

    def abort(self) -> None:
        for engine_stream in self.streams:
            engine_stream.abort()

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """Until every choice has ended. Raises ApiError (500) when the engine could not go on with one."""
        async for index, delta in stream.merged(self.streams):
            choice = self.choices[index]
            choice.add(delta)
            if delta.finish_reason == "error":
                raise ApiError(500, delta.message or "the engine could not go on", code="engine_error")
            yield choice, delta
        if any(choice.finish_reason is None for choice in self.choices):
            raise ApiError(500, "the engine ended before the answer did", code="engine_error")

    def frame(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}


def check_number(host: EngineHost, asked: Generate, prompts: int, prompt_field: str) -> None:
    """Raises ApiError (400) for more sequences than the queue could ever hold."""
    n = asked.n or 1
    most = min(MAX_SEQUENCES, host.loop.engine.config.max_waiting)
    if n * prompts > most:
        raise bad_request(
            f"{prompts} prompts with n={n} are {n * prompts} sequences; at most {most} fit the queue",
            "n" if n > 1 else prompt_field,
        )


async def submit(host: EngineHost, asked: Generate, prompts: list[Prompt], id: str, prompt_field: str) -> Job:
    """Queues everything or nothing. Raises ApiError: 400 for what can never be served, 429 when the queue is full."""
    from backend.engine.engine import Busy, Refused  # late: it imports torch, and there is an engine by now

    n = asked.n or 1
    loop = host.loop
    host.codec.check_ids(asked.stop_token_ids or [], "stop_token_ids")
    job = Job(id=id, model=asked.model or host.loaded.name, n=n)
    params = [asked.sampling(_default_max_tokens(asked, loop.engine.limit() - len(prompt.ids))) for prompt in prompts]
    # All at once: each would wait for the step at hand to end.
    outcomes = await asyncio.gather(
        *(
            loop.submit(
                prompt.ids,
                its_params,
                id=id,
                user=asked.user or "",
                n=n,
                salt=hashlib.sha256(asked.cache_salt.encode()).hexdigest() if asked.cache_salt else "",
                priority=asked.priority or 0,
            )
            for prompt, its_params in zip(prompts, params, strict=True)
        ),
        return_exceptions=True,
    )
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            job.add(prompt, outcome, wants_ids=bool(asked.return_token_ids))
    failed = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
    if failed is None:
        return job
    job.abort()
    if isinstance(failed, Refused):
        at_prompt = failed.param == "prompt"
        raise bad_request(
            str(failed),
            prompt_field if at_prompt else failed.param,
            "context_length_exceeded" if at_prompt or failed.param == "max_tokens" else None,
        )
    if isinstance(failed, Busy):
        seconds = str(max(1, round(failed.retry_after_s)))
        raise ApiError(429, str(failed), code="queue_full", headers={"retry-after": seconds})
    raise failed


async def answer(
    request: Request, host: EngineHost, asked: Generate, job: Job, dialect: Dialect, headers: dict[str, str]
) -> Response:
    if asked.stream:
        return stream.Stream(
            _chunks(asked, job, dialect),
            closing=host.closing,
            end=job.abort,
            media_type="text/event-stream",
            farewell=_event(unavailable("the server is shutting down").body) + DONE,
            headers=headers,
        )
    try:
        body = await stream.unless_gone(_whole(job, dialect), request.receive, host.closing)
    except stream.Disconnected:
        return Response(status_code=499)  # nobody reads it
    except stream.Closing:
        raise unavailable("the server is shutting down") from None
    finally:
        job.abort()
    return JSONResponse(body, headers=headers)


async def _whole(job: Job, dialect: Dialect) -> dict[str, Any]:
    async for _ in job.deltas():
        pass
    body = job.frame(dialect.whole_name, [dialect.whole(choice) for choice in job.choices])
    return body | {"usage": usage_of(job.choices, job.n)}


async def _chunks(asked: Generate, job: Job, dialect: Dialect) -> AsyncIterator[bytes]:
    """Server-sent events; always ends with [DONE], after an error object when the engine failed on the way."""
    every, last = asked.usage_in_every_chunk, asked.usage_in_stream
    try:
        async for choice, delta in job.deltas():
            for piece in dialect.pieces(choice, delta):
                chunk = job.frame(dialect.chunk_name, [piece])
                if last:
                    chunk["usage"] = usage_of([choice], 1) if every else None
                yield _event(chunk)
        if last:
            yield _event(job.frame(dialect.chunk_name, []) | {"usage": usage_of(job.choices, job.n)})
    except ApiError as error:
        yield _event(error.body)
    except Exception:  # the status line is long gone: say it in the stream, as clients expect
        log.exception("a stream broke")
        yield _event(ApiError(500, "internal error", code="internal_error").body)
    yield DONE


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _default_max_tokens(asked: Generate, room: int) -> int:
    return min(asked.default_max_tokens, max(1, room)) if asked.default_max_tokens else max(1, room)
