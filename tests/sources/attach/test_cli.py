"""`python -m backend attach`, against real HTTP."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from backend.cli import app
from tests.sources.attach.replicas import Replicas


@pytest.fixture(scope="module")
def servers():
    servers = Replicas(2)
    yield servers
    servers.close()


def attach(*words: str):
    return CliRunner().invoke(app, ["attach", *words])


def test_it_says_what_is_there_and_what_it_reads(servers):
    done = attach(servers.urls[0], "--count", "3", "--interval", "0.2")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"vLLM at {servers.urls[0]}\nmodel     m\n")
    assert "--enable-mfu-metrics turns it on" in done.output
    assert len([line for line in done.output.split("\n") if line.split()[:2] == ["1", "0"]]) == 3


def test_json_is_one_object_a_line(servers):
    done = attach(servers.urls[1], "--count", "2", "--interval", "0.2", "--json")
    found, first, second = (json.loads(line) for line in done.output.splitlines())
    assert found["found"]["kind"] == "vllm" and first["state"] == second["state"] == "live"
    assert second["values"]["running"] == {"value": 2.0, "name": "vllm:num_requests_running"}
    assert second["values"]["output_tokens_per_s"]["value"] > 0


def test_a_fleet_of_a_file_with_a_dead_one(servers, tmp_path):
    path = tmp_path / "servers"
    path.write_text(f"{servers.urls[0]} name=left\n{servers.urls[1]}\nhttp://127.0.0.1:9 name=dead\n")
    done = attach("--fleet", str(path), "--count", "2", "--interval", "1")
    assert done.exit_code == 0 and "3 replicas: 2 live" in done.output
    assert "left" in done.output and "nothing listens at 127.0.0.1:9" in done.output


def test_what_cannot_be_is_said_and_the_exit_status_tells(servers, tmp_path):
    (tmp_path / "servers").write_text("http://ok:1\nnonsense\n")
    for words, status, message in (
        ((), 2, "give the address of a server"),
        (("http://127.0.0.1:9",), 1, "nothing listens at 127.0.0.1:9"),
        (("--fleet", str(tmp_path / "servers")), 1, "line 2: 'nonsense' is not an address"),
        (("--fleet", str(tmp_path / "none")), 1, "cannot be read"),
    ):
        done = attach(*words)
        assert done.exit_code == status and message in done.output, done.output
