"""What following a fleet costs: 32 replicas at 1 Hz, each with a metrics page of a real vLLM that moves.

    python -m benchmarks.fleet_cost [--replicas 32] [--seconds 30] [--profile] [--json]

The replicas are small HTTP servers in a process of their own, so that only the fleet's work is counted: CPU time of
this process, with a viewer that asks for all rows and sums once a second, as the fleet page does. In the second half
one replica takes connections and never answers: the others must be scraped as often as before.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from backend.bench import machine

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "tests" / "data" / "attach" / "vllm_metrics_load.txt"
WARM_UP_S = 5.0
LIMIT = 0.20  # of one core
HANGING = 5


def moving(sample: str):
    """A body for each question: every counter grows, every gauge of requests sways."""
    lines: list[tuple[str, float] | str] = []
    for line in sample.split("\n"):
        name, _, value = line.rpartition(" ")
        counts = any(part in line.partition("{")[0] for part in ("_total", "_bucket", "_count", "_sum"))
        lines.append((name, float(value)) if counts and not line.startswith("#") and "_created" not in line else line)

    def body(replica: int, asked: int) -> bytes:
        grown = 1 + 0.01 * asked
        text = [line if isinstance(line, str) else f"{line[0]} {float(int(line[1] * grown))}" for line in lines]
        return "\n".join(text).encode()

    return body


def serve(replicas: int) -> None:
    """The other process: addresses out, {"hang": n} in, numbers of served pages out for each empty line."""
    from tests.sources.attach.replicas import Replicas

    servers = Replicas(replicas, moving(SAMPLE.read_text()))
    print(json.dumps(servers.urls), flush=True)
    for line in sys.stdin:
        if line.strip():
            servers.hang = {json.loads(line)["hang"]}
        print(json.dumps([servers.asked[i] for i in range(replicas)]), flush=True)
    servers.close()


def measure(replicas: int, seconds: float, profile: bool) -> dict:
    from backend.sources.attach import fleet_view
    from backend.sources.attach.fleet import Fleet
    from backend.sources.attach.target import TargetConfig

    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fleet_cost", "--serve", "--replicas", str(replicas)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )

    def served(command: str = "") -> list[int]:
        server.stdin.write(command + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    fleet = None
    try:
        urls = json.loads(server.stdout.readline())
        fleet = Fleet([TargetConfig(url=url) for url in urls])
        time.sleep(WARM_UP_S)
        phases = []
        for name, command in (("all answer", ""), ("one hangs", json.dumps({"hang": HANGING}))):
            before = served(command)
            wall, cpu, viewer, message = time.perf_counter(), time.process_time(), 0.0, ""
            while time.perf_counter() - wall < seconds:
                begin = time.thread_time()
                message = fleet_view.message(fleet)
                viewer += time.thread_time() - begin
                time.sleep(1.0)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            rates = [(now - then) / wall for now, then in zip(served(), before, strict=True)]
            others = [rate for i, rate in enumerate(rates) if name == "all answer" or i != HANGING]
            states = [row.state for row in fleet.rows()]
            phases.append(
                {
                    "phase": name,
                    "seconds": round(wall, 2),
                    "cpu_share_of_one_core": round(cpu / wall, 4),
                    "of_which_viewer": round(viewer / wall, 4),
                    "cpu_ms_a_scrape": round(1e3 * (cpu - viewer) / (sum(rates) * wall), 3),
                    "scrapes_per_s_lowest": round(min(others), 3),
                    "scrapes_per_s_highest": round(max(others), 3),
                    "live": states.count("live"),
                    "not_live": [state for state in states if state != "live"],
                    "message_bytes": len(message),
                }
            )
        return {
            "replicas": replicas,
            "body_bytes": len(SAMPLE.read_bytes()),
            "phases": phases,
            "profile": _profiled(fleet, seconds) if profile else None,
        }
    finally:
        if fleet is not None:
            fleet.close()
        server.stdin.close()
        server.wait(10)


def _profiled(fleet, seconds: float) -> list[str]:
    """The functions that the fleet's thread spends its time in."""
    import asyncio

    profiler = cProfile.Profile()

    async def switch(on: bool) -> None:
        profiler.enable() if on else profiler.disable()

    for on in (True, False):
        asyncio.run_coroutine_threadsafe(switch(on), fleet._background.loop).result()
        time.sleep(min(seconds, 10.0) if on else 0)
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])[:25]
    return [
        f"{1e3 * own:8.1f} ms own {n:8d} calls  {Path(f).name}:{line} {name}"
        for (f, line, name), (_, n, own, *_) in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.replicas)
        return
    found = measure(given.replicas, given.seconds, given.profile)
    for line in found.pop("profile") or ():
        print(line)
    result = {
        "what": "fleet_cost",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "load_average": machine.load_average(),
        **found,
        "limit": LIMIT,
        "met": all(phase["cpu_share_of_one_core"] < LIMIT for phase in found["phases"]),
    }
    print(json.dumps(result, indent=2))
    if given.json:
        path = ROOT / "benchmarks" / "results" / f"fleet-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"kept as {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
