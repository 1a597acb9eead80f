"""What pages ask of a foreign engine. The same methods as `EngineClient`; what cannot be asked says so, and why."""

from __future__ import annotations

import asyncio
import concurrent.futures
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from backend.sources.attach.address import base_url
from backend.sources.attach.detect import Found
from backend.sources.attach.journal import Journal, Own
from backend.sources.attach.sender import Sender, named
from backend.sources.attach.target import TargetConfig, Unreachable
from backend.sources.attach.web import Answer, Web
from backend.sources.background import Background
from backend.sources.follow import reason
from backend.sources.remote import ANSWER_S, EngineError

RESETS = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache", "kvscope": "/engine/reset"}
NO_RESET = {404: "it offers this only in its development mode (VLLM_SERVER_DEV_MODE=1), which opens more than this"}

Result = TypeVar("Result")


class AttachedClient:
    """Every method raises EngineError. `found`: what is known of the server now, None before it was ever reached.

    `heard(own)` is called when a request of ours has moved or ended, in the background's loop.
    """

    def __init__(
        self,
        config: TargetConfig,
        background: Background,
        journal: Journal,
        found: Callable[[], Found | None],
        heard: Callable[[Own], None] = lambda own: None,
    ):
        self._config, self._background = config, background
        self._found = found
        self._sender = Sender(self._connection, journal, found, heard)
        self._web: Web | None = None  # of the background's loop
        self._running: dict[str, asyncio.Task[None]] = {}  # by the API's id

    @property
    def url(self) -> str:
        try:
            return base_url(self._config.url)
        except Unreachable as error:
            raise EngineError(str(error)) from None

    @property
    def headers(self) -> dict[str, str]:
        """What lets us in: for requests, never for the screen."""
        try:
            return Web(self._config).headers
        except Unreachable:
            return {}

    # ---- what it can be asked ------------------------------------------------------------------------------------

    def health(self) -> str:
        """ "" when it answers, else the reason why not."""
        try:
            answer = self._wait(self._get("/health"))
        except EngineError as error:
            return str(error)
        return "" if answer.ok or answer.status == 404 else reason(answer.status, answer.body)

    def models(self) -> list[str]:
        return list(self._here().models)

    def tokenize(self, text: str) -> list[int]:
        found = self._here()
        body = {"llamacpp": {"content": text}, "tgi": {"inputs": text}}.get(found.kind)
        told = self._json(self._post("/tokenize", body or {"prompt": text, **self._model()}), "tokenize")
        rows = told.get("tokens") if isinstance(told, dict) else told
        ids = [row.get("id") if isinstance(row, dict) else row for row in rows] if isinstance(rows, list) else None
        if ids is None or not all(isinstance(i, int) for i in ids):
            raise EngineError(f"{found.title} does not tell tokens as it should")
        return ids

    def detokenize(self, tokens: list[int]) -> str:
        found = self._here()
        told = self._json(self._post("/detokenize", {"tokens": tokens, **self._model()}), "detokenize")
        text = told.get("prompt", told.get("content", told.get("text"))) if isinstance(told, dict) else None
        if not isinstance(text, str):
            raise EngineError(f"{found.title} does not tell text as it should")
        return text

    def reset(self) -> None:
        """Empties the prefix cache, where the engine offers that."""
        found = self._here()
        path = RESETS.get(found.kind)
        if path is None:
            raise EngineError(f"{found.title} has no command that empties its prefix cache")
        answer = self._wait(self._post(path, {} if found.kind == "kvscope" else None))
        if not answer.ok:
            why = NO_RESET.get(answer.status, "") if found.kind == "vllm" else ""
            why = why or reason(answer.status, answer.body)
            raise EngineError(f"{found.title} does not empty its prefix cache: {why}", answer.status)

    def abort(self, id: str) -> int:
        """Closes the stream, which servers take for an abort. Number of requests that were ended."""
        task = self._running.get(id)
        if task is None or task.done():
            return 0
        self._background.loop.call_soon_threadsafe(task.cancel)
        return 1

    def chat(self, messages: list[dict[str, str]], **parameters: Any) -> str:
        """Starts a chat answer and returns the request's id; what it says comes with the events."""
        return self._submit("/v1/chat/completions", {"messages": messages, **parameters})

    def complete(self, prompt: str | list[list[int]], **parameters: Any) -> str:
        """Starts a continuation, or one for each prompt of token ids, and returns the request's id."""
        return self._submit("/v1/completions", {"prompt": prompt, **parameters})

    async def send(self, path: str, body: Mapping[str, Any]) -> None:
        """The same, in the background's loop, until the answer has ended: what a synthetic user does."""
        id = _id(path)
        task = self._running[id] = asyncio.create_task(self._sender.send(path, dict(body), id, lambda: None))
        try:
            await task  # who is cancelled here cancels it too
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise EngineError("the request was aborted") from None
        finally:
            del self._running[id]

    # ---- what only an engine of our own can do -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        raise EngineError(f"{self._title} does not tell its state beyond what is shown here")

    def configure(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        raise EngineError(f"{self._title} is configured where it is started: its switches cannot be changed from here")

    def hold(self, seconds: float, at_step: int = 0) -> None:
        raise EngineError(f"{self._title} cannot be held between two steps: only an engine of our own can")

    def ceilings(self) -> dict[str, Any] | None:
        raise EngineError(
            f"the ceilings of {self._title}'s machine are not known: only an engine of our own measures them"
        )

    def measure_ceilings(self) -> dict[str, Any]:
        return self.ceilings()

    def ceilings_progress(self) -> dict[str, Any]:
        return self.ceilings()

    def watch_telemetry(self, panels: Collection[str] = ()) -> None:
        raise EngineError(f"{self._title} does not read sensors for us")

    def close(self) -> None:
        """Before the background is closed. Ends what is in flight."""
        if self._background.loop.is_closed():
            return
        try:
            self._background.run(self._end()).result(ANSWER_S)
        except (RuntimeError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            pass

    # ---- inside --------------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        found = self._found()
        return found.title if found else "the attached server"

    def _here(self) -> Found:
        found = self._found()
        if found is None:
            raise EngineError("the attached server was not reached yet")
        return found

    def _model(self) -> dict[str, str]:
        return named(self._found())

    def _connection(self) -> Web:
        if self._web is None:
            self._web = Web(self._config)
        return self._web

    async def _get(self, path: str) -> Answer:
        return await self._connection().get(path)

    async def _post(self, path: str, body: Any) -> Answer:
        return await self._connection().post(path, body, timeout_s=ANSWER_S)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return self._background.run(work).result(ANSWER_S + 1)
        except Unreachable as error:
            raise EngineError(str(error)) from None
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError, RuntimeError):
            raise EngineError(f"{self._title} has not answered within {ANSWER_S:.0f} s") from None

    def _json(self, work: Coroutine[Any, Any, Answer], what: str) -> Any:
        answer = self._wait(work)
        if not answer.ok:
            why = "it has no such command" if answer.status == 404 else reason(answer.status, answer.body)
            raise EngineError(f"{self._title} does not {what}: {why}", answer.status)
        try:
            return msgspec.json.decode(answer.body)
        except msgspec.DecodeError:
            raise EngineError(f"{self._title} does not {what}: its answer is no JSON") from None

    def _submit(self, path: str, body: dict[str, Any]) -> str:
        id = _id(path)
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._background.run(self._start(path, body, id, accepted))
        try:
            accepted.result(ANSWER_S)
        except concurrent.futures.TimeoutError:
            raise EngineError(f"{self._title} has not taken the request within {ANSWER_S:.0f} s") from None
        return id

    async def _start(self, path: str, body: dict[str, Any], id: str, accepted: concurrent.futures.Future[None]) -> None:
        def take() -> None:
            if not accepted.done():
                accepted.set_result(None)

        self._running[id] = asyncio.current_task()
        try:
            await self._sender.send(path, body, id, take)
        except EngineError as error:
            if not accepted.done():
                accepted.set_exception(error)
        finally:
            del self._running[id]
            if not accepted.done():
                accepted.set_exception(EngineError("the request was given up"))

    async def _end(self) -> None:
        tasks = [task for task in self._running.values() if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._web is not None:
            web, self._web = self._web, None
            await web.close()


def _id(path: str) -> str:
    return ("chatcmpl-" if "chat" in path else "cmpl-") + uuid.uuid4().hex
