"""`python -m backend …`: the engine's commands. Each part brings its own, and is imported when it is asked for."""

from __future__ import annotations

import importlib
import json
import logging
import os
import stat
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import psutil
import typer
from typer.core import TyperGroup
from typer.main import get_group

from backend.cpu import SPIN_COUNT
from backend.server.listen import bind, is_loopback

if TYPE_CHECKING:
    from backend.server.kv_publish import KvPublisher

PARTS = {
    "models": "backend.models.cli",
    "measure": "backend.telemetry.cli",
    "bench": "backend.bench.cli",
    "experiment": "backend.experiments.cli",
    "load": "backend.workload.cli",
    "attach": "backend.sources.attach.cli",
    "plan": "backend.planner.cli",
}


class Commands(TyperGroup):
    """A part with one command is that command, one with several a group of them. None waits for what another one needs:
    tables, HTTP clients and the like take the better part of a second."""

    def list_commands(self, ctx) -> list[str]:
        return [*dict.fromkeys([*super().list_commands(ctx), *PARTS])]

    def get_command(self, ctx, cmd_name: str):
        if cmd_name in PARTS and cmd_name not in self.commands:
            part = get_group(importlib.import_module(PARTS[cmd_name]).app)
            part.name = cmd_name
            self.commands[cmd_name] = part.commands.get(cmd_name, part)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False)


class Weights(StrEnum):
    real = "real"
    random = "random"


class Policy(StrEnum):
    continuous = "continuous"
    static = "static"


class Preemption(StrEnum):
    recompute = "recompute"
    swap = "swap"


class Allocator(StrEnum):
    paged = "paged"
    reserve = "reserve"
    first_fit = "first-fit"


class Attention(StrEnum):
    auto = "auto"
    native = "native"
    triton = "triton"
    reference = "reference"


class Linear(StrEnum):
    auto = "auto"
    packed = "packed"
    plain = "plain"


class Efficiency(StrEnum):
    bound = "bound"
    fast = "fast"
    typical = "typical"
    slow = "slow"


class Fusion(StrEnum):
    auto = "auto"
    fused = "fused"
    plain = "plain"


@app.callback()
def main() -> None:
    """KVScope's engine: serve a model, look after models, measure."""


