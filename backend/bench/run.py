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
from backend.bench.workload import Workload
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
    kinds: list[str] = field(default_factory=lambda: ["decode"])  # of workload.KINDS
    options: dict = field(default_factory=dict)  # switches of our engine
    timeout_s: float = 1200.0  # a turn may take this long
    roof_rounds: int = 5  # of one measurement of the roof


def run(settings: Settings, say: Say) -> dict:
    """The whole report as a JSON-able dict. Engines that fail are in `left_out`, with the reason.

    Ctrl-C ends it early, with what was measured; it goes on as KeyboardInterrupt where that is nothing.
    """
    config = json.loads((Path(settings.model) / "config.json").read_text(encoding="utf-8"))
    shape = ModelShape.from_config(config, DTYPE_BYTES[settings.dtype])
    wanted = workload.workloads(
        settings.kinds, settings.concurrency, settings.input_tokens, settings.output_tokens, shape.vocab
    )
    jobs = workload.jobs(wanted, settings.input_tokens, shape.vocab)
    order = {
        "model": settings.model,
        "name": settings.name,
        "dtype": settings.dtype,
        "threads": settings.threads,
        "options": settings.options,
        "jobs": jobs,
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    rounds, ready, left_out = _play(settings, order, wanted, say)
    taking_part = [name for name in settings.peers if name not in left_out]
    report = {
        "started": started,
        "machine": machine.describe(),
        "settings": asdict(settings) | {"model": settings.name},
        "engines": {name: {"title": _title(name, ready[name]), **ready[name]} for name in taking_part},
        "left_out": left_out,
        "load_average": [turn["load_average"] for this in rounds for turn in this["turns"].values()],
        "results": [summarise(rounds, work, shape, taking_part) for work in wanted],
        "ceilings": [this["ceilings"] for this in rounds],
    }
    return report


def _play(settings: Settings, order: dict, wanted: list[Workload], say: Say) -> tuple[list[dict], dict, dict]:
    """(rounds, what each engine says of itself, who is left out and why). Interrupted: whole rounds, or of a first one
    the turns that came to their end; raises KeyboardInterrupt when there are none."""
    rounds, ready, left_out, this = [], {}, {}, {"turns": {}}
    try:
        for number in range(settings.rounds):
            say(f"round {number + 1} of {settings.rounds}: measuring the roof")
            this = {"ceilings": measure_roof(settings), "turns": {}}
            for name in (name for name in settings.peers if name not in left_out):
                title, load = PEERS[name].title, machine.load_average()
                say(f"round {number + 1} of {settings.rounds}: {title}")
                try:
                    turn = take_turn(
                        PEERS[name], order, timeout_s=settings.timeout_s, said=lambda line: say(_progress(line, wanted))
                    )
                except PeerFailed as error:
                    say(f"  left out: {error}")
                    left_out[name] = str(error)
                    continue
                ready[name] = turn.ready
                this["turns"][name] = {"load_average": load, "jobs": turn.jobs}
            rounds.append(this)
    except KeyboardInterrupt:
        if not rounds and not this["turns"]:
            raise
        say("interrupted: what was measured is kept")
        if not rounds:
            rounds.append(this)
            behind = [name for name in settings.peers if name not in this["turns"] and name not in left_out]
            left_out |= dict.fromkeys(behind, "interrupted before its turn had ended")
    return rounds, ready, left_out


def measure_roof(settings: Settings) -> dict:
    """In a process of its own, with the engines' threads; a few seconds. Fewer rounds than the pages' roofs have, which
    stay as they are. Where the CPU has no instructions for the engines' dtype, the roof is what it does in float32:
    bytes are bytes, and nothing multiplies faster."""
    from backend.models.dtype import cpu_has_bf16  # late: a command line is read without torch

    dtype = settings.dtype if settings.dtype == "bfloat16" and cpu_has_bf16() else "float32"
    command = [sys.executable, "-m", "backend.telemetry.cli", "--fresh", "--no-keep", "--json"]
    command += ["--dtype", dtype, "--threads", str(settings.threads), "--rounds", str(settings.roof_rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=settings.timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring the roof failed: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)["ceilings"]


def _title(name: str, ready: dict) -> str:
    return ready["engine"] if PEERS[name].weights else PEERS[name].title


def _progress(line: dict, wanted: list[Workload]) -> str:
    if "ready" in line:
        return "  loaded"
    if line["job"] == "warm-up":
        return "  warmed up"
    work = next(w for w in wanted if w.name == line["job"])
    found = figures.run_of(line["requests"], work.prompt_tokens)
    if work.kind == "prefill":
        return f"  {work.title}: {found.prompt_tok_s:.0f} tok/s of prompt"
    times = f"TTFT {found.ttft_s:.2f} s, TPOT {found.tpot_s * 1e3:.1f} ms"
    return f"  {work.title}: {found.output_tok_s:.1f} tok/s, {times}"


FIGURES = {
    "decode": ("output_tok_s", "ttft_s", "tpot_s", "decode_tok_s"),
    "long": ("output_tok_s", "ttft_s", "tpot_s", "decode_tok_s"),
    "shared": ("output_tok_s", "ttft_s", "tpot_s"),
    "prefill": ("prompt_tok_s", "ttft_s"),
}


def summarise(rounds: list[dict], work: Workload, shape: ModelShape, names: list[str]) -> dict:
    """One workload: each engine's figures with their spread, and its share of what the machine allows.

    Shares are of the roof measured in the same round, so that a slow moment of the machine counts on both sides.
    """
    told = {"workload": work.name, "kind": work.kind, "title": work.title, "at_once": len(work.requests)}
    roofs = [(this["ceilings"]["read"]["value"], this["ceilings"]["matmul"]["value"]) for this in rounds]
    runs = {
        name: [
            figures.run_of(this["turns"][name]["jobs"][work.name]["requests"], work.prompt_tokens) for this in rounds
        ]
        for name in names
    }
    engines = {
        name: {key: _spread([getattr(run, key) for run in found]) for key in FIGURES[work.kind]}
        for name, found in runs.items()
    }
    if work.kind in ("decode", "long"):
        told |= _decode_shares(work, shape, roofs, runs, engines)
        for name in names:
            steps = [step for this in rounds for step in this["turns"][name]["jobs"][work.name]["steps"]]
            engines[name]["decode_step"] = figures.decode_breakdown(steps, len(work.requests))
    else:
        least = [figures.least_s(shape, work, *roof) for roof in roofs]
        told["least_s"] = _spread(least)
        for name, found in runs.items():
            engines[name]["share_of_limit"] = _spread([a / b.whole_s for a, b in zip(least, found, strict=True)])
    for name in names:
        if name != OURS and OURS in names:  # paired, round by round
            main = FIGURES[work.kind][0]
            engines[name]["ours_over_this"] = _spread(
                [getattr(a, main) / getattr(b, main) for a, b in zip(runs[OURS], runs[name], strict=True)]
            )
    answers = {name: [r["tokens"] for r in rounds[0]["turns"][name]["jobs"][work.name]["requests"]] for name in names}
    reference = "generate" if "generate" in names else names[0] if names else ""
    same = {reference: figures.same_answers(answers, reference)} if reference else {}
    return told | {"engines": engines, "same_answers_as": same}


def _decode_shares(work: Workload, shape: ModelShape, roofs: list, runs: dict, engines: dict) -> dict:
    """Adds each engine's shares of the roof to `engines`; returns the roof, in the middle of the answers."""
    batch, first = len(work.requests), work.requests[0]
    context = len(first["tokens"]) + first["output_tokens"] // 2
    limits = [figures.limit_of(shape, batch, context, *roof) for roof in roofs]
    for name, found in runs.items():
        if name in PEERS and PEERS[name].weights == "Q4":
            continue  # reads fewer bytes than the roof is made of
        for key, roof in (("share_of_read_roof", "read_roof_tok_s"), ("share_of_limit", "limit_tok_s")):
            engines[name][key] = _spread(
                [run.decode_tok_s / getattr(limit, roof) for run, limit in zip(found, limits, strict=True)]
            )
    return {
        "step_bytes": limits[0].bytes,
        "step_flops": limits[0].flops,
        "read_roof_tok_s": _spread([limit.read_roof_tok_s for limit in limits]),
        "limit_tok_s": _spread([limit.limit_tok_s for limit in limits]),
        "bound_by": limits[0].bound_by,
    }


def _spread(values: list[float]) -> dict:
    return figures.Spread.of(values).as_dict()
