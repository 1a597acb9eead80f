"""The hardware's endpoints: measured ceilings, and what the sensors say."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from backend.server.errors import ApiError, JSONResponse, bad_request
from backend.server.openai import body_of, host_of
from backend.server.parse import decode_object
from backend.telemetry import ceiling, peaks

if TYPE_CHECKING:
    from backend.engine.engine import Engine
    from backend.server.host import EngineHost

router = APIRouter(prefix="/engine")

FIRST_READING_S = 1.5  # that a look at the sensors waits for, when they slept
MAX_PANELS, MAX_NAME = 8, 20


# ---- ceilings ----------------------------------------------------------------------------------------------------


@router.get("/ceilings")
async def ceilings(request: Request) -> Response:
    """What the device can do at best, as it was measured here before; null when it never was. Measures nothing.

    `progress=1`: how far a measurement is that runs now.
    """
    host = host_of(request)
    progress = request.query_params.get("progress", "0")
    if progress not in ("0", "1"):
        raise bad_request("progress must be 0 or 1", "progress")
    if progress == "1":
        return JSONResponse(host.measuring or {"measuring": False, "share": 0.0, "text": ""})
    if host.loaded.roofs:
        return JSONResponse(host.loaded.roofs)
    device, dtype = _computes_on(host)
    found = await asyncio.to_thread(ceiling.cached, device, dtype)
    return JSONResponse(found and _with_peaks(host, found))


@router.post("/ceilings")
async def measure(request: Request) -> Response:
    """Measures, for some seconds and instead of steps; with `fresh` also when it was measured before.

    409 while a request is in the engine, or while it is being measured already.
    """
    host = host_of(request)
    asked = decode_object(await body_of(request))
    fresh = asked.get("fresh", False)
    if not isinstance(fresh, bool):
        raise bad_request("fresh must be true or false", "fresh")
    if host.loaded.roofs:
        raise ApiError(409, "a modelled device has its roofs from the data sheet: nothing to measure", code="modelled")
    device, dtype = _computes_on(host)
    if not fresh and (found := await asyncio.to_thread(ceiling.cached, device, dtype)):
        return JSONResponse(_with_peaks(host, found))
    if host.measuring:
        raise ApiError(409, "the ceilings are being measured already", code="not_idle")

    def run(engine: Engine) -> ceiling.Ceilings | None:
        if not engine.idle:
            return None
        found = ceiling.measure(device, dtype, progress=host.progress)
        with contextlib.suppress(OSError):  # then it is measured again next time
            ceiling.keep(found)
        return found

    host.progress(0.0, "waiting for the engine")
    try:
        found = await host.loop.call(run)
    finally:
        host.measuring = None
    if found is None:
        raise ApiError(409, "ceilings are measured while the engine is idle; requests are in it now", code="not_idle")
    return JSONResponse(_with_peaks(host, found))


def _computes_on(host: EngineHost) -> tuple[str, str]:
    """(device, dtype of its arithmetic, which may be wider than what the weights are stored in)."""
    loaded = host.loaded
    return str(loaded.device), str(getattr(loaded, "computes_in", None) or loaded.dtype).removeprefix("torch.")


def _with_peaks(host: EngineHost, found: ceiling.Ceilings) -> ceiling.Ceilings:
    """Theoretical and data-sheet figures beside it, of the device that the engine computes on."""
    told = host.sampler.ring.devices
    device = next((d for d in told.devices if d.used), None) if told else None
    return msgspec.structs.replace(found, beside=peaks.beside(found, device))


# ---- sensors -----------------------------------------------------------------------------------------------------


@router.post("/telemetry/watch")
async def watch(request: Request) -> Response:
    """Somebody looks: sensors are read for `lease_s` seconds from now. `panels`: open ones that cost something."""
    host = host_of(request)
    panels = decode_object(await body_of(request)).get("panels", [])
    sound = isinstance(panels, list) and len(panels) <= MAX_PANELS
    if not sound or not all(isinstance(panel, str) and len(panel) <= MAX_NAME for panel in panels):
        raise bad_request(f"panels must be a list of at most {MAX_PANELS} short names", "panels")
    host.require()
    host.sampler.watch(panels)
    return JSONResponse({"lease_s": host.sampler.lease_s})


@router.get("/telemetry")
async def telemetry(request: Request) -> Response:
    """What can be read here and what it said last, with the age of each value; reading goes on for some seconds.

    `format=csv` or `jsonl`: the last minutes instead, with unit, source and label beside every value.
    """
    host = host_of(request)
    kind = request.query_params.get("format", "")
    if kind not in ("", "csv", "jsonl"):
        raise bad_request("format must be csv or jsonl", "format")
    host.require()
    sampler = host.sampler
    sampler.watch()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_READING_S):
            while sampler.age_s is None or sampler.age_s > sampler.lease_s:
                await asyncio.sleep(0.02)
    if kind:
        text = sampler.ring.csv() if kind == "csv" else sampler.ring.jsonl()
        media_type = "text/csv; charset=utf-8" if kind == "csv" else "application/x-ndjson"
        return Response(text, media_type=media_type)
    return JSONResponse(
        {
            "devices": sampler.ring.devices,
            "latest": sampler.latest(),
            "age_s": sampler.age_s,
            "hung_s": sampler.hung_s,
            "skipped_ticks": sampler.skipped_ticks,
            "lease_s": sampler.lease_s,
        }
    )
