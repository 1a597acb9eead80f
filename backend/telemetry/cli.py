"""`python -m backend measure`: the measured ceilings of this machine, and what its sensors say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from backend.telemetry import ceiling, peaks, report
from backend.telemetry.torch_device import used

app = typer.Typer(help="Measured ceilings and sensors of this machine.")


@app.command("measure")
def measure(
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; empty: the GPU when there is one.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; empty: what this machine serves with.")] = "",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as torch chooses.", min=0)] = 0,
    rounds: Annotated[int, typer.Option(help="Rounds; the median is stated, with the slowest and fastest.", min=1)] = 7,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever was kept.")] = False,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Use what was measured from now on.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How fast this machine copies, reads weights and multiplies: the roofs of the roofline. Then every sensor.

    Takes a few seconds and uses every thread; run it while nothing else does. The ceilings are kept for this device,
    driver, dtype, thread count and torch version, and used from then on. A sensor without a value says why.
    KVSCOPE_NVML_LIBRARY=/path/to/lib.so reads GPU sensors from another library than the driver's (called fake).
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device != "cpu" and torch.cuda.is_bf16_supported() else "float32")
    try:
        found = None if fresh else ceiling.cached(device, dtype)
        kept = found is not None
        if found is None:
            found = ceiling.measure(device, dtype, rounds=rounds, progress=_show_progress)
            if keep:
                ceiling.keep(found)
    except ValueError as error:
        typer.echo(f"measure: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"measure: measured, but could not be kept: {error}", err=True)
    seen = report.look(used(torch.device(device)))
    ours = next((d for d in seen.devices.devices if d.used), None)
    found = msgspec.structs.replace(found, beside=peaks.beside(found, ours))
    if as_json:
        typer.echo(msgspec.json.encode({"ceilings": found, "sensors": seen}).decode())
        return
    for line in (*_ceilings(found, kept), *report.lines(seen)):
        typer.echo(line)


def _ceilings(found: ceiling.Ceilings, kept: bool) -> Iterator[str]:
    where = found.conditions
    threads_in_words = f"{where.threads} threads · " if where.threads else ""
    yield f"{where.device_name} · {where.device} · {where.dtype} · {threads_in_words}torch {where.torch}"
    for title, value in (("copy", found.copy), ("read weights", found.read), ("multiply", found.matmul)):
        scale, unit = 1e9, "GB/s" if value.unit == "B/s" else "GFLOP/s"
        yield (
            f"  {title:12} {value.value / scale:8.1f} {unit:8} ({value.low / scale:.1f} – {value.high / scale:.1f}, "
            f"measured, {value.rounds} rounds; {value.way})"
        )
    for peak in found.beside:
        unit = "GB/s" if peak.unit == "B/s" else "GFLOP/s"
        yield f"  {peak.kind:12} {peak.value / 1e9:8.1f} {unit:8} ({peak.source}){f'; {peak.note}' * bool(peak.note)}"
    yield f"  ridge        {found.matmul.value / found.read.value:8.1f} FLOP/byte"
    when = f"{'kept from' if kept else 'measured'} {where.date}, load average {where.load_average:.1f}"
    yield f"  {when}; {where.working_set_bytes / 2**20:.0f} MiB of weights a round"
    yield from (f"  note: {note}" for note in where.notes)


def _show_progress(share: float, text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{share:4.0%} {text}" + ("\r\033[K" if share >= 1 else ""), end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
