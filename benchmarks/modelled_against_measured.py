"""The modelled engine against published measurements: does its band hold what servers measured?

    python -m benchmarks.modelled_against_measured [--rounds 10] [--json FILE]

Three groups of the measured rows of tests/planner/cases.csv:

- TPOT and TTFT of servers under load, where the row says how it was loaded (prompt and answer length, concurrency). It
  is played: as many users as it had, each sending its next request when the last one ended, until there were ten of
  each user, all at once in the beginning; lengths 80 to 100 % of what the row says, answers never cut. That is how
  InferenceX loads its servers (num-prompts = 10 × concurrency, random-range-ratio 0.8, request-rate inf, ignore-eos),
  from which most rows are. Twice: at the fast and at the slow end of the band; a row is held when it lies between.
- single streams without a server (gpt-fast, llama.cpp): the time of one step, at both ends.

Every row is held against the planner's bound too, which must lie below all of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from backend.engine.config import ConfigError
from backend.engine.modelled.build import Wanted, build
from backend.engine.request import SamplingParams
from backend.events import Finished
from backend.models.errors import ModelError
from backend.models.plain import PlainTokenizer
from backend.planner.roofline import prefill_time

CASES = Path(__file__).resolve().parents[1] / "tests" / "planner" / "cases.csv"
SERVED = {"decode_measured_vs_lb_ms": "tpot", "prefill_measured_vs_lb_ms": "ttft"}
ALONE = "decode_measured_vs_ceiling_tps"
LONGEST_ANSWER = 1024  # tokens that are played; the step's time at the row's own mean context is what TPOT is about
SHORTEST = 0.8  # of the lengths that a row says
BEGIN_S = 10.0  # on the engine's clock, so that nobody has arrived before it began


class Row(NamedTuple):
    id: str
    what: str  # tpot | ttft | alone
    measured_ms: float
    inputs: dict


class Played(NamedTuple):
    tpot_ms: float
    ttft_ms: float


def rows() -> Iterator[Row]:
    with CASES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            inputs, said = json.loads(row["inputs_json"]), row["expected"]
            if row["kind"] in SERVED and {"model", "gpu", "isl", "osl", "batch"} <= set(inputs):
                yield Row(row["id"], SERVED[row["kind"]], float(said), inputs)
            elif row["kind"] == ALONE and {"model", "gpu"} <= set(inputs) and inputs["batch"] == 1:
                yield Row(row["id"], "alone", 1e3 / float(said), inputs)


def wanted(inputs: dict, efficiency: str) -> Wanted:
    return Wanted(
        model=inputs["model"], gpu=inputs["gpu"], tp=inputs.get("tp", inputs.get("n_gpus", 1)),
        weights=inputs["weight_dtype"], kv="fp8" if inputs.get("kv_dtype_bytes") == 1 else "bf16",
        efficiency=efficiency, speed=100.0,
    )  # fmt: skip


class _Wall:
    """A wall clock that only moves when somebody sleeps: nothing is waited for."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def play(inputs: dict, efficiency: str, rounds: int, seed: int = 0, *, middle: bool = True) -> Played:
    """Means over all requests. Raises ModelError or ConfigError for a row that the modelled engine refuses.

    A long answer is played in part. `middle`: its middle, after a prompt that is longer by what was left out, so that
    the context is the mean one: for TPOT. Else its beginning, for TTFT; prompts then meet a little more often.
    """
    users, prompt, answer = inputs["batch"], inputs["isl"], inputs["osl"]
    skipped = max(0, answer - LONGEST_ANSWER) // 2 if middle else 0
    answer = min(answer, LONGEST_ANSWER)
    ended: list[Finished] = []
    longest = prompt + skipped + answer + 64
    switches = {"max_running": users, "prefix_cache": False, "max_model_len": longest}

    def emit(event) -> None:
        if isinstance(event, Finished):
            ended.append(event)

    machine = wanted(inputs, efficiency)
    try:
        # All that these users need, where it fits: what is left to the engine is no more than a picture can show.
        engine, _ = build(machine, switches | {"num_blocks": users * -(-longest // 16)}, emit, PlainTokenizer(32_000))
    except ConfigError:
        engine, _ = build(machine, switches, emit, PlainTokenizer(32_000))
    wall, clock = _Wall(), engine._clock
    clock._wall, clock._sleep, clock._wall_at, clock._due, clock._at = wall, wall.sleep, 0.0, 0.0, BEGIN_S
    chance = random.Random(seed)
    sent = 0

    def send() -> None:
        nonlocal sent
        sent += 1
        length = max(1, round((prompt + skipped) * chance.uniform(SHORTEST, 1.0)))
        tokens = max(2, round(answer * chance.uniform(SHORTEST, 1.0)))
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


def bound_ms(row: Row) -> float:
    """Of one decode step of this batch at the mean context, or of a prompt alone."""
    _, machine = wanted(row.inputs, "bound").machine()
    if row.what == "ttft":
        found = prefill_time(
            machine.arch, machine.weights, machine.accelerator, tokens=row.inputs["isl"], tp=machine.tp
        )
        return 1e3 * found.value
    context = row.inputs.get("context", row.inputs.get("tokens"))
    return 1e3 * machine.step([(1, context - 1)] * row.inputs["batch"], row.inputs["batch"]).bound_s


def ends(row: Row, rounds: int) -> tuple[Played, Played] | str:
    """Played, or computed for a single stream, at both ends of the band; words where it is refused."""
    try:
        if row.what != "alone":
            return tuple(
                play(row.inputs, efficiency, rounds, middle=row.what == "tpot") for efficiency in ("fast", "slow")
            )
        machines = (wanted(row.inputs, efficiency).machine()[1] for efficiency in ("fast", "slow"))
        return tuple(Played(1e3 * m.step([(1, row.inputs["tokens"] - 1)], 1).estimate_s, 0.0) for m in machines)
    except (ModelError, ConfigError) as error:
        return str(error)


def _ends(job: tuple[Row, int]) -> tuple[Played, Played] | str:
    return ends(*job)


def _loaded(row: Row) -> str:
    """What two rows have in common when playing one plays the other."""
    alike = {k: v for k, v in row.inputs.items() if k not in ("row_id", "backend")}
    if alike.get("osl", 0) > LONGEST_ANSWER:
        alike["what"] = row.what
    return json.dumps(alike, sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="requests of each user")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    every, results, refused = list(rows()), [], []
    # Those that are quickly played come first.
    alike = {_loaded(row): row for row in sorted(every, key=lambda row: row.inputs["batch"])}
    played = {}
    with multiprocessing.Pool(min(4, os.cpu_count() or 1)) as pool:
        jobs = ((row, arguments.rounds) for row in alike.values())
        for key, both in zip(alike, pool.imap(_ends, jobs), strict=True):
            played[key] = both
            print(f"{len(played)} of {len(alike)} played: {alike[key].id} {both}", file=sys.stderr, flush=True)
    for row in every:
        both = played[_loaded(row)]
        if isinstance(both, str):
            refused.append({"id": row.id, "what": row.what, "why": both})
            print(f"{row.id} {row.what:5s} refused: {both}")
            continue
        low, high = (p.ttft_ms if row.what == "ttft" else p.tpot_ms for p in both)
        bound, held = bound_ms(row), low <= row.measured_ms <= high
        loaded = {name: row.inputs.get(name) for name in ("model", "gpu", "weight_dtype", "tp", "batch", "isl", "osl")}
        results.append(
            {"id": row.id, "what": row.what, "measured_ms": row.measured_ms, "bound_ms": bound, "low_ms": low,
             "high_ms": high, "held": held} | loaded
        )  # fmt: skip
        print(
            f"{row.id} {row.what:5s} {' '.join(str(v) for v in loaded.values() if v is not None)}: measured "
            f"{row.measured_ms:.1f}, band {low:.1f} … {high:.1f} ms (× {high / low:.1f}), bound {bound:.1f}: "
            f"{'held' if held else 'NOT held'}{'' if bound <= row.measured_ms else ', BELOW ITS BOUND'}"
        )
    for what, words in (("tpot", "TPOT of servers"), ("ttft", "TTFT of servers"), ("alone", "single streams")):
        own = [r for r in results if r["what"] == what]
        widths = statistics.median(r["high_ms"] / r["low_ms"] for r in own)
        below = sum(r["measured_ms"] < r["bound_ms"] for r in own)
        lost = sum(r["what"] == what for r in refused)
        print(
            f"{words}: {sum(r['held'] for r in own)} of {len(own)} held by a band of × {widths:.2f}; {below} below the "
            "bound" + (f"; {lost} refused" if lost else "")
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": results, "refused": refused}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
