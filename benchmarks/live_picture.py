"""What the live picture costs, up to the browser's socket: a scripted engine at 50 steps a second with 64 requests in
the batch, in a process of its own; the page's side (follower, hub, WebSocket route) in another; raw WebSocket readers.

    python -m benchmarks.live_picture [--seconds 10] [--blocks 4096 32768] [--viewers 1 10 20] [--json]

Run it on a quiet machine: the load average before each row is printed with it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil

STEPS_PER_S = 50
RUNNING = 64
SETTLE_S = 2.0
EPOCH_START = 1_700_000_000.0  # what the scripted engine says its clock began at
CONNECTING_S = 30.0
TOKEN = "benchmark"  # noqa: S105  guards nothing


def engine(port: Connection, blocks: int) -> None:
    """The engine's side: events at a steady rate, and the endpoint that they are followed at."""
    import uvicorn

    from tests.scripted_engine import ScriptedEngine
    from tests.sources.fake_engine import FakeEngine

    fake = FakeEngine()
    script = ScriptedEngine(
        fake.hub.publish,
        blocks=blocks,
        running=RUNNING,
        prompt=(64, 600),
        output=(64, 512),
        shared_tokens=256,
        clock=lambda: time.time() - EPOCH_START,
    )

    def work() -> None:
        script.hello()
        begin, done = time.perf_counter(), 0
        while True:
            script.top_up(RUNNING + 2)
            script.step()
            done += 1
            time.sleep(max(0.0, begin + done / STEPS_PER_S - time.perf_counter()))

    threading.Thread(target=work, daemon=True).start()
    _serve(uvicorn, fake.app, port)


def page(port: Connection, engine_port: int) -> None:
    """The page's side, without Streamlit."""
    import uvicorn
    from starlette.applications import Starlette

    from backend.server import live
    from backend.sources import open_source

    source = open_source(environ={"KVSCOPE_ENGINE_URL": f"http://127.0.0.1:{engine_port}"})
    gc.collect()
    gc.freeze()
    _serve(uvicorn, Starlette(routes=live.routes(lambda: source.hub, token=TOKEN)), port)


def _serve(uvicorn: Any, app: Any, port: Connection) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port.send(listening.getsockname()[1])
    config = uvicorn.Config(app, log_level="error", ws="websockets-sansio", ws_per_message_deflate=False)
    asyncio.run(uvicorn.Server(config).serve([listening]))


async def read(url: str, begin: float, end: float) -> dict[str, Any]:
    """One viewer: what came between `begin` and `end` (on time.time's clock)."""
    from websockets.asyncio.client import connect

    steps, updates, sizes, ages = set(), set(), [], []
    async with connect(url, max_size=None, compression=None) as client:
        while (left := end - time.time()) > 0:
            try:
                frame = await asyncio.wait_for(client.recv(), left)
            except TimeoutError:
                break
            now = time.time()
            told = [event for event in json.loads(frame) if event["type"] == "step"]
            if now < begin or not told:
                continue
            steps.update(event["step"] for event in told)
            updates.add(told[-1]["step"])
            sizes.append(len(frame))
            ages.append(now - EPOCH_START - told[-1]["t"])
    if len(sizes) < 2:
        raise RuntimeError("a viewer saw nothing: this machine is too busy to measure on")
    seconds = end - begin
    return {
        "steps_per_s": len(steps) / seconds,
        "updates_per_s": len(updates) / seconds,
        "bytes_per_update": statistics.mean(sizes),
        "median_bytes": statistics.median(sizes),
        "age_ms_median": 1e3 * statistics.median(ages),
        "age_ms_p95": 1e3 * statistics.quantiles(ages, n=20)[18],
    }


def measure(blocks: int, viewers: int, seconds: float) -> dict[str, Any]:
    load = os.getloadavg()[0]
    spawn = multiprocessing.get_context("spawn")
    processes = []

    def start(target: Any, *arguments: Any) -> tuple[psutil.Process, int]:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        processes.append(process)
        if not ours.poll(CONNECTING_S):
            raise RuntimeError(f"{target.__name__} did not start")
        return psutil.Process(process.pid), ours.recv()

    try:
        engine_process, engine_port = start(engine, blocks)
        page_process, page_port = start(page, engine_port)
        url = f"ws://127.0.0.1:{page_port}/api/live?token={TOKEN}"
        begin = time.time() + SETTLE_S + 0.1 * viewers
        end = begin + seconds

        async def all_viewers() -> tuple[list[dict[str, Any]], dict[str, float]]:
            reading = asyncio.gather(*(read(url, begin, end) for _ in range(viewers)))
            await asyncio.sleep(begin - time.time())
            before = {p: _cpu_s(p) for p in (engine_process, page_process)}
            clock = time.perf_counter()
            await asyncio.sleep(end - time.time() - 0.2)
            elapsed = time.perf_counter() - clock
            shares = {p: (_cpu_s(p) - before[p]) / elapsed for p in before}
            return await reading, {"page_core_share": shares[page_process], "engine_core_share": shares[engine_process]}

        seen, shares = asyncio.run(all_viewers())
        worst = min(seen, key=lambda one: one["updates_per_s"])
        return {
            "blocks": blocks,
            "viewers": viewers,
            **worst,
            **shares,
            "page_rss_mib": page_process.memory_info().rss / 2**20,
            "load_before": load,
        }
    finally:
        for process in processes:
            process.kill()
            process.join()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--viewers", type=int, nargs="+", default=[1, 10, 20])
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    wanted = parser.parse_args()
    if not wanted.json:
        print(" ".join(title for title, _, _ in COLUMNS))
    for blocks in wanted.blocks:
        for viewers in wanted.viewers:
            row = measure(blocks, viewers, wanted.seconds)
            print(json.dumps(row) if wanted.json else table_row(row), flush=True)


COLUMNS = (
    ("blocks", "blocks", ".0f"),
    ("viewers", "viewers", ".0f"),
    ("steps/s", "steps_per_s", ".1f"),
    ("updates/s", "updates_per_s", ".1f"),
    ("bytes/update", "bytes_per_update", ".0f"),
    ("median", "median_bytes", ".0f"),
    ("age_ms_p50", "age_ms_median", ".1f"),
    ("age_ms_p95", "age_ms_p95", ".1f"),
    ("page_core", "page_core_share", ".1%"),
    ("engine_core", "engine_core_share", ".1%"),
    ("page_MiB", "page_rss_mib", ".0f"),
    ("load", "load_before", ".1f"),
)


def table_row(row: dict[str, Any]) -> str:
    return " ".join(f"{row[name]:{len(title)}{form}}" for title, name, form in COLUMNS)


if __name__ == "__main__":
    main()