@app.command()
def serve(
    model: Annotated[
        str, typer.Option(help="Catalogue name, Hugging Face id, local folder or GGUF file.")
    ] = "smollm2-135m",
    weights: Annotated[
        Weights, typer.Option(help="random: any config.json at full size, without a download.")
    ] = Weights.real,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16; by default what the device does best.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; by default a GPU when there is one.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs --api-key-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one, named on stdout.")] = 8000,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a KV block.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks; by default what fits the free memory.")
    ] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Requests in the batch, at most.")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="Tokens computed in one step, at most.")] = None,
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens of one request in a step, at most.")
    ] = None,
    policy: Annotated[Policy | None, typer.Option(help="Batching.")] = None,
    allocator: Annotated[
        Allocator | None,
        typer.Option(
            help="How KV memory is given out: in blocks; in one piece for the model's longest answer; in one piece for "
            "what was asked. The last two need --no-prefix-cache."
        ),
    ] = None,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Compute every prompt anew.")] = False,
    no_kv_cache: Annotated[
        bool,
        typer.Option(
            "--no-kv-cache",
            help="Compute all tokens anew in every step. Needs --no-prefix-cache, and a token budget for it.",
        ),
    ] = False,
    preemption: Annotated[
        Preemption | None,
        typer.Option(help="When blocks run out: compute again later, or keep K and V in host memory."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Context limit, below the model's own.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads that compute; 0: one a core.")] = 0,
    attention: Annotated[
        Attention,
        typer.Option(help="Decode attention: compiled here (CPU), Triton's (GPU), or torch's; auto: the fastest."),
    ] = Attention.auto,
    linear: Annotated[
        Linear, typer.Option(help="Linear layers: weights packed for this CPU, or torch's; auto: packed if built.")
    ] = Linear.auto,
    fusion: Annotated[
        Fusion, typer.Option(help="Norms, gated MLPs and projections: one compiled operation each, or the model's own.")
    ] = Fusion.auto,
    on: Annotated[
        str,
        typer.Option(
            help="An accelerator of the catalogue (h100-sxm …): nothing is loaded, step times come from the planner."
        ),
    ] = "",
    tp: Annotated[int, typer.Option(min=1, max=1024, help="With --on: how many of them share every layer.")] = 1,
    kv: Annotated[str, typer.Option(help="With --on: how keys and values are stored: bf16, fp8, int8 …")] = "bf16",
    efficiency: Annotated[
        Efficiency, typer.Option(help="With --on: where in the band of measured servers; bound: at the limit itself.")
    ] = Efficiency.typical,
    speed: Annotated[
        float, typer.Option(min=0.01, max=100, help="With --on: modelled time passes so many times as fast.")
    ] = 1.0,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with a key that clients must send as Bearer token.")
    ] = None,
    kv_events: Annotated[
        str, typer.Option(help="Publish KV cache events as vLLM does, from this address: tcp://127.0.0.1:5557.")
    ] = "",
    kv_events_replay: Annotated[
        str, typer.Option(help="With --kv-events: where to ask for past ones, tcp://127.0.0.1:5558.")
    ] = "",
    expose_kv_events: Annotated[
        bool,
        typer.Option("--expose-kv-events", help="Let other machines listen: there is no key, and prompts are in them."),
    ] = False,
    no_compile: Annotated[
        bool,
        typer.Option(
            "--no-compile",
            help="Torch's own kernels only, where --attention, --linear or --fusion do not name others.",
        ),
    ] = False,
    no_cuda_graphs: Annotated[
        bool, typer.Option("--no-cuda-graphs", help="On a GPU: launch each kernel of a decode step by itself.")
    ] = False,
    die_with_parent: Annotated[bool, typer.Option("--die-with-parent", help="End when stdin closes.")] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API, Prometheus metrics, and the event stream that the dashboard draws.

    The first line on stdout is JSON and names the port. The server answers at once; /health says 503 until the model
    is loaded. Logs go to stderr.
    """
    _set_threads(threads)
    loopback = is_loopback(host)
    api_key = _read_key(api_key_file) if api_key_file else None
    if not loopback and api_key is None:
        _refuse(
            f"--host {host} can be reached from other machines: whoever can, uses the model and reads prompts. "
            "Give --api-key-file, or keep the default 127.0.0.1 and use a tunnel (ssh -L)."
        )
    publisher = _kv_publisher(kv_events, kv_events_replay, exposed=expose_kv_events) if kv_events else None
    try:
        listening = bind(host, port)
    except OSError as error:
        _refuse(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Give another --port; 0 takes a free one.",
            1,
        )
    print(json.dumps({"kvscope": "listening", "port": listening.getsockname()[1], "pid": os.getpid()}), flush=True)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    switches = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_running": max_running,
        "token_budget": token_budget,
        "chunk_size": chunk_size,
        "policy": policy and policy.value,
        "allocator": allocator and allocator.value,
        "preemption": preemption and preemption.value,
        "prefix_cache": False if no_prefix_cache else None,
        "kv_cache": False if no_kv_cache else None,
        "max_model_len": max_model_len,
    }
    from backend.server import serve as serving  # late: the port answers while this is imported

    wanted = serving.Wanted(
        model=model,
        weights=weights.value,
        dtype=dtype,
        device=device,
        threads=_threads(threads),
        attention=_kernel(attention, Attention.reference, no_compile),
        linear=_kernel(linear, Linear.plain, no_compile),
        fusion=_kernel(fusion, Fusion.plain, no_compile),
        cuda_graphs=not no_cuda_graphs,
        on=on,
        modelled={"tp": tp, "kv": kv, "efficiency": efficiency.value, "speed": speed},
        switches={name: value for name, value in switches.items() if value is not None},
    )
    serving.run(listening, wanted, api_key=api_key, loopback=loopback, die_with_parent=die_with_parent, kv=publisher)


def _kernel(asked: StrEnum, plain: StrEnum, no_compile: bool) -> str:
    return plain.value if no_compile and asked == "auto" else asked.value


def _kv_publisher(endpoint: str, replay: str, *, exposed: bool) -> KvPublisher:
    from backend.server.kv_publish import KvPublisher
    from backend.server.listen import is_loopback_endpoint

    for address in filter(None, (endpoint, replay)):
        if not exposed and not is_loopback_endpoint(address):
            _refuse(
                f"--kv-events {address}: other machines could read the prompts' tokens, and there is no key for it. "
                "Name 127.0.0.1, or say --expose-kv-events."
            )
    try:
        return KvPublisher(endpoint, replay)
    except OSError as error:
        _refuse(
            f"KV events cannot be published from {error.strerror}. Give another address, like tcp://127.0.0.1:0.", 1
        )


def _threads(wanted: int) -> int:
    """Unless told otherwise, one for each core that this process may use: a second thread on a core brings nothing."""
    if wanted:
        return wanted
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def _set_threads(wanted: int) -> None:
    """OpenMP's size, and threads that soon sleep: spinning ones would take the cores from the UI."""
    os.environ["OMP_NUM_THREADS"] = str(_threads(wanted))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        _refuse(f"--api-key-file {path} cannot be read: {error}")
    if len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key:
        _refuse(f"--api-key-file {path} must hold one key of at least 16 printable ASCII characters without spaces")
    if mode & (stat.S_IRGRP | stat.S_IROTH) and os.name == "posix":
        typer.echo(f"warning: {path} can be read by other users of this machine (chmod 600 {path})", err=True)
    return key


def _refuse(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
