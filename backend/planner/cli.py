"""`python -m backend plan`: the planner on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from backend.planner import accelerators, catalogue, plan
from backend.planner.arch import Architecture
from backend.planner.capacity import Reserve
from backend.planner.config import parse
from backend.planner.errors import PlannerError
from backend.planner.formats import kv_format, weight_format
from backend.planner.plan import Plan
from backend.planner.results import Result
from backend.planner.words import result_words

app = typer.Typer()

SHOWN = {
    "checkpoint": "checkpoint",
    "weights_per_gpu": "weights on each GPU",
    "memory": "left for KV on each GPU",
    "kv_per_token": "KV of a token",
    "kv_per_sequence": "KV of a sequence",
    "concurrency": "sequences at once",
    "step": "decode step, at least",
    "ceiling": "decode ceiling",
    "rate": "decode rate",
    "ttft": "TTFT, at least",
    "ttft_estimate": "TTFT without a queue",
    "ridge": "ridge",
    "crossover": "batch that computes longer than it reads",
    "cost": "output tokens",
    "cost_input": "input tokens",
    "cost_cached": "cached input tokens",
    "joules": "energy",
    "speculation": "gain of speculation",
    "at_work": "requests at work",
}


@app.command("plan")
def plan_command(
    model: Annotated[str | None, typer.Option(help="A model of the catalogue (plan --list shows all).")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json of your own instead.")] = None,
    gpu: Annotated[str, typer.Option(help="An accelerator of the catalogue.")] = "h100-sxm",
    tp: Annotated[int, typer.Option(help="GPUs that share every layer.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    weights: Annotated[str, typer.Option(help="bf16, fp8, fp8-block, int8, mxfp4, nvfp4, int4-g128, q4_k_m.")] = "bf16",
    kv: Annotated[str, typer.Option(help="bf16, fp8, int8, int4-g64, fp8_ds_mla.")] = "bf16",
    context: Annotated[int, typer.Option(help="Tokens of a sequence, prompt and answer.")] = 8192,
    output: Annotated[int, typer.Option(help="Tokens of it that are generated.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 32,
    shared_prefix: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
    utilisation: Annotated[float, typer.Option(help="Share of the memory that the engine may use.")] = 0.9,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16,
    price: Annotated[float, typer.Option(help="USD for a GPU-hour.")] = 2.0,
    arrivals: Annotated[float, typer.Option(help="Requests a second (0: not asked).")] = 0.0,
    accept: Annotated[float, typer.Option(help="Share of drafted tokens accepted (0: no speculation).")] = 0.0,
    gamma: Annotated[int, typer.Option(help="Tokens drafted in a step.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, with the working, as JSON.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="Models and accelerators, and nothing else.")] = False,
) -> None:
    """Which model fits which GPU, how fast at best, at what cost: arithmetic, no model and no GPU needed.

    A bound is what no machine with these data-sheet rates can beat; an estimate is a bound times what servers reach.
    """
    try:
        if list_all:
            _list()
            return
        arch, name = _model(model, config)
        setup = plan.Setup(
            name=name,
            arch=arch,
            accelerator=accelerators.find(gpu),
            weights=weight_format(weights),
            kv=kv_format(kv),
            tp=tp,
            pp=pp,
            context=context,
            output=output,
            batch=batch,
            shared_prefix=shared_prefix,
            usd_per_gpu_hour=price,
            arrivals_per_s=arrivals,
            accept=accept,
            gamma=gamma,
            reserve=Reserve(utilisation=utilisation, block_size=block_size),
        )
        made = plan.make(setup)
    except PlannerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(json.dumps(as_dict(made), indent=1) if as_json else _table(made))


def _model(model: str | None, config: Path | None) -> tuple[Architecture, str]:
    if (model is None) == (config is None):
        raise PlannerError("give either --model or --config")
    if config is not None:
        return parse(catalogue.load_json(config)), str(config)
    row = catalogue.find(model)
    return row.architecture, row.name


def as_dict(made: Plan) -> dict:
    setup = made.setup
    return {
        "model": setup.name,
        "accelerator": {
            "key": setup.accelerator.key,
            "name": setup.accelerator.name,
            "kind": setup.accelerator.kind,
            "source": setup.accelerator.source,
            "verified": setup.accelerator.verified,
        },
        "tp": setup.tp,
        "pp": setup.pp,
        "weights": setup.weights.name,
        "kv": setup.kv.name,
        "context": setup.context,
        "output": setup.output,
        "batch": setup.batch,
        "running": made.running,
        "fits": made.fits,
        "notes": list(made.notes),
        "results": {name: result.as_dict() for name, result in made.results.items()},
    }


def _table(made: Plan) -> str:
    setup = made.setup
    head = (
        f"{setup.name} ({setup.weights.name}, KV {setup.kv.name}) on {setup.gpus} × {setup.accelerator.name}, "
        f"{setup.context:,} tokens, batch {made.running:,}"
    )
    rows = [(label, made.results[name]) for name, label in SHOWN.items() if name in made.results]
    lines = [
        f"{label:42}{result_words(result):>24}  {_range(result)}{result.kind}{_why(result)}" for label, result in rows
    ]
    return "\n".join([head, "", *lines, *(f"note: {note}" for note in made.notes)])


def _range(result: Result) -> str:
    if result.low is None:
        return ""
    return f"({result_words(result, result.low)} … {result_words(result, result.high)}) "


def _why(result: Result) -> str:
    return f": {result.note}" if result.value is None else ""


def _list() -> None:
    for row in catalogue.models().values():
        typer.echo(f"model        {row.key:28}{row.architecture.parameters / 1e9:10,.2f} B parameters")
    for part in accelerators.load().values():
        size = f"{part.memory_bytes / 2**30:6,.0f} GiB"
        typer.echo(f"accelerator  {part.key:28}{size} {part.bandwidth_bytes_per_s / 1e9:8,.0f} GB/s")
