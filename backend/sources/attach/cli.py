"""`python -m backend attach`: what a server that runs elsewhere tells, without a page."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from backend.sources.attach.endpoints import FleetError, read
from backend.sources.attach.target import TargetConfig, Unreachable

if TYPE_CHECKING:  # what needs httpx is imported late: every command lists this one
    from backend.events import Value
    from backend.sources.attach.detect import Found
    from backend.sources.attach.fleet import Fleet
    from backend.sources.attach.meter import Reading

app = typer.Typer(help="What a server that runs elsewhere tells.")

# column, canonical name, unit, factor
COLUMNS = (
    ("running", "running", "", 1),
    ("waiting", "waiting", "", 1),
    ("KV", "kv_usage", " %", 100),
    ("hits", "hit_rate", " %", 100),
    ("in tok/s", "prompt_tokens_per_s", "", 1),
    ("out tok/s", "output_tokens_per_s", "", 1),
    ("TTFT p50", "ttft_p50_s", " ms", 1000),
    ("TTFT p95", "ttft_p95_s", " ms", 1000),
    ("TPOT p50", "tpot_p50_s", " ms", 1000),
    ("preempted", "preemptions", "", 1),
)
WIDTH = 10
ABSENT = "–"


@app.command("attach")
def command(
    url: Annotated[str, typer.Argument(help="Of the server, such as http://127.0.0.1:8000.")] = "",
    fleet: Annotated[
        Path | None, typer.Option(help="File with one server a line; 'dns+http://name:port' for all behind a name.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key that the server wants.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Authority that signed its certificate.")] = None,
    insecure_tls: Annotated[bool, typer.Option("--insecure-tls", help="Take any certificate.")] = False,
    metrics_path: Annotated[str, typer.Option(help="By default /metrics, then /prometheus/metrics.")] = "",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two readings.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Readings, then end; 0: until Ctrl-C.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """What is at an address, what can be shown of it and what would turn on the rest; then its readings, live."""
    if bool(url) == bool(fleet):
        _refuse("give the address of a server, or --fleet with a file of them")
    try:
        if fleet:
            _follow_fleet(fleet, interval, count, as_json)
        else:
            config = TargetConfig(
                url=url,
                key_file=str(api_key_file or ""),
                ca_file=str(ca_file or ""),
                insecure_tls=insecure_tls,
                metrics_path=metrics_path,
                interval_s=interval,
            )
            asyncio.run(_follow(config, count, as_json))
    except (Unreachable, FleetError) as error:
        _refuse(str(error), 1)
    except KeyboardInterrupt:
        pass


async def _follow(config: TargetConfig, count: int, as_json: bool) -> None:
    """Raises Unreachable when it cannot be found out what is there; later failures are lines of their own."""
    from backend.sources.attach.scraper import Scraper

    scraper = Scraper(config)
    try:
        found = await scraper.probe()
        _line({"found": found}) if as_json else print(_about(found))
        done = 0
        while not count or done < count:
            pause = await scraper.attempt()
            done += 1
            reading = scraper.reading
            if as_json:
                _line({"t": time.time(), "state": scraper.state, "message": scraper.message, **_told(reading)})
            elif scraper.state != "live":
                print(f"{scraper.state}: {scraper.message}", flush=True)
            else:
                if done % 20 == 1:
                    print(_head())
                print(_row(reading.values), flush=True)
            if not count or done < count:
                await asyncio.sleep(pause)
    finally:
        await scraper.close()


def _follow_fleet(path: Path, interval: float, count: int, as_json: bool) -> None:
    from backend.sources.attach.fleet import Fleet

    fleet = Fleet(read(path))
    try:
        for _ in range(count) if count else iter(int, 1):
            time.sleep(interval)
            if as_json:
                _line({"t": time.time(), "rows": fleet.rows(), "sums": fleet.sums()})
            else:
                print("\n".join(_table(fleet)), flush=True)
    finally:
        fleet.close()


def _told(reading: Reading | None) -> dict:
    if reading is None:
        return {}
    names = ("values", "by_engine", "window_s", "scrape_s", "restarts", "problems")
    return {name: getattr(reading, name) for name in names}


def _about(found: Found) -> str:
    lines = [f"{found.title} {found.version}".strip() + f" at {found.base_url}"]
    lines += [f"model     {found.model}"] if found.model else []
    lines += [f"metrics   {found.metrics_url}"] if found.metrics_url else []
    lines += [f"KV events {endpoint.url}" for endpoint in found.kv_endpoints]
    lines += ["", "what can be shown:"]
    for view in found.capabilities:
        flag = f"; {view.flag} turns it on" if view.flag and view.quality == "none" else ""
        lines.append(f"  {view.view:14} {view.quality:10} {view.why}{flag}".rstrip())
    lines += ["", *(f"! {problem}" for problem in found.problems), ""] if found.problems else [""]
    return "\n".join(lines)


def _head() -> str:
    return " ".join(f"{name:>{WIDTH}}" for name, *_ in COLUMNS)


def _row(values: Mapping[str, Value]) -> str:
    return " ".join(f"{text:>{WIDTH}}" for text in _cells(values))


def _cells(values: Mapping[str, Value]) -> Iterator[str]:
    for _, name, unit, factor in COLUMNS:
        told = values.get(name)
        if told is None or told.value is None:
            yield ABSENT
            continue
        above = ">" if told.low is not None and told.high is None else ""
        yield f"{above}{told.value * factor:.4g}{unit}"


def _table(fleet: Fleet) -> Iterator[str]:
    rows, sums = fleet.rows(), fleet.sums()
    width = max((len(row.name) for row in rows), default=0)
    states = ", ".join(f"{count} {state}" for state, count in sums.states.items() if count)
    usage = f", KV {100 * sums.kv_usage.value:.1f} %" if sums.kv_usage else ""
    totals = ", ".join(
        f"{sums.totals[name].value:.4g} {name}" for name in ("running", "waiting") if name in sums.totals
    )
    yield f"{sums.replicas} replicas: {states}{'; ' + totals if totals else ''}{usage}"
    yield f"{'':{width}} {'state':8} {_head()}"
    for row in rows:
        said = _row(row.values) if row.state == "live" else row.message
        yield f"{row.name:{width}} {row.state:8} {said}"
    yield ""


def _line(told: object) -> None:
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    sys.stdout.flush()


def _refuse(message: str, code: int = 2) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
