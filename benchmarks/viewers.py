"""What viewers cost the engine: its throughput with ten followers of the event stream that draw nothing, against none.

    python -m benchmarks.viewers [--viewers 10] [--pairs 5] [--concurrency 32] [--output-tokens 64] [--json]

One server, one load of streaming requests again and again, followers there in every other round (none, ten, ten, none,
…). Followers read bytes and drop them, in a process of their own, so what is compared is what the *engine* has to do
for them; their own CPU time is told beside it, since on few cores it comes out of the same pocket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import psutil

from backend.bench import machine

ROOT = Path(__file__).resolve().parents[1]
READY_S = 300.0
PATIENCE = httpx.Timeout(600.0)  # between two pieces of an answer; a busy machine may be slow


@contextmanager
def server(model: str, dtype: str | None, *options: str):
    """A server of its own on a free port, without prefix cache: every round does the same work. Yields its URL, pid.

    `dtype` None: what it serves in by default. `options`: more of `python -m backend serve`.
    """
    command = [sys.executable, "-m", "backend", "serve", "--port", "0", "--model", model, *options]
    command += ["--dtype", dtype] if dtype else []
    process = subprocess.Popen(
        [*command, "--no-prefix-cache", "--die-with-parent"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        first = process.stdout.readline()
        if not first:
            raise SystemExit(f"the server ended at once with status {process.wait()}; run: {' '.join(command)}")
        url = f"http://127.0.0.1:{json.loads(first)['port']}"
        deadline = time.monotonic() + READY_S
        while True:
            try:
                answer = httpx.get(f"{url}/health", timeout=10)
                if answer.status_code == 200:
                    break
                told = answer.text
            except httpx.HTTPError as error:
                told = str(error)
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not get ready: {told}")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def follow(url: str, viewers: int, pipe: Connection) -> None:
    """The followers' process: connects, says so, reads until told to stop, then tells the bytes and its CPU seconds."""

    async def one(client: httpx.AsyncClient, connected: asyncio.Event, read: list[int]) -> None:
        async with client.stream("GET", f"{url}/engine/events", params={"follow": "1"}) as answer:
            answer.raise_for_status()
            async for piece in answer.aiter_raw():
                read[0] += len(piece)
                connected.set()

    async def main() -> None:
        read = [0]
        limits = httpx.Limits(max_connections=viewers)
        async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as client:
            events = [asyncio.Event() for _ in range(viewers)]
            tasks = [asyncio.create_task(one(client, event, read)) for event in events]
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 30)
            before = time.process_time()
            pipe.send("connected")
            while not pipe.poll():
                await asyncio.sleep(0.1)
            pipe.send({"bytes": read[0], "cpu_s": time.process_time() - before})
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


@asynccontextmanager
async def viewers_at(url: str, count: int):
    """`count` followers while the block runs; the dict it yields is filled when they have left."""
    told: dict = {}
    if not count:
        yield told
        return
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=follow, args=(url, count, theirs))
    process.start()
    try:
        if not await asyncio.to_thread(ours.poll, 60):
            raise SystemExit("the followers could not connect")
        ours.recv()
        yield told
        ours.send("stop")
        told.update(ours.recv())
        process.join(10)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


async def load(url: str, model: str, prompts: list[list[int]], output_tokens: int) -> float:
    """All prompts at once, streamed to the end; output tok/s."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"a request was refused: {(await answer.aread()).decode()}")
            end = b""
            async for piece in answer.aiter_raw():
                end = (end + piece)[-200:]
            if b"[DONE]" not in end or b'"error"' in end:
                raise SystemExit(f"a stream broke off: {end.decode(errors='replace')}")

    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        return len(prompts) * output_tokens / (time.perf_counter() - start)


async def compare(options: argparse.Namespace, url: str, pid: int) -> dict:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    rng = random.Random(7)
    prompts = [[rng.randrange(options.vocab) for _ in range(options.input_tokens)] for _ in range(options.concurrency)]
    await load(url, model, prompts, 8)  # warm-up
    pairs = []
    for number in range(options.pairs):
        pair: dict = {}
        for count in (0, options.viewers) if number % 2 == 0 else (options.viewers, 0):
            server_cpu = sum(psutil.Process(pid).cpu_times()[:2])
            async with viewers_at(url, count) as told:
                rate = await load(url, model, prompts, options.output_tokens)
            server_cpu = sum(psutil.Process(pid).cpu_times()[:2]) - server_cpu
            side = {"output_tok_s": rate, "server_cpu_s": server_cpu, "load_average": os.getloadavg()[0], **told}
            pair["watched" if count else "alone"] = side
            print(f"pair {number + 1}, {count} viewers: {rate:.1f} tok/s", file=sys.stderr, flush=True)
        pairs.append(pair)
    ratios = [pair["watched"]["output_tok_s"] / pair["alone"]["output_tok_s"] for pair in pairs]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": vars(options) | {"out": None},
        "pairs": pairs,
        "throughput_kept": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
    }


def render(report: dict) -> str:
    kept, pairs = report["throughput_kept"], report["pairs"]
    alone = statistics.median(pair["alone"]["output_tok_s"] for pair in pairs)
    viewers_cpu = statistics.median(pair["watched"]["cpu_s"] for pair in pairs)
    viewed_bytes = statistics.median(pair["watched"]["bytes"] for pair in pairs)
    more = statistics.median(pair["watched"]["server_cpu_s"] - pair["alone"]["server_cpu_s"] for pair in pairs)
    count = report["settings"]["viewers"]
    return (
        f"{count} viewers that draw nothing: the engine keeps {kept['median']:.1%} of its throughput "
        f"({kept['low']:.1%}–{kept['high']:.1%}, {len(pairs)} pairs; alone {alone:.0f} tok/s)\n"
        f"a round: the viewers read {viewed_bytes / 1e6:.2f} MB in all and took {viewers_cpu:.2f} s of CPU themselves; "
        f"the server took {more:+.2f} s more"
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=30_000, help="token ids are drawn below it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--out", type=Path, help="where to keep the report; default benchmarks/results/")
    options = parser.parse_args(words)
    with server(options.model, options.dtype) as (url, pid):
        report = asyncio.run(compare(options, url, pid))
    print(json.dumps(report) if options.json else render(report))
    kept = options.out or ROOT / "benchmarks" / "results" / f"viewers-{datetime.now():%Y%m%d-%H%M%S}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"kept in {kept}", file=sys.stderr)


if __name__ == "__main__":
    main()
