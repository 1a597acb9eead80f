"""`python -m backend bench`: our engine beside its peers and the roof of this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from backend.bench import run as bench
from backend.bench.peers import PEERS, ROOT
from backend.bench.table import render
from backend.bench.workload import KINDS

app = typer.Typer(help="The engine against its peers.")


@app.command("bench")
def command(
    model: Annotated[str, typer.Option(help="A catalogue name or a local folder with config.json.")] = "smollm2-135m",
    peers: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(PEERS)}.")] = ",".join(PEERS),
    workloads: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {words}" for name, words in KINDS.items()) + ".")
    ] = ",".join(KINDS),
    concurrency: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,8,32",
    repeats: Annotated[int, typer.Option(help="Rounds; each engine takes one turn in each.", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, for all engines.")] = "float32",
    threads: Annotated[int, typer.Option(help="CPU threads of every engine; 0: one a core.", min=0)] = 0,
    input_tokens: Annotated[int, typer.Option(help="Prompt length.", min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(help="Answer length; end-of-sequence is ignored.", min=2)] = 128,
    switch: Annotated[list[str] | None, typer.Option(help="A switch of our engine, NAME=VALUE; repeatable.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One round of decode, 64 in / 32 out, peers of this environment: a look.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to keep the report; default benchmarks/results/.")] = None,
) -> None:
    """Output tok/s, TTFT and TPOT of this engine and its peers, same model, prompts, dtype and threads, in one run.

    Every engine runs in a fresh process, the engines take turns, and the roof (the measured speed of reading weights)
    is measured again in each round, so that "% of the roof" stands beside every figure. A peer that is not installed is
    left out and said so: benchmarks/peers/install.py puts vLLM and llama.cpp into environments of their own.
    Ctrl-C ends it and keeps what was measured.
    """
    names = [name.strip() for name in peers.split(",") if name.strip()]
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        raise typer.BadParameter(f"{', '.join(unknown) or 'none'}; known: {', '.join(PEERS)}", param_hint="--peers")
    kinds = [name.strip() for name in workloads.split(",") if name.strip()]
    if not kinds or set(kinds) - set(KINDS):
        raise typer.BadParameter(f"'{workloads}'; known: {', '.join(KINDS)}", param_hint="--workloads")
    if dtype not in bench.DTYPE_BYTES:
        raise typer.BadParameter(f"{dtype}; known: {', '.join(bench.DTYPE_BYTES)}", param_hint="--dtype")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quick:
        repeats, input_tokens, output_tokens, kinds = 1, 64, 32, ["decode"]
        names = [name for name in names if not PEERS[name].environment]
    folder = _folder(model)
    settings = bench.Settings(
        model=str(folder),
        name=model if model != str(folder) else folder.name,
        dtype=dtype,
        threads=threads or cores,
        peers=names,
        concurrency=_numbers(concurrency),
        rounds=repeats,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        kinds=kinds,
        options=_switches(switch or []),
        roof_rounds=1 if quick else 5,
    )
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engine that is at work ends with us
    try:
        report = bench.run(settings, lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    if not report["engines"]:
        typer.echo("no engine could run: " + "; ".join(report["left_out"].values()), err=True)
        raise typer.Exit(1)
    typer.echo(json.dumps(report) if as_json else render(report))
    kept = out or ROOT / "benchmarks" / "results" / f"bench-{datetime.now():%Y%m%d-%H%M%S}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    typer.echo(f"kept in {kept}", err=True)


def _folder(model: str) -> Path:
    if (Path(model) / "config.json").is_file():
        return Path(model).resolve()
    from backend.models.errors import ModelError
    from backend.models.find import path

    try:
        return Path(path(model))
    except ModelError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"'{text}': give positive whole numbers, such as 1,8,32", param_hint="--concurrency")
    return numbers


def _switches(pairs: list[str]) -> dict:
    switches = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found:
            raise typer.BadParameter(f"'{pair}': write NAME=VALUE", param_hint="--switch")
        try:
            switches[name] = json.loads(value)
        except json.JSONDecodeError:
            switches[name] = value
    return switches


if __name__ == "__main__":
    app()
