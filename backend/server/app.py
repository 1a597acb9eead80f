"""The application: routes, the guard in front of them, errors in one shape, and the engine's life around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from backend.server import control, hardware, metrics, openai
from backend.server.errors import ApiError, JSONResponse, unavailable
from backend.server.guard import MAX_BODY_BYTES, Guard
from backend.server.host import EngineHost
from backend.server.http_tally import Counted


def create_app(
    host: EngineHost, *, api_key: str | None = None, loopback: bool = True, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The engine starts with the app's lifespan and stops with it. `loopback`: see Guard."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await host.start()
        try:
            yield
        finally:
            await host.stop()

    # No /docs: its page would load scripts from the internet.
    app = FastAPI(title="KVScope engine", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.host = host
    app.include_router(openai.router)
    app.include_router(control.router)
    app.include_router(hardware.router)
    app.include_router(metrics.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RuntimeError, _engine_error)
    app.add_middleware(Guard, api_key=api_key, loopback=loopback, max_body_bytes=max_body_bytes)
    app.add_middleware(Counted, tally=host.metrics.http)  # around the guard

    @app.get("/health")
    async def health() -> Response:
        """200 and no body when requests are served; 503 with the reason while loading or after a fatal error."""
        return Response(status_code=200) if host.problem is None else unavailable(host.problem).response()

    @app.get("/kv_event_sources")
    async def kv_event_sources() -> Response:
        """Where KV cache events are published, one row a data-parallel rank, as vLLM answers it; [] when nowhere."""
        return JSONResponse(host.kv.sources() if host.kv else [])

    return app


async def _api_error(_: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """No such path, or not with this method."""
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _engine_error(request: Request, error: RuntimeError) -> Response:
    """What the engine's bridge raises when its thread has died meanwhile; anything else is a defect of ours."""
    problem = request.app.state.host.problem
    if problem is None:
        raise error
    return unavailable(problem).response()
