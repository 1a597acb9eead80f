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
import re
import time
from datetime import datetime
from multiprocessing.connection import Connection

from backend.bench import machine
from backend.experiments.percentiles import percentiles
from backend.workload.job import Answer, Job, Target
from backend.workload.worker import Worker
from benchmarks.viewers import ROOT

FIGURES = ("mean", "p50", "p95", "p99")


class Clock(asyncio.Protocol):
    """One connection; notes the time first and does everything else after it."""

    def __init__(self, seen: list[tuple[float, list[float]]], tokens: int, gap_s: float):
        self._seen, self._tokens, self._gap_s = seen, tokens, gap_s
        self._rest = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        came = time.perf_counter()
        self._rest += data
        head, found, body = self._rest.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if not found or len(body) < (int(length[1]) if length else 0):
            return
        self._rest = b""
        if not head.startswith(b"POST"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
            return
        self._seen.append((came, []))
        self._transport.write(HEAD)
        self._later(len(self._seen) - 1)

    def _later(self, number: int) -> None:
        asyncio.get_running_loop().call_later(self._gap_s, self._token, number)

    def _token(self, number: int) -> None:
        stamps = self._seen[number][1]
        stamps.append(time.perf_counter())
        if len(stamps) < self._tokens:
            self._transport.write(TOKEN)
            self._later(number)
        else:
            usage = {"choices": [], "usage": {"prompt_tokens": number, "completion_tokens": self._tokens}}
            self._transport.write(LAST + chunk(json.dumps(usage)) + END)


def chunk(data: str) -> bytes:
    line = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(line), line)


MODELS = json.dumps({"data": [{"id": "clock"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = chunk(json.dumps({"choices": [{"text": "token ", "finish_reason": None}]}))
LAST = chunk(json.dumps({"choices": [{"text": "token ", "finish_reason": "length"}]}))
END = chunk("[DONE]") + b"0\r\n\r\n"


def serve(tell: Connection, tokens: int, gap_s: float) -> None:
    asyncio.run(_serve(tell, tokens, gap_s))


async def _serve(tell: Connection, tokens: int, gap_s: float) -> None:
    seen: list[tuple[float, list[float]]] = []
    server = await asyncio.get_running_loop().create_server(lambda: Clock(seen, tokens, gap_s), "127.0.0.1", 0)
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
    found = {name: dict(zip(FIGURES, figures(values), strict=True)) for name, values in samples.items()}
    report = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": machine.describe() | {"load_average": machine.load_average()},
        "settings": vars(how),
        "client_cpu_s_per_token": cpu_s / (len(answers) * how.tokens),
        "added_ms": found,
    }
    kept = ROOT / "benchmarks" / "results" / f"load-client-{datetime.now():%Y%m%d-%H%M%S}.json"
    kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        f"{how.rate:g} requests/s, {len(answers)} requests of {how.tokens} tokens, {how.gap_ms:g} ms apart: "
        f"{how.rate * how.tokens:,.0f} tokens/s; load average {machine.load_average():.1f}; client process "
        f"{cpu_s:.1f} s of CPU in {took_s:.1f} s, {report['client_cpu_s_per_token'] * 1e6:.0f} µs a token"
    )
    for name, by in found.items():
        print(f"  {name:6} " + "   ".join(f"{at} {value:6.2f} ms" for at, value in by.items()))
    print(f"kept in {kept.relative_to(ROOT)}")


def figures(values: list[float]) -> list[float]:
    return [value * 1e3 for value in (sum(values) / len(values), *percentiles(values, (50, 95, 99)))]


if __name__ == "__main__":
    main()
