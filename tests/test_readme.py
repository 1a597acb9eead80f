"""Every command of the README, run as it stands there (on free ports, and with the small model where any would do)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.engine.tiny import LLAMA

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (ROOT / ".venv").exists(), reason="the README's commands use .venv, which `make test` makes"
    ),
]


def commands() -> list[str]:
    """The indented lines of the README, continuation lines joined, comments off."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return [re.sub(r"\s+", " ", re.sub(r"\s{2,}#.*", "", line)).strip() for line in lines]


def command(start: str) -> str:
    (found,) = [c for c in commands() if c.startswith(start) and ("random" in start) == ("random" in c)]
    return found


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def run(line: str, **environment: str) -> str:
    done = subprocess.run(
        line, shell=True, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def running(line: str, health: str, **environment: str):
    """A command that serves, until `health` answers 200; its whole process group ends afterwards."""
    process = subprocess.Popen(line, shell=True, cwd=ROOT, env=os.environ | environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 150
        while True:
            assert process.poll() is None, f"{line} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{line}: {health} never answered"
            try:
                if httpx.get(health, timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)  # between two looks
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def test_no_command_is_left_out():
    known = (
        "make run",
        "make test",
        "curl ",
        "python -m backend serve --port 8000",
        ".venv/bin/python -m backend serve --port 8000",
        ".venv/bin/python -m backend serve --model path/to/config.json",
        ".venv/bin/python -m backend models list",
        ".venv/bin/python -m backend measure",
        ".venv/bin/python -m backend bench --quick",
        ".venv/bin/python -m backend plan --model",
        ".venv/bin/python -m backend load --url",
        ".venv/bin/python -m backend experiment sweep --url",
        ".venv/bin/python -m backend serve --model llama-3-70b --on",
        ".venv/bin/python -m backend attach http",
        ".venv/bin/python -m backend attach --fleet",
        "KVSCOPE_ENGINE_URL=",
        "KVSCOPE_ATTACH_URL=",
    )
    assert [c for c in commands() if not c.startswith(known)] == []


def test_the_engine_answers_and_a_dashboard_follows_it():
    port, page = str(free_port()), str(free_port())
    engine = command(".venv/bin/python -m backend serve --port").replace("8000", port) + " --num-blocks 64"
    with running(engine, f"http://127.0.0.1:{port}/health"):
        answer = json.loads(run(command("curl").replace("8000", port)))
        assert answer["choices"][0]["message"]["content"]
        load = command(".venv/bin/python -m backend load").replace("8000", port).replace("1,2,4,8", "20")
        assert "TTFT" in run(load + " --requests 10 --min-seconds 0 --input-tokens 8 --output-tokens 2")
        sweep = command(".venv/bin/python -m backend experiment").replace("8000", port)
        assert "knee" in run(sweep + " --set batches=1,2 --set contexts=16 --set steps=4 --set measure_roof=false")
        attach = command(".venv/bin/python -m backend attach http").replace("8000", port)
        said = run(f"{attach} --count 2")
        assert said.startswith("KVScope") and f"at http://127.0.0.1:{port}" in said
        follow = command("KVSCOPE_ENGINE_URL").replace("8000", port) + f" HEADLESS=1 PORT={page}"
        with running(follow, f"http://127.0.0.1:{page}/_stcore/health"):
            pass


def test_a_model_of_random_weights(tmp_path):
    port = str(free_port())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    line = command(".venv/bin/python -m backend serve --model path/to/config.json --weights random")
    line = line.replace("8000", port).replace("path/to/config.json", str(tmp_path / "config.json"))
    with running(line + " --num-blocks 64", f"http://127.0.0.1:{port}/health"):
        pass


def test_hardware_that_is_not_here():
    port = str(free_port())
    line = command(".venv/bin/python -m backend serve --model llama-3-70b --on").replace("8000", port)
    with running(line, f"http://127.0.0.1:{port}/health"):
        state = httpx.get(f"http://127.0.0.1:{port}/engine/state").json()
        assert (state["model"]["weights"], state["device"]["kind"]) == ("modelled", "modelled")


def test_looking_after_models_and_measuring(tmp_path):
    assert "smollm2-135m" in run(command(".venv/bin/python -m backend models list"))
    measure = command(".venv/bin/python -m backend measure") + " --rounds 1"
    assert "GB/s" in run(measure, XDG_CACHE_HOME=str(tmp_path))
    assert "sequences at once" in run(command(".venv/bin/python -m backend plan"))


def test_the_bench(tmp_path):
    line = command(".venv/bin/python -m backend bench --quick")
    out = run(f"{line} --peers kvscope --concurrency 1 --output-tokens 3 --out {tmp_path / 'result.json'}")
    assert "KVScope" in out
