"""Hugging Face ids, against a stand-in hub on this machine; huggingface_hub itself is the real one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.hub_server import serve_hub
from tests.models.tiny import LLAMA, save_model

ROOT = Path(__file__).resolve().parents[2]


def models(command: list[str], url: str, home: Path, **env: str) -> subprocess.CompletedProcess:
    """`python -m backend.models.cli …` with that hub (the library reads its address once, when it is imported)."""
    of_the_hub = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-m", "backend.models.cli", *command],
        cwd=ROOT,
        env=os.environ | of_the_hub | env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_tensors_and_json_are_fetched_and_nothing_that_could_run(files, tmp_path):
    dangerous = {
        "pytorch_model.bin": b"\x80\x04",
        "modeling_own.py": b"raise SystemExit('ran')",
        "original/consolidated.00.pth": b"\x80\x04",
        "consolidated.safetensors": b"a second copy",
        "README.md": b"# hello",
    }
    with serve_hub({"some/llama": files | dangerous}) as (url, fetched):
        done = models(["path", "some/llama"], url, tmp_path)
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.strip())
        assert {file.name for file in folder.iterdir()} == set(files)
        assert set(fetched) == set(files)
        again = models(["path", "some/llama"], "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
        assert again.stdout == done.stdout, again.stderr  # known without the network from now on


def test_what_the_gate_refuses_is_refused_before_its_weights_are_fetched(files, tmp_path):
    config = json.dumps({"model_type": "mamba"}).encode()
    with serve_hub({"some/mamba": files | {"config.json": config}}) as (url, fetched):
        done = models(["path", "some/mamba"], url, tmp_path)
    assert done.returncode == 1
    assert "recurrent state" in done.stderr
    assert "model.safetensors" not in fetched


def test_random_weights_fetch_none(files, tmp_path):
    with serve_hub({"some/llama": files}) as (url, fetched):
        done = models(["check", "some/llama", "--weights", "random", "--json"], url, tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["layers"] == LLAMA["num_hidden_layers"]
    assert facts["weights"] == "random"
    assert "model.safetensors" not in fetched


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("some/none", "Hugging Face has no model 'some/none'"),
        ("some/gated", "hf auth login"),
        ("some/pickle", "no weights that are safe to read"),
        ("some/empty", "no config.json"),
        ("some/code", "frobnicator models need the code in their own repository"),
    ],
)
def test_what_cannot_be_had_is_said_in_plain_words(files, tmp_path, name, words):
    pickled = {k: v for k, v in files.items() if not k.endswith(".safetensors")} | {"pytorch_model.bin": b"\x80"}
    code = {"model_type": "frobnicator", "auto_map": {"AutoConfig": "own.Config"}}
    repos = {
        "some/pickle": pickled,
        "some/empty": {"README.md": b"x"},
        "some/code": files | {"config.json": json.dumps(code).encode(), "own.py": b"raise SystemExit('ran')"},
    }
    with serve_hub(repos, gated=frozenset({"some/gated"})) as (url, _):
        done = models(["path", name], url, tmp_path)
    assert done.returncode == 1
    assert re.search(words, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_connection_the_known_models_are_named(tmp_path, offline):
    done = models(["path", "some/llama"], "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE=offline)
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "smollm2-135m" in done.stderr
    assert "Traceback" not in done.stderr
