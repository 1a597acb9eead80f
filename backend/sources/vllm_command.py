"""The command that serves a model on vLLM so that all of it can be watched: here, in docker, or on several machines.

Flags as of vLLM 0.32 (`vllm/engine/arg_utils.py`, `vllm/config/kv_events.py`).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backend.cpu import has_bf16

VLLM = "KVSCOPE_VLLM"  # path of the `vllm` program, when it is not on PATH
IMAGE = "vllm/vllm-openai:latest"
CPU_IMAGE = "vllm/vllm-openai-cpu:latest"
PORT = 8000
EVENTS_PORT = 5557  # rank r of data parallelism publishes on port + r
TOPIC = "kv-events"
CPU_BLOCK_SIZE = 32  # vLLM's own default on a CPU is 128: too coarse to see a prefix being shared
CPU_KV_GIB = 1
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


class LaunchError(Exception):
    """It cannot be started like this; plain words."""


@dataclass(frozen=True)
class Options:
    """What to serve and how. None and "": vLLM's own default, or on a CPU ours."""

    model: str  # folder, or Hugging Face id
    name: str = ""  # under which clients ask for it
    dtype: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    gpu_memory: float | None = None  # share of the GPU's memory, 0 to 1
    enforce_eager: bool = False  # no compilation: starts sooner, decodes slower
    kv_events: bool = True  # the map of cached blocks, the prefix tree
    mfu: bool = True  # FLOPs and bytes: the roofline
    extra: str = ""  # further flags, as in a shell


def find(environ: Mapping[str, str] = os.environ) -> str | None:
    """Path of the `vllm` program, None when it is not installed."""
    named = environ.get(VLLM, "").strip()
    return shutil.which(named or "vllm", path=environ.get("PATH"))


def on_cpu() -> bool:
    """No GPU of a kind that vLLM uses is on this machine."""
    return not any(device.exists() for device in GPU_DEVICES)


def for_machine(options: Options, *, cpu: bool, bf16: bool = True) -> Options:
    """`options` with what a CPU needs filled in where nothing was chosen."""
    if not cpu:
        return options
    dtype = options.dtype or ("" if bf16 else "float32")
    return replace(options, block_size=options.block_size or CPU_BLOCK_SIZE, dtype=dtype)


def environment(*, cpu: bool, local: bool) -> dict[str, str]:
    """Variables beside the command: no usage reports, no network for a model in a folder, and a CPU says that it is."""
    given = {"VLLM_NO_USAGE_STATS": "1"}
    if local:
        given["HF_HUB_OFFLINE"] = "1"
    if cpu:
        given |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_GIB)}
    return given


def flags(options: Options) -> list[str]:
    """All but model, host, port and the sockets of KV events. Raises LaunchError."""
    _check(options)
    given: list[str] = []
    valued = {
        "--served-model-name": options.name,
        "--dtype": options.dtype,
        "--tensor-parallel-size": options.tensor_parallel if options.tensor_parallel > 1 else None,
        "--pipeline-parallel-size": options.pipeline_parallel if options.pipeline_parallel > 1 else None,
        "--data-parallel-size": options.data_parallel if options.data_parallel > 1 else None,
        "--max-model-len": options.max_model_len,
        "--block-size": options.block_size,
        "--num-gpu-blocks-override": options.num_blocks,
        "--gpu-memory-utilization": options.gpu_memory,
    }
    for flag, value in valued.items():
        given += [flag, str(value)] if value not in (None, "") else []
    given += ["--enforce-eager"] if options.enforce_eager else []
    given += ["--enable-mfu-metrics"] if options.mfu else []
    given += ["--enable-prompt-tokens-details"]
    return given + _split(options.extra)


def local(options: Options, executable: str, port: int, sockets: Path) -> list[str]:
    """On this machine, for this machine only: loopback, and KV events through files in the folder `sockets`.

    A tcp:// endpoint would be open to everybody (`tcp://*`) or have vLLM connect instead of bind, and the events hold
    the prompts' token ids. Raises LaunchError.
    """
    command = [executable, "serve", options.model, "--host", "127.0.0.1", "--port", str(port), *flags(options)]
    if options.kv_events:
        command += _kv_events(*local_endpoints(sockets))
    return command


def preview(options: Options, executable: str = "vllm") -> str:
    """What `launch` will run here, to be read and copied; it takes a free port and a folder of its own. Raises
    LaunchError."""
    cpu = on_cpu()
    sockets = Path.home() / ".cache" / "kvscope" / "vllm"
    options = for_machine(options, cpu=cpu, bf16=has_bf16())
    text = shell(local(options, executable, PORT, sockets), environment(cpu=cpu, local=_is_folder(options.model)))
    return f"mkdir -p -m 700 {shlex.quote(str(sockets))}\n{text}" if options.kv_events else text


def local_endpoints(sockets: Path) -> tuple[str, str]:
    """(events, replay). vLLM adds a rank of data parallelism to what follows the last colon of an address with "tcp"
    in it, and refuses all others when there is more than one rank."""
    return f"ipc://{sockets}/tcp-events:{EVENTS_PORT}", f"ipc://{sockets}/tcp-replay:{EVENTS_PORT}"


