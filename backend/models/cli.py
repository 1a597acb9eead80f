"""`python -m backend models …`"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from backend.models import find
from backend.models.catalogue import CATALOGUE
from backend.models.errors import ModelError

app = typer.Typer(no_args_is_help=True, help="Find, fetch and check models.")

Name = Annotated[str, typer.Argument(help="Catalogue name, folder, GGUF file, or Hugging Face id.")]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable results.")]


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """Models that come by name. Folders, GGUF files and Hugging Face ids work everywhere a name does."""
    rows = []
    for entry in CATALOGUE.values():
        folder = find.cached(entry)
        rows.append(
            {
                "name": entry.name,
                "title": entry.title,
                "parameters": entry.parameters,
                "context_tokens": entry.context_tokens,
                "download_bytes": entry.download_bytes,
                "licence": entry.licence,
                "folder": str(folder) if folder else None,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        where = row["folder"] or f"not fetched yet ({row['download_bytes'] / 1e6:.0f} MB)"
        typer.echo(
            f"{row['name']}  {row['title']}, {row['parameters'] / 1e6:.0f}M parameters, "
            f"{row['context_tokens']:,} tokens of context, {row['licence']}\n    {where}"
        )


@app.command("path")
def print_path(name: Name) -> None:
    """Fetch and convert the model if needed, then print its local folder."""
    try:
        typer.echo(find.path(name))
    except ModelError as error:
        _fail(error)


@app.command("check")
def check(
    name: Name,
    weights: Annotated[str, typer.Option(help="real, or random (any config.json, nothing to download).")] = "real",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Json = False,
) -> None:
    """Load the model, gate it, compare paged with ordinary attention, and print what was found."""
    import msgspec

    from backend.engine.self_check import self_check
    from backend.models.loader import load

    started = time.perf_counter()
    try:
        loaded = load(name, weights=weights, dtype=dtype, device=device)
        seconds = time.perf_counter() - started
        self_check(loaded)
    except ModelError as error:
        _fail(error)
    info = loaded.info()
    if as_json:
        facts = msgspec.to_builtins(info)
        facts |= {"load_s": seconds, "self_check": "passed", "stop_ids": sorted(loaded.stop_ids)}
        typer.echo(json.dumps(facts))
        return
    typer.echo(
        f"{info.name}: {info.family}, {info.parameters:,} parameters, {info.layers} layers, {info.heads} heads, "
        f"{info.kv_heads} KV heads of {info.head_dim}, vocabulary {info.vocab:,}\n"
        f"weights {info.weight_bytes / 2**30:.2f} GiB in {info.dtype} on {loaded.device}, "
        f"{info.step_weight_bytes / 2**30:.2f} GiB read a step; K and V {info.kv_bytes_per_token:,} bytes a token\n"
        f"up to {info.max_model_len:,} tokens; stops at {sorted(loaded.stop_ids)}; "
        f"chat template: {'yes' if info.chat_template else 'no'}; loaded in {seconds:.1f} s\n"
        "self-check passed: paged attention says what the model's own attention says"
    )
    for note in info.notes:
        typer.echo(f"- {note}")


def _fail(error: ModelError) -> None:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
