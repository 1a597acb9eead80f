"""`python -m backend plan` as people use it."""

import json

import pytest
from typer.testing import CliRunner

from backend.planner.cli import app

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def run(*args: str):
    return CliRunner().invoke(app, args)


def test_the_command_of_the_handbook():
    args = "--model llama-3-8b --gpu h100-sxm --tp 1 --context 8192 --batch 32 --json".split()
    found = json.loads(run(*args).stdout)
    assert found["accelerator"]["key"] == "h100-sxm-80gb" and found["fits"]
    results = found["results"]
    assert results["kv_per_sequence"]["value"] == 2**30
    assert results["step"]["kind"] == "bound"
    assert {term["name"] for term in results["step"]["terms"]} == {"weights", "KV", "arithmetic"}
    assert results["rate"]["low"] < results["rate"]["value"] < results["rate"]["high"] < results["ceiling"]["value"]


def test_words_say_which_numbers_are_bounds():
    found = run("--model", "llama-3-8b", "--batch", "8")
    assert found.exit_code == 0
    assert "decode step, at least" in found.stdout and "bound" in found.stdout and "estimate" in found.stdout
    assert "never" in found.stdout


def test_a_config_of_ones_own(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    found = json.loads(run("--config", str(path), "--json").stdout)
    assert found["results"]["parameters"]["value"] == 8_030_261_248
    assert found["results"]["parameters"]["unit"] == "parameters"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "llama-9"], "near: llama"),
        (["--model", "llama-3-8b", "--gpu", "h1000"], "accelerator"),
        (["--model", "llama-3-8b", "--weights", "fp7"], "known"),
        (["--model", "llama-3-8b", "--tp", "0"], "tp"),
        ([], "--model or --config"),
        (["--config", "/nowhere/config.json"], "cannot be read"),
    ],
)
def test_mistakes_are_explained_and_end_with_2(args, words):
    found = run(*args)
    assert found.exit_code == 2 and words in found.output and "Traceback" not in found.output


def test_a_config_that_is_not_known_says_why_and_what_is_near(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"model_type": "llama5"}), encoding="utf-8")
    found = run("--config", str(path))
    assert found.exit_code == 2 and "nearest known: llama" in found.output


def test_the_list_names_both_catalogues():
    found = run("--list").stdout
    assert "llama-3.1-405b" in found and "mi300x" in found
