"""`python -m backend models`: what a person reads, what a script reads, how it ends."""

import json

import pytest
from typer.testing import CliRunner

from backend.models.catalogue import CATALOGUE
from backend.models.cli import app
from tests.models.tiny import save_config, save_model


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_list_names_every_model_and_where_it_lies(own_cache):
    said = run("list")
    assert said.exit_code == 0
    assert "smollm2-135m" in said.output and "not fetched yet (93 MB)" in said.output
    rows = json.loads(run("list", "--json").output)
    assert [row["name"] for row in rows] == list(CATALOGUE)
    assert rows[0]["folder"] is None


def test_path_prints_the_folder_and_nothing_else(tmp_path):
    save_model(tmp_path)
    said = run("path", str(tmp_path))
    assert said.exit_code == 0
    assert said.stdout == f"{tmp_path}\n"


@pytest.mark.parametrize("command", ["path", "check"])
def test_what_is_not_there_ends_with_one_and_plain_words(command):
    said = run(command, "./nothing")
    assert said.exit_code == 1
    assert said.stdout == ""
    assert said.stderr.startswith("error: there is no file or folder './nothing'")


def test_check_loads_compares_and_describes(tmp_path):
    save_model(tmp_path)
    said = run("check", str(tmp_path), "--dtype", "float32", "--device", "cpu")
    assert said.exit_code == 0, said.output
    assert "4 heads, 2 KV heads of 16" in said.stdout
    assert "self-check passed" in said.stdout
    facts = json.loads(run("check", str(tmp_path), "--device", "cpu", "--json").stdout)
    assert facts["self_check"] == "passed"
    assert facts["stop_ids"] == [2]


def test_check_refuses_what_the_gate_refuses(tmp_path):
    save_config(tmp_path, model_type="mamba")
    said = run("check", str(tmp_path), "--weights", "random")
    assert said.exit_code == 1
    assert "recurrent state" in said.stderr


def test_help_explains():
    said = run("--help")
    assert said.exit_code == 0
    for word in ("list", "path", "check"):
        assert word in said.output
