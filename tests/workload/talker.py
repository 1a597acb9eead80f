"""An OpenAI-compatible server without a model, with strings to pull: it stalls, refuses, breaks off, dies."""

from __future__ import annotations

import asyncio
import json
import threading
import time

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


class Talker:
    """Attributes may be changed while it serves. Every word of a prompt counts for two tokens, and three more."""

    def __init__(self) -> None:
        self.name = "talker"
        self.key = ""
        self.context = 1000
        self.token_s = 0.0
        self.gate = threading.Event()  # cleared: nobody gets a token
        self.gate.set()
        self.status = 0  # answered instead of a stream
        self.how = "well"  # or: early, error, garbage, whole
        self.chat_only = False
        self.usage = True
        self.metrics = ""
        self.bodies: list[dict] = []
        self.came: list[float] = []
        self.gone = 0
        self.cut = asyncio.Event()  # what `Serving` wants
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/metrics", lambda request: PlainTextResponse(self.metrics)),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "the key is missing"}}, 401)
        return JSONResponse({"data": [{"id": self.name, "max_model_len": self.context}]})

    async def complete(self, request: Request) -> Response:
        chat = request.url.path.endswith("/chat/completions")
        if self.chat_only and not chat:
            return JSONResponse({"error": {"message": "no such path"}}, 404)
        body = await request.json()
        self.came.append(time.perf_counter())
        self.bodies.append(body)
        if self.status:
            return JSONResponse({"error": {"message": f"says no with {self.status}"}}, self.status)
        if self.how == "whole":
            return JSONResponse({"choices": [{"text": "all at once"}]})
        return StreamingResponse(self.stream(body, chat), media_type="text/event-stream")

    async def stream(self, body: dict, chat: bool):
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.005)
            if chat:
                yield event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
            tokens = body["max_tokens"]
            for i in range(tokens):
                await asyncio.sleep(self.token_s)
                if self.how != "well" and i == tokens // 2:
                    if self.how == "error":
                        yield event({"error": {"message": "out of memory"}})
                    if self.how == "garbage":
                        yield b"data: {nonsense\n\n"
                    return
                said = {"delta": {"content": f"w{i} "}} if chat else {"text": f"w{i} "}
                yield event({"choices": [{**said, "finish_reason": "length" if i == tokens - 1 else None}]})
            if self.usage:
                words = len((body["messages"][0]["content"] if chat else body["prompt"]).split())
                yield event({"choices": [], "usage": {"prompt_tokens": 2 * words + 3, "completion_tokens": tokens}})
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone += 1
            raise


def event(content: dict) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