def docker(options: Options, *, cpu: bool = False) -> str:
    """To be copied: ports are published on loopback only. Raises LaunchError."""
    model, is_folder = options.model, _is_folder(options.model)
    given = flags(options)
    lines = ["docker run --rm --ipc=host" + ("" if cpu else " --gpus all")]
    ports = [PORT, *(_rank_ports(options.data_parallel) if options.kv_events else ())]
    lines.append(" ".join(f"-p 127.0.0.1:{port}:{port}" for port in ports))
    if is_folder:
        folder = Path(options.model).expanduser().resolve()
        model = f"/models/{folder.name}"
        lines.append(f"-v {shlex.quote(f'{folder}:{model}:ro')}")
        given += [] if options.name else ["--served-model-name", folder.name]
    else:
        lines.append('-v "$HOME/.cache/huggingface:/root/.cache/huggingface"')
    lines += [f"-e {name}={value}" for name, value in environment(cpu=cpu, local=is_folder).items()]
    lines.append(CPU_IMAGE if cpu else IMAGE)
    lines.append(shlex.join([model, "--host", "0.0.0.0", "--port", str(PORT)]))  # noqa: S104  inside the container
    lines += _grouped([*given, *_open_events(options)])
    return _continued(lines)


def ray(options: Options) -> str:
    """Tensor and pipeline parallel over the machines of a Ray cluster. Raises LaunchError."""
    lines = ["vllm serve " + shlex.quote(options.model), f"--host 127.0.0.1 --port {PORT}"]
    lines += _grouped([*flags(options), "--distributed-executor-backend", "ray", *_open_events(options)])
    return "\n".join(
        [
            "# on the first machine",
            "ray start --head --port=6379",
            "# on every other machine",
            "ray start --address=FIRST_MACHINE:6379",
            "# on the first machine again; all of them need the model under the same path",
            _continued(lines),
        ]
    )


def multi_node(options: Options, nodes: int = 2) -> str:
    """Data parallel over `nodes` machines, without Ray; one address serves all ranks. Raises LaunchError."""
    ranks = max(options.data_parallel, nodes)
    if ranks % nodes:
        raise LaunchError(f"{ranks} ranks of data parallelism cannot be spread evenly over {nodes} machines")
    own = ranks // nodes
    shared = flags(replace(options, data_parallel=1)) + [
        "--data-parallel-size",
        str(ranks),
        "--data-parallel-size-local",
        str(own),
    ]
    shared += ["--data-parallel-address", "FIRST_MACHINE", "--data-parallel-rpc-port", "13345"]
    parts = []
    for node in range(nodes):
        lines = ["vllm serve " + shlex.quote(options.model)]
        lines.append("--headless" if node else f"--host 127.0.0.1 --port {PORT}")
        lines += _grouped([*shared, *(["--data-parallel-start-rank", str(node * own)] if node else [])])
        lines += _grouped(_open_events(options, ranks))
        parts += [
            f"# on machine {node + 1}" + (" (FIRST_MACHINE is its address)" if not node else ""),
            _continued(lines),
        ]
    return "\n".join(parts)


def shell(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """The command with its variables, one flag a line, to be copied."""
    head = [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command[:3])]
    return _continued([" ".join(head), *_grouped(command[3:])])


def _open_events(options: Options, ranks: int | None = None) -> list[str]:
    """KV events on all addresses of the container or machine: whoever is let through reads prompts there."""
    if not options.kv_events:
        return []
    ranks = ranks or options.data_parallel
    return _kv_events(f"tcp://*:{EVENTS_PORT}", f"tcp://*:{EVENTS_PORT + ranks}")


def _rank_ports(ranks: int) -> range:
    """Events of each rank, then replays: the bases lie `ranks` apart, because a rank is added to both."""
    return range(EVENTS_PORT, EVENTS_PORT + 2 * ranks)


def _kv_events(endpoint: str, replay: str) -> list[str]:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay,
        "topic": TOPIC,
    }
    return ["--kv-events-config", json.dumps(config, separators=(",", ":"))]


def _grouped(given: Sequence[str]) -> list[str]:
    """A line for each flag, with its value."""
    lines: list[list[str]] = []
    for part in given:
        if part.startswith("--") or not lines:
            lines.append([part])
        else:
            lines[-1].append(part)
    return [shlex.join(line) for line in lines]


def _continued(lines: Sequence[str]) -> str:
    return " \\\n  ".join(lines)


def _check(options: Options) -> None:
    if not options.model.strip() or options.model.startswith("-"):
        raise LaunchError("name a model: a folder, or a Hugging Face id")
    if options.name.startswith("-"):
        raise LaunchError(f"'{options.name[:40]}' is no name for a model")
    for words, count in (
        ("tensor", options.tensor_parallel),
        ("pipeline", options.pipeline_parallel),
        ("data", options.data_parallel),
    ):
        if not 1 <= count <= 1024:
            raise LaunchError(f"{words} parallelism is 1 to 1024, not {count}")
    if options.num_blocks and options.block_size and options.max_model_len:
        room = options.num_blocks * options.block_size
        if room < options.max_model_len:
            raise LaunchError(
                f"{options.num_blocks} blocks of {options.block_size} tokens hold {room:,} tokens, fewer than one "
                f"request may have ({options.max_model_len:,}): vLLM would refuse to start"
            )


def _split(extra: str) -> list[str]:
    try:
        parts = shlex.split(extra)
    except ValueError as error:
        raise LaunchError(f"further flags cannot be read: {error}") from None
    for taken in ("--host", "--port", "--kv-events-config"):
        if any(part == taken or part.startswith(taken + "=") for part in parts):
            raise LaunchError(f"{taken} is set here already: leave it out of the further flags")
    return parts


def _is_folder(model: str) -> bool:
    return Path(model).expanduser().is_dir()
