"""`python -m backend serve` as its users and supervisors meet it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from backend.models.errors import ModelError
from backend.server.serve import uncollected
from tests.server.conftest import eventually

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "backend", "serve", "--port", "0"]
TINY = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip


@contextlib.contextmanager
def started(*options: str, stdin: int = subprocess.DEVNULL):
    """(process, what its first line says)."""
    with subprocess.Popen(
        [*COMMAND, *options], cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def refused(*options: str) -> str:
    """What it says on stderr when it does not start."""
    done = subprocess.run([*COMMAND, *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_key(host):
    message = refused("--host", host)
    assert host in message
    assert "--api-key-file" in message


@pytest.mark.parametrize("content", [None, "", "short", "two words in one key here"])
def test_a_key_file_must_hold_a_key(tmp_path, content):
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    assert str(path.name) in refused("--api-key-file", str(path))


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused("--port", str(port))
    assert str(port) in message
    assert "--port" in message


def test_an_option_that_cannot_be_is_explained():
    assert "'sometimes'" in refused("--policy", "sometimes")
    assert "--block-size" in refused("--block-size", "0")


def test_it_answers_before_the_model_is_there_and_ends_when_told():
    with started("--model", "/nowhere/at/all") as (process, first):
        assert first["kvscope"] == "listening"
        assert first["pid"] == process.pid
        url = f"http://127.0.0.1:{first['port']}"
        answer = httpx.get(f"{url}/health", timeout=30)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - begin < 10


def test_it_ends_with_its_parent():
    with started("--model", "/nowhere/at/all", "--die-with-parent", stdin=subprocess.PIPE) as (process, _):
        process.stdin.close()
        assert process.wait(20) == 0


@pytest.mark.timeout(240)
def test_a_model_is_served_from_the_command_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    key.chmod(0o600)
    options = [
        "--model",
        str(tmp_path),
        "--weights",
        "random",
        "--dtype",
        "float32",
        "--num-blocks",
        "64",
        "--block-size",
        "8",
    ]
    options += [
        "--max-running",
        "4",
        "--policy",
        "static",
        "--no-prefix-cache",
        "--threads",
        "1",
        "--api-key-file",
        str(key),
    ]
    with started(*options) as (process, first):
        headers = {"Authorization": "Bearer 0123456789abcdef"}
        with httpx.Client(base_url=f"http://127.0.0.1:{first['port']}", timeout=60, headers=headers) as http:
            eventually(lambda: http.get("/health").status_code == 200, "ready", deadline_s=180)
            assert httpx.get(f"{http.base_url}/v1/models").status_code == 401
            answer = http.post(
                "/v1/completions", json={"model": str(tmp_path), "prompt": "hello", "max_tokens": 5}
            ).json()
            assert answer["usage"]["completion_tokens"] == 5
            config = http.get("/engine/state").json()["config"]
            assert (config["block_size"], config["num_blocks"], config["max_running"]) == (8, 64, 4)
            assert (config["policy"], config["prefix_cache"], config["max_model_len"]) == ("static", False, 256)
            body = {"prompt": "on and on", "max_tokens": 240, "stream": True, "ignore_eos": True}
            with http.stream("POST", "/v1/completions", json=body) as streamed:
                lines = streamed.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert list(lines)[-2:] == ["data: [DONE]", ""]
            assert process.wait(20) == 0


@pytest.mark.timeout(240)
def test_a_model_that_cannot_be_served_says_why(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "mamba"}))
    with started("--model", str(tmp_path), "--weights", "random") as (_, first):
        url = f"http://127.0.0.1:{first['port']}"
        eventually(lambda: "mamba" in httpx.get(f"{url}/health", timeout=30).text, "the reason", deadline_s=180)
        assert httpx.get(f"{url}/v1/models").json()["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("fails", [False, True])
def test_a_boot_is_not_walked_by_the_garbage_collector_and_what_it_made_never(fails):
    kept = []

    def boot(emit, say):
        assert not gc.isenabled()
        kept.append([])
        if fails:
            raise ModelError("no such model")
        return "loop", "loaded"

    try:
        with pytest.raises(ModelError) if fails else contextlib.nullcontext():
            assert uncollected(boot)(print, print) == ("loop", "loaded")
        assert gc.isenabled()
        assert not any(made is kept[0] for made in gc.get_objects())
    finally:
        gc.unfreeze()
