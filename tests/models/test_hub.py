"""Hugging Face ids, against a stand-in hub on this machine; huggingface_hub itself is the real one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.hub_server import serve_hub
from tests.models.tiny import LLAMA, save_model

ROOT = Path(__file__).resolve().parents[2]

# One process for all names, as importing torch takes longer than all of them; and a process of its own, as the
# library reads the hub's address when it is imported.
ASK = """
import json, sys
from backend.models import find
from backend.models.errors import ModelError
answers = {}
for name in json.loads(sys.argv[1]):
    try:
        if name.startswith("random:"):
            from backend.models.loader import load
            info = load(name.removeprefix("random:"), weights="random", device="cpu", say=lambda line: None).info()
            answers[name] = {"layers": info.layers, "weights": info.weights}
        else:
            answers[name] = {"folder": str(find.path(name, lambda line: None))}
    except ModelError as error:
        answers[name] = {"error": str(error)}
print(json.dumps(answers))
"""


def ask(names: list[str], url: str, home: Path, offline: bool = False) -> dict[str, dict]:
    """What becomes of each name when the hub is at `url`."""
    of_the_hub = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": str(+offline)}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(names)],
        cwd=ROOT,
        env=os.environ | of_the_hub,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def asked(files, home) -> tuple[dict[str, dict], list[str]]:
    """(answers by name, every file that was downloaded as "repository/file")."""
    dangerous = {
        "pytorch_model.bin": b"\x80\x04",
        "modeling_own.py": b"raise SystemExit('ran')",
        "original/consolidated.00.pth": b"\x80\x04",
        "consolidated.safetensors": b"a second copy",
        "README.md": b"# hello",
    }
    pickled = {name: data for name, data in files.items() if not name.endswith(".safetensors")}
    own_code = json.dumps({"model_type": "frobnicator", "auto_map": {"AutoConfig": "own.Config"}}).encode()
    repos = {
        "some/llama": files | dangerous,
        "some/shape": files,
        "some/mamba": files | {"config.json": json.dumps({"model_type": "mamba"}).encode()},
        "some/pickle": pickled | {"pytorch_model.bin": b"\x80"},
        "some/empty": {"README.md": b"x"},
        "some/code": files | {"config.json": own_code, "own.py": b"raise SystemExit('ran')"},
    }
    names = [*repos, "random:some/shape", "some/none", "some/gated"]
    names.remove("some/shape")
    with serve_hub(repos, gated=frozenset({"some/gated"})) as (url, fetched):
        return ask(names, url, home), fetched


def test_tensors_and_json_are_fetched_and_nothing_that_could_run(asked, files):
    answers, fetched = asked
    folder = Path(answers["some/llama"]["folder"])
    assert {file.name for file in folder.iterdir()} == set(files)
    assert {name for name in fetched if name.startswith("some/llama/")} == {f"some/llama/{name}" for name in files}
    assert not any(name.endswith((".bin", ".py", ".pth")) for name in fetched)


def test_random_weights_fetch_none(asked):
    answers, fetched = asked
    assert answers["random:some/shape"] == {"layers": LLAMA["num_hidden_layers"], "weights": "random"}
    assert "some/shape/config.json" in fetched
    assert "some/shape/model.safetensors" not in fetched


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("some/mamba", "recurrent state"),
        ("some/none", "Hugging Face has no model 'some/none'"),
        ("some/gated", "hf auth login"),
        ("some/pickle", "no weights that are safe to read"),
        ("some/empty", "no config.json"),
        ("some/code", "frobnicator models need the code in their own repository"),
    ],
)
def test_what_cannot_be_had_is_said_in_plain_words_and_costs_no_download(asked, name, words):
    answers, fetched = asked
    assert words in answers[name]["error"]
    assert f"{name}/model.safetensors" not in fetched


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_connection_what_was_fetched_still_works_and_the_rest_says_so(asked, home, offline):
    before, _ = asked
    answers = ask(["some/llama", "some/other"], "http://127.0.0.1:9", home, offline)
    assert answers["some/llama"] == before["some/llama"]
    assert "cannot be reached" in answers["some/other"]["error"]
    assert "smollm2-135m" in answers["some/other"]["error"]
