"""Environments of peers: named, found, left alone when they are whole, and said so when they are not."""

import pytest

from backend.bench import environments
from benchmarks.peers import install


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """(write) a python of llama.cpp's environment that ends with a status."""
    monkeypatch.setenv("KVSCOPE_LLAMACPP_ENV", str(tmp_path))
    (tmp_path / "bin").mkdir()

    def python(status: int) -> None:
        file = tmp_path / "bin" / "python"
        file.write_text(f"#!/bin/sh\nexit {status}\n")
        file.chmod(0o755)

    return python


def test_what_is_there_stays(environment, monkeypatch, capsys):
    environment(0)
    monkeypatch.setattr(install, "install", lambda name: pytest.fail("must not be installed again"))
    assert install.main(["llamacpp"]) == 0
    assert "llamacpp: is there" in capsys.readouterr().out
    assert environments.missing("llamacpp") == ""


def test_what_is_broken_is_installed_anew_and_said_when_that_fails(environment, monkeypatch, capsys):
    environment(1)
    asked = []
    monkeypatch.setattr(install, "install", asked.append)
    assert install.main(["llamacpp"]) == 1
    assert asked == ["llamacpp"]
    assert "cannot be imported" in capsys.readouterr().err


def test_an_unknown_peer_is_refused_with_the_known_ones(capsys):
    assert install.main(["sglang"]) == 2
    assert "vllm, llamacpp" in capsys.readouterr().err


def test_without_a_variable_environments_stand_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("KVSCOPE_VLLM_ENV", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environments.environment("vllm") == tmp_path / "kvscope" / "peers" / "vllm"
    assert environments.missing("vllm").startswith(f"not installed in {tmp_path}")
