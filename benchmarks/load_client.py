"""What the open-loop load client itself adds to the times that it reports.

    python -m benchmarks.load_client [--rate 50] [--requests 1000] [--tokens 32] [--gap-ms 20]

A server in a process of its own knows when each request reached it and when it sent each token, on the clock that both
share. The client reports what it saw. What lies between is the client's, the kernel's and the small server's:

    late       planned arrival to the request being written
    there      planned arrival to the last byte of the request at the server
    back       a token written by the server to the client's stamp on it
    TTFT       what the client says, less the time between the two stamps of the server
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import re
import time
from multiprocessing.connection import Connection

from backend.experiments.percentiles import percentiles
from backend.workload.job import Answer, Job, Target
from backend.workload.worker import Worker

MODELS = json.dumps({"data": [{"id": "clock"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def serve(tell: Connection, tokens: int, gap_s: float) -> None:
    asyncio.run(_serve(tell, tokens, gap_s))


async def _serve(tell: Connection, tokens: int, gap_s: float) -> None:
    seen: list[tuple[float, list[float]]] = []

    async def chunk(writer: asyncio.StreamWriter, data: dict | str) -> None:
        line = b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(line), line))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                await reader.readexactly(int(length[1]) if length else 0)
                came = time.perf_counter()
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
                    continue
                stamps: list[float] = []
                number = len(seen)
                seen.append((came, stamps))
                writer.write(HEAD)
                for i in range(tokens):
                    await asyncio.sleep(gap_s)
                    stamps.append(time.perf_counter())
                    finish = "length" if i == tokens - 1 else None
                    await chunk(writer, {"choices": [{"text": f"{number} ", "finish_reason": finish}]})
                await chunk(writer, {"choices": [], "usage": {"prompt_tokens": number, "completion_tokens": tokens}})
                await chunk(writer, "[DONE]")
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    tell.send(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(tell.recv)
    tell.send(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--gap-ms", type=float, default=20)
    how = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, how.tokens, how.gap_ms / 1000), daemon=True
    )
    server.start()
    target = Target(url=f"http://127.0.0.1:{ours.recv()}", model="clock")
    requests = [(i / how.rate, 64, how.tokens) for i in range(how.requests)]
    worker = Worker()
    started = time.perf_counter()
    *said, end = worker.run(Job(target=target, requests=requests))
    answers, start = [one for one in said if isinstance(one, Answer)], end.clock_s
    took_s, cpu_s = time.perf_counter() - started, sum(os.times()[2:4])
    worker.close()
    cpu_s = sum(os.times()[2:4]) - cpu_s
    ours.send("end")
    seen = ours.recv()
    server.join()
    if wrong := [answer.message for answer in answers if answer.state != "ok"]:
        raise SystemExit(f"{len(wrong)} requests were not answered: {wrong[0]}")
    pairs = [(answer, *seen[answer.input_tokens]) for answer in answers]
    samples = {
        "late": [answer.sent_s - answer.arrival_s for answer, _, _ in pairs],
        "there": [came - start - answer.arrival_s for answer, came, _ in pairs],
        "back": [
            got - (sent - start)
            for answer, _, stamps in pairs
            for got, sent in zip(answer.times_s, stamps, strict=True)
        ],
        "TTFT": [answer.times_s[0] - answer.arrival_s - (stamps[0] - came) for answer, came, stamps in pairs],
    }
    print(
        f"{how.rate:g} requests/s, {len(answers)} requests of {how.tokens} tokens, {how.gap_ms:g} ms apart: "
        f"{how.rate * how.tokens:,.0f} tokens/s; {platform.machine()}, {os.cpu_count()} CPUs, "
        f"load average {os.getloadavg()[0]:.1f}; client process {cpu_s:.1f} s of CPU in {took_s:.1f} s, "
        f"{cpu_s / (len(answers) * how.tokens) * 1e6:.0f} µs a token"
    )
    for name, values in samples.items():
        found = [sum(values) / len(values), *percentiles(values, (50, 95, 99))]
        named = zip(("mean", "p50", "p95", "p99"), found, strict=True)
        words = "   ".join(f"{at} {value * 1e3:6.2f} ms" for at, value in named)
        print(f"  {name:6} {words}")


if __name__ == "__main__":
    main()
