"""The benchmark: rounds in which the roof is measured and then every engine takes its turn, A B C, A B C, …"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from backend.bench import figures, machine, workload
from backend.bench.peers import OURS, PEERS, ROOT, PeerFailed, take_turn
from backend.planner.shape import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    model: str  # a local folder
    name: str
    dtype: str
    threads: int
    peers: list[str]
    concurrency: list[int]
    rounds: int
    input_tokens: int
    output_tokens: int
    options: dict = field(default_factory=dict)  # switches of our engine
    timeout_s: float = 1200.0  # a turn may take this long
    roof_rounds: int = 5  # of one measurement of the roof


def run(settings: Settings, say: Say) -> dict:
    """The whole report as a JSON-able dict. Engines that fail are in `left_out`, with the reason."""
    config = json.loads((Path(settings.model) / "config.json").read_text(encoding="utf-8"))
    shape = ModelShape.from_config(config, DTYPE_BYTES[settings.dtype])
    jobs = workload.jobs(settings.concurrency, settings.input_tokens, settings.output_tokens, shape.vocab)
    order = {
        "model": settings.model,
        "dtype": settings.dtype,
        "threads": settings.threads,
        "options": settings.options,
        "jobs": jobs,
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    taking_part, left_out, ready = list(settings.peers), {}, {}
    rounds: list[dict] = []
    for number in range(settings.rounds):
        say(f"round {number + 1} of {settings.rounds}: measuring the roof")
        this = {"ceilings": measure_roof(settings), "turns": {}}
        for name in list(taking_part):
            title, load = PEERS[name].title, machine.load_average()
            say(f"round {number + 1} of {settings.rounds}: {title}")
            try:
                turn = take_turn(
                    PEERS[name], order, timeout_s=settings.timeout_s, said=lambda line: say(_progress(line))
                )
            except PeerFailed as error:
                say(f"  left out: {error}")
                left_out[name] = str(error)
                taking_part.remove(name)
                continue
            ready[name] = turn.ready
            this["turns"][name] = {"load_average": load, "jobs": turn.jobs}
        rounds.append(this)
    report = {
        "started": started,
        "machine": machine.describe(),
        "settings": asdict(settings) | {"model": settings.name},
        "engines": {name: {"title": PEERS[name].title, **ready[name]} for name in taking_part},
        "left_out": left_out,
        "load_average": [turn["load_average"] for this in rounds for turn in this["turns"].values()],
        "results": [summarise(rounds, str(n), shape, settings, taking_part) for n in settings.concurrency],
        "ceilings": [this["ceilings"] for this in rounds],
    }
    return report


def measure_roof(settings: Settings) -> dict:
    """In a process of its own, with the engines' threads; a few seconds. Fewer rounds than the pages' roofs have, which
    stay as they are."""
    command = [sys.executable, "-m", "backend.telemetry.cli", "--fresh", "--no-keep", "--json"]
    command += ["--dtype", settings.dtype, "--threads", str(settings.threads), "--rounds", str(settings.roof_rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=settings.timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring the roof failed: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)["ceilings"]


def _progress(line: dict) -> str:
    if "ready" in line:
        return "  loaded"
    if line["job"] == "warm-up":
        return "  warmed up"
    found = figures.run_of(line["requests"])
    times = f"TTFT {found.ttft_s:.2f} s, TPOT {found.tpot_s * 1e3:.1f} ms"
    return f"  {line['job']} at once: {found.output_tok_s:.1f} tok/s, {times}"


def summarise(rounds: list[dict], job: str, shape: ModelShape, settings: Settings, names: list[str]) -> dict:
    """One number of requests at once: each engine's figures with their spread, and its share of the roof.

    Shares are of the roof measured in the same round, so that a slow moment of the machine counts on both sides.
    """
    batch = int(job)
    context = settings.input_tokens + settings.output_tokens // 2
    limits = [
        figures.limit_of(shape, batch, context, this["ceilings"]["read"]["value"], this["ceilings"]["matmul"]["value"])
        for this in rounds
    ]
    engines = {}
    answers = {}
    for name in names:
        runs = [figures.run_of(this["turns"][name]["jobs"][job]["requests"]) for this in rounds]
        engines[name] = {
            key: figures.Spread.of([getattr(run, key) for run in runs]).as_dict()
            for key in ("output_tok_s", "ttft_s", "tpot_s", "decode_tok_s")
        }
        engines[name]["share_of_read_roof"] = figures.Spread.of(
            [run.decode_tok_s / limit.read_roof_tok_s for run, limit in zip(runs, limits, strict=True)]
        ).as_dict()
        engines[name]["share_of_limit"] = figures.Spread.of(
            [run.decode_tok_s / limit.limit_tok_s for run, limit in zip(runs, limits, strict=True)]
        ).as_dict()
        answers[name] = [request["tokens"] for request in rounds[0]["turns"][name]["jobs"][job]["requests"]]
        steps = [step for this in rounds for step in this["turns"][name]["jobs"][job]["steps"]]
        engines[name]["decode_step"] = figures.decode_breakdown(steps, batch)
    for name in names:
        if name != OURS and OURS in names:  # paired, round by round
            ours, theirs = (
                [figures.run_of(this["turns"][who]["jobs"][job]["requests"]).output_tok_s for this in rounds]
                for who in (OURS, name)
            )
            engines[name]["ours_over_this"] = figures.Spread.of(
                [a / b for a, b in zip(ours, theirs, strict=True)]
            ).as_dict()
    reference = "generate" if "generate" in names else names[0] if names else ""
    return {
        "at_once": batch,
        "step_bytes": limits[0].bytes,
        "step_flops": limits[0].flops,
        "read_roof_tok_s": figures.Spread.of([limit.read_roof_tok_s for limit in limits]).as_dict(),
        "limit_tok_s": figures.Spread.of([limit.limit_tok_s for limit in limits]).as_dict(),
        "bound_by": limits[0].bound_by,
        "engines": engines,
        "same_answers_as": {reference: figures.same_answers(answers, reference)} if reference else {},
    }
