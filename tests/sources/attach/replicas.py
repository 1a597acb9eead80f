"""Many small servers in one thread, each with a metrics page that moves: a fleet is tested and measured with them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable

from backend.sources.background import Background

Body = Callable[[int, int], bytes]  # (replica, how often it was asked) -> its metrics


def small(replica: int, asked: int) -> bytes:
    """What vLLM says, as far as a fleet compares it."""
    labels = '{engine="0",model_name="m"}'
    usage = (replica % 8) / 8
    return f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{labels} {replica + 1}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{labels} {replica % 3}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{labels} {usage}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="101"}} 1
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{labels} {100 * asked}
""".encode()


class Replicas:
    """`urls`: one a replica. `asked`: metrics pages that were served, by replica. `hang`, `dead`: replicas that take a
    connection and never answer, or that close it at once; both may be changed at any time."""

    def __init__(self, count: int, body: Body = small):
        self.asked: Counter[int] = Counter()
        self.open: Counter[int] = Counter()  # questions that are being answered
        self.most_open: Counter[int] = Counter()
        self.hang: set[int] = set()
        self.dead: set[int] = set()
        self._body = body
        self._background = Background("replicas")
        self.urls: list[str] = self._background.run(self._start(count)).result()

    def close(self) -> None:
        self._background.close()

    async def _start(self, count: int) -> list[str]:
        urls = []
        for replica in range(count):
            server = await asyncio.start_server(
                lambda reader, writer, replica=replica: self._serve(replica, reader, writer), "127.0.0.1", 0
            )
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        return urls

    async def _serve(self, replica: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while replica not in self.dead:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                self.open[replica] += 1
                self.most_open[replica] = max(self.most_open[replica], self.open[replica])
                try:
                    if replica in self.hang:
                        await asyncio.sleep(600)
                    status, body = self._answer(replica, path)
                    kind = "text/plain" if path == "/metrics" else "application/json"
                    writer.write(
                        f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                        + body
                    )
                    await writer.drain()
                finally:
                    self.open[replica] -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, replica: int, path: str) -> tuple[int, bytes]:
        if path == "/metrics":
            self.asked[replica] += 1
            return 200, self._body(replica, self.asked[replica])
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "m", "max_model_len": 1024}]}).encode()
        return 404, b"{}"
