"""A stand-in for a vLLM server: metrics that a real one gave under load, higher at each scrape, and streamed answers.

python -m tests.browser.vllm_server --port 8123
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.workload.talker import Talker, event

if TYPE_CHECKING:  # it needs pyzmq
    from tests.sources.attach.wire import Publisher

RECORDED = Path(__file__).parents[1] / "data" / "attach" / "vllm_metrics_load.txt"
_GROWS = re.compile(r"^(vllm:\w+_(?:total|bucket|sum|count)(?:\{.*\})?) ([0-9.e+]+)$", re.MULTILINE)
GROWTH = 0.05  # of what was recorded, a scrape


class VllmServer(Talker):
    """`how_metrics`: well | html | key (wants one) | plain (without what --enable-mfu-metrics adds)."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "smollm2-135m"
        self.token_s = 0.02
        self.how_metrics = "well"
        self.kv: Publisher | None = None  # of KV events
        self.prompt_ids: list[int] = []  # told with each answer
        self.scrapes = 0
        self.headers: list[str] = []
        self.text = RECORDED.read_text(encoding="utf-8")
        self.app.router.routes = [
            route for route in self.app.router.routes if getattr(route, "path", "") != "/metrics"
        ] + [
            Route("/metrics", self.scraped),
            Route("/version", self.version),
            Route("/kv_event_sources", self.kv_event_sources),
        ]

    async def scraped(self, request: Request) -> Response:
        self.headers.append(request.headers.get("authorization", ""))
        if self.how_metrics == "html":
            return HTMLResponse("<!doctype html><title>A router's page</title>")
        if self.how_metrics == "key" and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        self.scrapes += 1
        times = 1 + GROWTH * self.scrapes
        text = self.text
        if self.how_metrics == "plain":
            text = "".join(line for line in text.splitlines(keepends=True) if "estimated_" not in line)
        return PlainTextResponse(_GROWS.sub(lambda m: f"{m[1]} {round(float(m[2]) * times)}", text))

    async def kv_event_sources(self, request: Request) -> Response:
        if self.kv is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        # As of a vLLM that binds its sockets: to an endpoint of one host it would connect.
        live, replay = (url.replace("127.0.0.1", "*") for url in (self.kv.url, self.kv.replay_url))
        told = {"endpoint": live, "replay_endpoint": replay, "topic": "kv-events"}
        return JSONResponse({"0": told})

    async def stream(self, body: dict, chat: bool):
        if self.prompt_ids and body.get("return_token_ids"):
            yield event({"choices": [{"index": 0, "delta": {"content": ""}, "prompt_token_ids": self.prompt_ids}]})
        async for piece in super().stream(body, chat):
            yield piece

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvicorn.run(VllmServer().app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
