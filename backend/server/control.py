"""The engine's own endpoints: state, events, switches, ceilings."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from backend.engine.config import ConfigError
from backend.server import stream
from backend.server.errors import ApiError, JSONResponse, bad_request
from backend.server.openai import body_of, host_of
from backend.server.parse import decode_object
from backend.telemetry import ceiling

if TYPE_CHECKING:
    from backend.engine.engine import Engine
    from backend.hub import Hub

router = APIRouter(prefix="/engine")


_SWITCH = {"0": False, "false": False, "1": True, "true": True}


@router.get("/state")
async def state(request: Request) -> Response:
    """As the engine itself sees it, between two steps."""
    host = host_of(request)
    found = await host.loop.call(lambda engine: engine.state())
    model, device = host.hub.read(lambda state: (state.model, state.device))
    return JSONResponse({"model": model, "device": device, **found})


@router.get("/events")
async def events(request: Request) -> Response:
    """Lines of `backend.events` after number `since` (of `epoch`), or a snapshot first; `follow=1` goes on for ever."""
    host = host_of(request)
    if not host.hub.read(lambda state: state.epoch):
        host.require()  # nothing was said yet; after a fatal error there is much to read
    query = request.query_params
    since = query.get("since")
    if since is not None and not (since.isascii() and since.isdecimal() and len(since) < 19):
        raise bad_request(f"since must be an event number, not '{since[:50]}'", "since")
    follow = _SWITCH.get(query.get("follow", "0"))
    if follow is None:
        raise bad_request("follow must be 0 or 1", "follow")
    number, epoch = None if since is None else int(since), query.get("epoch", "")
    if follow:
        lines = _follow(host.hub, number, epoch)
        return stream.Stream(lines, closing=host.closing, end=lambda: None, media_type="application/x-ndjson")
    past = None if number is None else host.hub.lines_since(number, epoch)
    if past is None:
        async with contextlib.aclosing(host.hub.follow()) as batches:
            past = await anext(batches)
    return Response(_joined(past), media_type="application/x-ndjson")


async def _follow(hub: Hub, since: int | None, epoch: str) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(hub.follow(since, epoch)) as batches:
        async for lines in batches:
            yield _joined(lines)


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


@router.patch("/config")
async def configure(request: Request) -> Response:
    """Changes switches; answers with all of them. 422 for one that does not exist, 409 when the engine must be idle."""
    from backend.engine.engine import NotIdle

    host = host_of(request)
    loop = host.loop
    changes = decode_object(await body_of(request))
    try:
        await loop.configure(changes)
    except ConfigError as error:
        raise ApiError(422, str(error), param=error.switch, code="invalid_switch") from None
    except NotIdle as error:
        raise ApiError(409, str(error), code="not_idle") from None
    return JSONResponse(msgspec.structs.asdict(loop.engine.config))


@router.post("/reset")
async def reset(request: Request) -> Response:
    from backend.engine.engine import NotIdle

    try:
        await host_of(request).loop.reset_prefix_cache()
    except NotIdle as error:
        raise ApiError(409, str(error), code="not_idle") from None
    return JSONResponse({})


@router.post("/abort/{id:path}")
async def abort(request: Request, id: str) -> Response:
    """Ends the requests with this API id. `aborted` is 0 when there is none (any more), which is fine."""
    return JSONResponse({"aborted": await host_of(request).loop.abort(id)})


@router.get("/ceilings")
async def ceilings(request: Request) -> Response:
    """What the device can do at best: copy and read bandwidth, matmul rate, with spread. Kept from an earlier
    measurement; else measured now, for some seconds and instead of steps, which needs an idle engine (409)."""
    host = host_of(request)
    device, dtype = str(host.loaded.device), str(host.loaded.dtype).removeprefix("torch.")

    def find(engine: Engine) -> ceiling.Ceilings | None:
        found = ceiling.cached(device, dtype)
        if found is None and engine.idle:
            found = ceiling.measure(device, dtype)
            with contextlib.suppress(OSError):  # then it is measured again next time
                ceiling.keep(found)
        return found

    found = await host.loop.call(find)
    if found is None:
        raise ApiError(409, "not measured yet, and measuring needs an idle engine: ask again later", code="not_idle")
    return JSONResponse(found)


@router.get("/telemetry")
async def telemetry(request: Request) -> Response:
    """Latest sensor readings."""
    raise ApiError(501, "this version reads no sensors", code="not_available")
