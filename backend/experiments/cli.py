"""`python -m backend experiment`: what the batching page runs, on any KVScope engine, without a browser."""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from backend import key_file
from backend.experiments import ExperimentError, Result, chunked, race, sweep, waves
from backend.experiments.follow import follow
from backend.sources.background import Background
from backend.sources.remote import EngineClient
from backend.workload.arrivals import LoadError
from backend.workload.target import address

app = typer.Typer(add_completion=False)


class Name(StrEnum):
    sweep = "sweep"
    waves = "waves"
    chunked = "chunked"
    race = "race"


RUNS = {
    Name.sweep: (sweep.Settings, sweep.sweep),
    Name.waves: (waves.Settings, waves.waves),
    Name.chunked: (chunked.Settings, chunked.chunked),
    Name.race: (race.Settings, race.race),
}


@app.command()
def experiment(
    name: Annotated[
        Name, typer.Argument(help="Batch sweep; static against continuous (waves); chunked prefill; race of lanes.")
    ],
    url: Annotated[str, typer.Option(help="A KVScope engine that is idle.")] = "http://127.0.0.1:8000",
    set: Annotated[
        list[str] | None, typer.Option(help="A setting, as name=value; lists with commas. See --settings.")
    ] = None,
    settings: Annotated[bool, typer.Option("--settings", help="List the settings, with defaults.")] = False,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key that the engine wants.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Folder for all tables of the result, one file each.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run an experiment on an idle engine. Its switches are put back afterwards; Ctrl+C keeps what was measured."""
    kind, run = RUNS[name]
    if settings:
        for field in dataclasses.fields(kind):
            typer.echo(f"{field.name}={field.default}")
        return
    background = Background("kvscope-experiment-cli")
    try:
        wanted = parse(kind, set or [])
        key = key_file.read(api_key_file, f"--api-key-file {api_key_file}") if api_key_file else None
        where = address(url)
        client = EngineClient(lambda: where, background, key)
        result = follow(run(client, wanted))
        _tell(result, as_json, csv)
        if not result.complete:
            raise typer.Exit(1)
    except (ExperimentError, LoadError, key_file.BadKey, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        background.close()


def parse(kind: type, given: list[str]) -> Any:
    """Settings out of name=value. Raises ExperimentError that names the setting."""
    hints, changes = get_type_hints(kind), {}
    for entry in given:
        name, equals, text = entry.partition("=")
        if not equals or name not in hints:
            raise ExperimentError(f"no setting '{entry}'; there are {', '.join(hints)}")
        try:
            changes[name] = _value(hints[name], text)
        except ValueError:
            raise ExperimentError(f"{name}: '{text}' is not what it takes, like {getattr(kind(), name)}") from None
    return kind(**changes)


def _value(hint: Any, text: str) -> Any:
    if hint is bool:
        return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else int("x")
    if getattr(hint, "__origin__", None) is tuple:
        return tuple(int(part) for part in text.split(",") if part)
    return hint(text) if hint in (int, float, str) else text


def _tell(result: Result, as_json: bool, folder: Path | None) -> None:
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in {result.name: result.table, **result.tables}.items():
            table.to_csv(folder / f"{name.replace(' ', '_')}.csv", index=False)
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
        return
    typer.echo(result.table.round(3).to_string(index=False))
    for number in result.numbers:
        value = "–" if number.value is None else f"{number.value:,.3g}"
        typer.echo(f"{number.name}: {value} {number.unit} ({number.conditions})")
    if not result.complete:
        typer.echo("- Ended early: this is what was kept.")
    for note in result.notes:
        typer.echo(f"- {note}")
