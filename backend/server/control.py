"""The engine's own endpoints: state, events, switches."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from backend.engine.config import ConfigError
from backend.server import stream
from backend.server.errors import ApiError, JSONResponse, bad_request
from backend.server.openai import body_of, host_of
from backend.server.parse import decode_object

if TYPE_CHECKING:
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


MAX_HOLD_S = 60.0


class Hold(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_HOLD_S)]
    at_step: Annotated[int, msgspec.Meta(ge=0)] = 0


@router.post("/hold")
async def hold(request: Request) -> Response:
    """No step begins for `seconds` (from step `at_step` on), or until the next hold: what is sent meanwhile starts
    together. 0 goes on at once. For experiments that must come out the same every time; ends by itself."""
    try:
        asked = msgspec.convert(decode_object(await body_of(request)), Hold)
    except msgspec.ValidationError as error:
        raise bad_request(str(error), "seconds") from None
    return JSONResponse({"steps": await host_of(request).loop.hold(asked.seconds, asked.at_step)})


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
