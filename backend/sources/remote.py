"""What pages ask of an engine over HTTP."""

from __future__ import annotations

import concurrent.futures
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import httpx

from backend.sources.background import Background
from backend.sources.follow import CONNECT_S, authorization, reason

ANSWER_S = 10.0
MEASURE_S = 180.0


class EngineError(Exception):
    """The engine said no, or could not be asked. `status`: HTTP status, 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class EngineClient:
    """Control of an engine, for pages: short questions block, generations run in the background.

    Every method raises EngineError.
    """

    def __init__(self, get_url: Callable[[], str | None], background: Background, key: str | None = None):
        self._get_url, self._background = get_url, background
        self._headers = authorization(key)
        self._http = httpx.Client(
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S), headers=self._headers, trust_env=False
        )

    @property
    def url(self) -> str:
        url = self._get_url()
        if url is None:
            raise EngineError("the engine is not running")
        return url

    @property
    def headers(self) -> dict[str, str]:
        return dict(self._headers)

    def health(self) -> str:
        """ "" when it serves, else the reason why not."""
        try:
            self._ask("GET", "/health")
        except EngineError as error:
            return str(error)
        return ""

    def state(self) -> dict[str, Any]:
        return self._ask("GET", "/engine/state")

    def models(self) -> list[str]:
        return [model["id"] for model in self._ask("GET", "/v1/models")["data"]]

    def ceilings(self) -> dict[str, Any] | None:
        """As they were measured before; None when they never were."""
        return self._ask("GET", "/engine/ceilings")

    def measure_ceilings(self) -> dict[str, Any]:
        """Measures anew, which takes some seconds. `status` of the error: 409 not idle."""
        return self._ask("POST", "/engine/ceilings", json={"fresh": True}, timeout=MEASURE_S)

    def ceilings_progress(self) -> dict[str, Any]:
        """How far a measurement that runs now is."""
        return self._ask("GET", "/engine/ceilings", params={"progress": "1"})

    def watch_telemetry(self, panels: Collection[str] = ()) -> None:
        """Sensors are read for the next seconds; `panels`: those that cost something and are looked at."""
        self._ask("POST", "/engine/telemetry/watch", json={"panels": list(panels)})

    def configure(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """All switches after the change. `status` of the error: 409 not idle, 422 no such switch or value."""
        return self._ask("PATCH", "/engine/config", json=dict(changes))

    def reset(self) -> None:
        """Empties the prefix cache. `status` of the error: 409 not idle."""
        self._ask("POST", "/engine/reset")

    def hold(self, seconds: float, at_step: int = 0) -> int:
        """No step begins for so long, from step `at_step` on: what is sent meanwhile starts together. 0: go on.

        Returns how many steps have been made.
        """
        return self._ask("POST", "/engine/hold", json={"seconds": seconds, "at_step": at_step})["steps"]

    def tokenize(self, text: str) -> list[int]:
        return self._ask("POST", "/tokenize", json={"prompt": text})["tokens"]

    def abort(self, id: str) -> int:
        """Number of requests that were ended."""
        return self._ask("POST", f"/engine/abort/{id}")["aborted"]

    def chat(self, messages: list[dict[str, str]], **parameters: Any) -> str:
        """Starts a chat answer and returns the request's id; what it says comes with the events."""
        return self._submit("/v1/chat/completions", "chatcmpl-", {"messages": messages, **parameters})

    def complete(self, prompt: str | list[list[int]], **parameters: Any) -> str:
        """Starts a continuation, or one for each prompt of token ids, and returns the request's id."""
        return self._submit("/v1/completions", "cmpl-", {"prompt": prompt, **parameters})

    def close(self) -> None:
        self._http.close()

    def _ask(self, method: str, path: str, **content: Any) -> Any:
        try:
            response = self._http.request(method, self.url + path, **content)
        except httpx.HTTPError as error:
            raise EngineError(f"cannot reach the engine: {error or type(error).__name__}") from None
        if not response.is_success:
            raise EngineError(reason(response.status_code, response.content), response.status_code)
        return response.json() if response.content else None

    def _submit(self, path: str, prefix: str, body: dict[str, Any]) -> str:
        number = uuid.uuid4().hex
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._background.run(_generate(self.url + path, {**self._headers, "x-request-id": number}, body, accepted))
        try:
            accepted.result(ANSWER_S)
        except concurrent.futures.TimeoutError:
            raise EngineError(f"the engine has not taken the request within {ANSWER_S:.0f} s") from None
        return prefix + number


async def _generate(
    url: str, headers: dict[str, str], body: dict[str, Any], accepted: concurrent.futures.Future[None]
) -> None:
    """Has a stream answered and drops it: it is watched through the events. `accepted` hears whether it was taken."""
    try:
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False) as client,
            client.stream("POST", url, headers=headers, json={**body, "stream": True}) as response,
        ):
            if not response.is_success:
                await response.aread()
                raise EngineError(reason(response.status_code, response.content), response.status_code)
            accepted.set_result(None)
            async for _ in response.aiter_raw():
                pass
    except (httpx.HTTPError, EngineError) as error:
        if not accepted.done():
            known = isinstance(error, EngineError)
            accepted.set_exception(
                error if known else EngineError(f"cannot reach the engine: {error or type(error).__name__}")
            )
    finally:
        if not accepted.done():
            accepted.set_exception(EngineError("the request was given up"))
