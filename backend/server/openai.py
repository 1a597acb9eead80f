"""The OpenAI-compatible endpoints, and vLLM's /tokenize, /detokenize and /version beside them."""

from __future__ import annotations

import asyncio
import re
import time

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from backend.server import VERSION, generate, parse, schema
from backend.server.answers import ChatDialect, CompletionDialect
from backend.server.codec import Codec
from backend.server.errors import ApiError, JSONResponse, bad_request
from backend.server.host import EngineHost

router = APIRouter()

BODY_TIMEOUT_S = 60.0
STARTED = int(time.time())
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.\-\[\]]")


def host_of(request: Request) -> EngineHost:
    return request.app.state.host


async def body_of(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except ClientDisconnect:
        raise bad_request("the client left before the body was complete") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None


def check_model(host: EngineHost, model: str | None) -> None:
    if not host.serves(model):
        raise ApiError(
            404,
            f"the model '{model[:200]}' does not run here; '{host.loaded.name}' does",
            param="model",
            code="model_not_found",
        )


def ignored_header(names: list[str]) -> dict[str, str]:
    """Fields that clients sent and we do not know, so that nobody believes that they acted."""
    listed = ", ".join(_NOT_A_NAME.sub("?", name)[:64] for name in names[:20])
    return {"x-kvscope-ignored": listed} if names else {}


@router.get("/version")
async def version() -> Response:
    return JSONResponse({"version": VERSION})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_card(host_of(request))]})


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    check_model(host_of(request), model)
    return JSONResponse(_model_card(host_of(request)))


def _model_card(host: EngineHost) -> dict[str, object]:
    return {
        "id": host.loaded.name,
        "object": "model",
        "created": STARTED,
        "owned_by": "kvscope",
        "root": host.loaded.name,
        "parent": None,
        "max_model_len": host.loop.engine.config.max_model_len,
    }


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    host = host_of(request)
    host.require()
    asked, ignored = parse.completion(await body_of(request))
    check_model(host, asked.model)
    given = parse.split_prompts(asked.prompt, host.loop.engine.config.max_model_len)
    generate.check_number(host, asked, len(given), "prompt")
    prompts = await _encoded(host.codec, asked, given)
    dialect = CompletionDialect()
    job = await generate.submit(host, asked, prompts, dialect.prefix + request.state.request_id, "prompt")
    return await generate.answer(request, host, asked, job, dialect, ignored_header(ignored))


async def _encoded(codec: Codec, asked: schema.Completion, given: list[str] | list[list[int]]) -> list[generate.Prompt]:
    where = ["prompt"] if len(given) == 1 else [f"prompt[{i}]" for i in range(len(given))]
    if isinstance(given[0], str):
        ids = await codec.encode(given, where, special_tokens=asked.add_special_tokens is not False)
        texts = given
    else:
        ids = given
        for item, name in zip(ids, where, strict=True):
            codec.check_ids(item, name)
        texts = [await codec.decode(item) for item in ids] if asked.echo else [""] * len(ids)
    return [generate.Prompt(i, echo=text if asked.echo else "") for i, text in zip(ids, texts, strict=True)]


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    host = host_of(request)
    host.require()
    asked, ignored = parse.chat(await body_of(request))
    check_model(host, asked.model)
    generate.check_number(host, asked, 1, "messages")
    prompt = generate.Prompt(await host.codec.encode_chat(_plain(asked.messages)))
    dialect = ChatDialect()
    job = await generate.submit(host, asked, [prompt], dialect.prefix + request.state.request_id, "messages")
    return await generate.answer(request, host, asked, job, dialect, ignored_header(ignored))


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    host = host_of(request)
    codec = host.codec
    asked, ignored = parse.tokenize(await body_of(request))
    check_model(host, asked.model)
    if asked.messages is not None:
        ids = await codec.encode_chat(_plain(asked.messages))
    elif asked.prompt == "":
        ids = []
    else:
        (ids,) = await codec.encode([asked.prompt], ["prompt"], special_tokens=asked.add_special_tokens is not False)
    return JSONResponse(
        {
            "count": len(ids),
            "max_model_len": host.loop.engine.config.max_model_len,
            "tokens": ids,
            "token_strs": codec.pieces(ids) if asked.return_token_strs else None,
        },
        headers=ignored_header(ignored),
    )


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    host = host_of(request)
    codec = host.codec
    asked, ignored = parse.detokenize(await body_of(request))
    check_model(host, asked.model)
    codec.check_ids(asked.tokens, "tokens")
    return JSONResponse({"prompt": await codec.decode(asked.tokens)}, headers=ignored_header(ignored))


def _plain(messages: list[schema.Message]) -> list[dict[str, str]]:
    """As chat templates take them; "developer" is OpenAI's newer name of "system"."""
    return [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in messages]
