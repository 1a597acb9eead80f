"""`python -m backend load`: an open-loop load on any OpenAI-compatible server, without a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from backend import key_file
from backend.workload.arrivals import Arrivals, LoadError
from backend.workload.lengths import Lengths

app = typer.Typer(help="Open-loop load on any OpenAI-compatible server.")


@app.command("load")
def command(
    url: Annotated[str, typer.Option(help="Of the server, such as http://127.0.0.1:8000.")],
    rate: Annotated[str, typer.Option(help="Requests/s, comma-separated for a sweep.")] = "1,2,4",
    requests: Annotated[int, typer.Option(help="Requests at each rate.")] = 60,
    min_seconds: Annotated[float, typer.Option(help="More requests at rates at which they would take less.")] = 15.0,
    arrivals: Annotated[Arrivals, typer.Option(help="Gaps between arrivals.")] = Arrivals.poisson,
    burstiness: Annotated[float, typer.Option(help="Shape of bursty gaps: 1 is Poisson, less is burstier.")] = 0.25,
    lengths: Annotated[Lengths, typer.Option(help="sharegpt: people's first questions, cut at the two below.")] = (
        Lengths.fixed
    ),
    input_tokens: Annotated[int, typer.Option(help="Prompt length.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Answer length; end-of-sequence is ignored.")] = 64,
    trace: Annotated[
        Path | None, typer.Option(help="CSV or JSON lines with time_s, input_tokens, output_tokens; instead of rates.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Of the trace: 2 plays it twice as fast.")] = 1.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="For goodput.", min=0)] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="For goodput.", min=0)] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="For goodput.", min=0)] = None,
    model: Annotated[str, typer.Option(help="By default the first that the server names.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.")] = False,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key that the server wants.")] = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    no_ignore_eos: Annotated[
        bool, typer.Option("--no-ignore-eos", help="For servers that refuse it: answers may be shorter.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed sends the same lengths at the same times.")] = 0,
    whole: Annotated[bool, typer.Option("--whole", help="Finish the sweep even when it is over-saturated.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, each request too.")] = False,
) -> None:
    """How fast does it answer at each rate, where is the knee, and does it keep up?

    Requests go out when they are due, whether or not the ones before were answered. Ctrl-C ends it and prints what was
    measured so far.
    """
    # What needs pandas is imported late: the engine's process lists this command too.
    from backend.experiments import ExperimentError, load_text
    from backend.experiments.follow import Nothing, follow
    from backend.experiments.latency import Slo, goodput
    from backend.experiments.load import Settings, sweep
    from backend.workload import trace as traces
    from backend.workload.target import find

    extra: dict[str, Any] = {"temperature": temperature} | ({} if no_ignore_eos else {"ignore_eos": True})
    try:
        settings = Settings(
            rates=_rates(rate),
            requests=requests,
            min_s=min_seconds,
            arrivals=arrivals,
            burstiness=burstiness,
            lengths=lengths,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            trace=traces.read(trace, speed=speed) if trace else (),
            seed=seed,
            stop_when_saturated=not whole,
            extra=extra,
        )
        settings.runs()
        target = find(url, headers=_headers(api_key_file), model=model, endpoint="chat" if chat else None, extra=extra)
        result = follow(sweep(target, settings))
        if result.table.empty:
            raise Nothing("ended before anything was measured")
    except (LoadError, ExperimentError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, Nothing) else 2) from None
    slo = Slo(*(limit / 1000 if limit is not None else None for limit in (slo_ttft_ms, slo_tpot_ms, slo_e2e_ms)))
    good = goodput(result.table, result.tables["requests"], slo) if slo.given else None
    typer.echo(
        json.dumps(load_text.as_json(result, good), allow_nan=False) if as_json else load_text.render(result, good)
    )
    if not any(result.table["ok"]):
        raise typer.Exit(1)


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise LoadError(f"--rate '{text}': give numbers, such as 1,2,4") from None


def _headers(path: Path | None) -> dict[str, str]:
    try:
        return {"authorization": f"Bearer {key_file.read(path, f'--api-key-file {path}')}"} if path else {}
    except key_file.BadKey as error:
        raise LoadError(str(error)) from None


if __name__ == "__main__":
    app()
