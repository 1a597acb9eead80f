"""The modelled engine against published measurements: does its band hold what servers measured?

    python -m benchmarks.modelled_against_measured [--rounds 3] [--json FILE]

Each measured row of tests/planner/cases.csv that says how it was loaded (prompt and answer length, concurrency) is
played: as many users as it had, each sending its next request when the last one ended, lengths within 10 % of what the
row says, twice: at the fast and at the slow end of the band. A row is held when its TPOT (or TTFT) lies between the two
means. The first round of requests arrives at once, as with the benchmarks that the rows are from, and counts.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from backend.engine.config import ConfigError
from backend.engine.modelled.build import Wanted, build
from backend.engine.request import SamplingParams
from backend.events import Finished
from backend.models.errors import ModelError
from backend.models.plain import PlainTokenizer

CASES = Path(__file__).resolve().parents[1] / "tests" / "planner" / "cases.csv"
KINDS = {"decode_measured_vs_lb_ms": "tpot", "prefill_measured_vs_lb_ms": "ttft"}
LONGEST_ANSWER = 1024  # tokens that are played; the step's time at the row's own mean context is what TPOT is about
LONGEST_ROW_S = 120.0


class Row(NamedTuple):
    id: str
    what: str  # tpot | ttft
    measured_ms: float
    inputs: dict


class Played(NamedTuple):
    tpot_ms: float
    ttft_ms: float


def rows() -> Iterator[Row]:
    with CASES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            inputs = json.loads(row["inputs_json"])
            if row["kind"] in KINDS and {"model", "gpu", "isl", "osl", "batch"} <= set(inputs):
                yield Row(row["id"], KINDS[row["kind"]], float(row["expected"]), inputs)


class _Wall:
    """A wall clock that only moves when somebody sleeps: nothing is waited for."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def play(inputs: dict, efficiency: str, rounds: int, seed: int = 0) -> Played:
    """Means over all requests. Raises ModelError or ConfigError for a row that the modelled engine refuses."""
    users, prompt, answer = inputs["batch"], inputs["isl"], inputs["osl"]
    # A long answer is played in part: its middle, where the context is the mean one.
    skipped = max(0, answer - LONGEST_ANSWER) // 2
    answer -= 2 * skipped
    ended: list[Finished] = []
    wanted = Wanted(
        model=inputs["model"], gpu=inputs["gpu"], tp=inputs.get("tp", 1), weights=inputs["weight_dtype"],
        kv="fp8" if inputs.get("kv_dtype_bytes") == 1 else "bf16", efficiency=efficiency, speed=100.0,
    )  # fmt: skip
    longest = prompt + skipped + answer + 64
    switches = {"max_running": users, "prefix_cache": False, "max_model_len": longest}

    def emit(event) -> None:
        if isinstance(event, Finished):
            ended.append(event)

    try:
        # All that these users need, where it fits: what is left to the engine is no more than a picture can show.
        engine, _ = build(wanted, switches | {"num_blocks": users * -(-longest // 16)}, emit, PlainTokenizer(32_000))
    except ConfigError:
        engine, _ = build(wanted, switches, emit, PlainTokenizer(32_000))
    wall = _Wall()
    clock = engine._clock
    clock._wall, clock._sleep, clock._wall_at, clock._due = wall, wall.sleep, 0.0, 0.0
    chance = random.Random(seed)
    sent = 0

    def send() -> None:
        nonlocal sent
        sent += 1
        length = max(1, round((prompt + skipped) * chance.uniform(0.9, 1.0)))
        tokens = max(2, round(answer * chance.uniform(0.9, 1.0)))
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.submit([256 + sent % 1000] * length, params, id=str(sent))

    for _ in range(users):
        send()
    seen = 0
    while not engine.idle:
        engine.step()
        while seen < len(ended):
            seen += 1
            if sent < users * rounds:
                send()
    return Played(
        1e3 * statistics.mean(e.tpot_s for e in ended if e.tpot_s is not None),
        1e3 * statistics.mean(e.ttft_s for e in ended if e.ttft_s is not None),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="requests of each user")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results, refused, played = [], [], {}
    for row in rows():
        key = json.dumps({k: v for k, v in row.inputs.items() if k not in ("row_id", "backend")}, sort_keys=True)
        began = time.monotonic()
        try:
            if key not in played:
                played[key] = [play(row.inputs, efficiency, arguments.rounds) for efficiency in ("fast", "slow")]
        except (ModelError, ConfigError) as error:
            refused.append({"id": row.id, "what": row.what, "why": str(error)})
            print(f"{row.id} {row.what:4s} refused: {error}", file=sys.stderr)
            continue
        low, high = (getattr(p, f"{row.what}_ms") for p in played[key])
        held = low <= row.measured_ms <= high
        loaded = {name: row.inputs[name] for name in ("model", "gpu", "tp", "batch", "isl", "osl")}
        results.append(
            {"id": row.id, "what": row.what, "measured_ms": row.measured_ms, "low_ms": low, "high_ms": high} | loaded
            | {"held": held}
        )  # fmt: skip
        print(
            f"{row.id} {row.what} {' '.join(map(str, loaded.values()))}: measured {row.measured_ms:.1f}, "
            f"played {low:.1f} … {high:.1f} ms: {'held' if held else 'NOT held'} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    for what in ("tpot", "ttft"):
        own = [r["held"] for r in results if r["what"] == what]
        lost = sum(1 for r in refused if r["what"] == what)
        print(f"{what}: {sum(own)} of {len(own)} held" + (f", {lost} refused" if lost else ""))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": results, "refused": refused}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
