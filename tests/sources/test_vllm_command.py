"""The command lines of vLLM that are shown to be copied."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace

import pytest

from backend.sources import vllm_command
from backend.sources.vllm_command import LaunchError, Options

HUB = Options(model="Qwen/Qwen3-0.6B")


def words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "), comments=True)


def events(command: list[str]) -> dict:
    return json.loads(command[command.index("--kv-events-config") + 1])


def test_every_choice_becomes_its_flag(tmp_path):
    chosen = Options(
        model="m",
        name="n",
        dtype="float32",
        tensor_parallel=2,
        pipeline_parallel=3,
        max_model_len=1024,
        block_size=32,
        num_blocks=64,
        gpu_memory=0.5,
        enforce_eager=True,
        mfu=False,
        kv_events=False,
        extra="--max-num-seqs 8 --seed=1",
    )
    given = vllm_command.local(chosen, "/bin/vllm", 81, tmp_path)
    assert given[:7] == ["/bin/vllm", "serve", "m", "--host", "127.0.0.1", "--port", "81"]
    pairs = dict(itertools.pairwise(given))
    assert pairs["--tensor-parallel-size"] == "2" and pairs["--pipeline-parallel-size"] == "3"
    assert pairs["--num-gpu-blocks-override"] == "64" and pairs["--gpu-memory-utilization"] == "0.5"
    assert pairs["--max-num-seqs"] == "8" and "--seed=1" in given and "--enforce-eager" in given
    assert "--enable-mfu-metrics" not in given and "--kv-events-config" not in given


def test_on_a_cpu_blocks_are_small_and_the_dtype_is_one_that_it_has():
    assert vllm_command.for_machine(HUB, cpu=False) is HUB
    here = vllm_command.for_machine(HUB, cpu=True, bf16=False)
    assert (here.block_size, here.dtype) == (32, "float32")
    chosen = vllm_command.for_machine(replace(HUB, block_size=16, dtype="bfloat16"), cpu=True, bf16=False)
    assert (chosen.block_size, chosen.dtype) == (16, "bfloat16")


def test_bf16_is_read_from_the_cpu(tmp_path):
    for flags, expected in (("fpu avx2", False), ("fpu avx512f avx512_bf16", True), ("avx2 amx_bf16", True)):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
        assert vllm_command.has_bf16(tmp_path / "cpuinfo") is expected
    (tmp_path / "cpuinfo").write_text("Features\t: fp asimd bf16\n")
    assert vllm_command.has_bf16(tmp_path / "cpuinfo")
    assert not vllm_command.has_bf16(tmp_path / "none")


def test_the_shown_command_is_the_one_that_runs(tmp_path):
    given = vllm_command.local(replace(HUB, name="it's"), "/opt/my vllm", 8123, tmp_path)
    shown = words(vllm_command.shell(given, {"HF_HUB_OFFLINE": "1"}))
    assert shown == ["HF_HUB_OFFLINE=1", *given]


def test_ranks_of_data_parallelism_do_not_share_a_port():
    """vLLM adds the rank to both ports: events of rank 1 must not meet replays of rank 0."""
    for ranks in (1, 2, 8):
        command = words(vllm_command.docker(replace(HUB, data_parallel=ranks)))
        config = events(command)
        base = [int(config[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint")]
        used = [port + rank for port in base for rank in range(ranks)]
        assert len(set(used)) == 2 * ranks
        published = [command[i + 1] for i, word in enumerate(command) if word == "-p"]
        assert published == [f"127.0.0.1:{port}:{port}" for port in [8000, *sorted(used)]]


def test_local_sockets_differ_by_rank_as_vllm_numbers_them(tmp_path):
    for endpoint in vllm_command.local_endpoints(tmp_path):
        address, _, number = endpoint.rpartition(":")
        assert "tcp" in endpoint and number.isdigit() and "inproc" not in endpoint  # what vLLM needs to count on
        assert len(address.removeprefix("ipc://")) < 100  # sun_path


def test_docker_mounts_a_folder_read_only_and_names_the_model_after_it(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    command = words(vllm_command.docker(Options(model=str(folder)), cpu=True))
    assert command[command.index("-v") + 1] == f"{folder}:/models/my model:ro"
    assert command[command.index("--served-model-name") + 1] == "my model"
    assert "--gpus" not in command and vllm_command.CPU_IMAGE in command
    assert "HF_HUB_OFFLINE=1" in command
    assert "HF_HUB_OFFLINE=1" not in words(vllm_command.docker(HUB))


def test_several_machines_share_the_ranks():
    text = vllm_command.multi_node(replace(HUB, data_parallel=4), nodes=2)
    first, second = text.split("# on machine 2")
    assert "--headless" in second and "--headless" not in first
    assert words(second)[words(second).index("--data-parallel-start-rank") + 1] == "2"
    for command in (words(first), words(second)):
        assert command.count("--data-parallel-size") == 1 and command[command.index("--data-parallel-size") + 1] == "4"
        assert command[command.index("--data-parallel-size-local") + 1] == "2"
    with pytest.raises(LaunchError, match="evenly"):
        vllm_command.multi_node(replace(HUB, data_parallel=5), nodes=2)
    text = vllm_command.ray(replace(HUB, tensor_parallel=8, pipeline_parallel=2))
    assert "ray start --head" in text and "--distributed-executor-backend ray" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": " "}, "name a model"),
        ({"model": "--trust-remote-code"}, "name a model"),
        ({"tensor_parallel": 0}, "tensor parallelism"),
        ({"extra": "--host 0.0.0.0"}, "--host is set here already"),
        ({"extra": "--port=1"}, "--port is set"),
        ({"extra": "'"}, "cannot be read"),
        ({"num_blocks": 8, "block_size": 32, "max_model_len": 1024}, "8 blocks of 32 tokens hold 256 tokens"),
    ],
)
def test_what_cannot_be_is_refused_in_words(changes, message, tmp_path):
    with pytest.raises(LaunchError, match=message):
        vllm_command.local(replace(HUB, **changes), "vllm", 1, tmp_path)


def test_the_program_is_found_by_variable_or_path(tmp_path):
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert vllm_command.find({"PATH": str(tmp_path)}) == str(program)
    assert vllm_command.find({"PATH": "", "KVSCOPE_VLLM": str(program)}) == str(program)
    assert vllm_command.find({"PATH": ""}) is None
