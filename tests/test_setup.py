"""What .ci/setup finds missing on a bare machine it installs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[1] / ".ci" / "setup"


@pytest.fixture
def bare(tmp_path):
    """Runs a function of the script where almost nothing is on the PATH, and tells what apt-get was asked for."""
    tools, asked = tmp_path / "bin", tmp_path / "asked"
    tools.mkdir()
    for name, does in {"apt-get": f'echo "$@" >> {asked}', "id": "echo 0"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    for name in ("sh", "env", "grep", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    functions = SETUP.read_text(encoding="utf-8").partition('case "${1:-}" in')[0]
    script = tmp_path / "project" / ".ci" / "setup"
    script.parent.mkdir(parents=True)

    def call(function: str) -> tuple[str, str]:
        script.write_text(f"{functions}\n{function}\n")
        done = subprocess.run(
            [shutil.which("sh"), script], env={"PATH": str(tools)}, capture_output=True, text=True, timeout=30
        )
        return asked.read_text() if asked.exists() else "", done.stderr

    return call


def test_a_missing_node_is_installed(bare):
    packages, _ = bare("need_node")
    assert "install" in packages and packages.split()[-1] == "nodejs"


def test_a_missing_browser_is_installed_or_fetched(bare):
    packages, said = bare("need_chromium")
    debian = "\nID=debian" in "\n" + Path("/etc/os-release").read_text(encoding="utf-8")
    assert packages.split()[-1:] == ["chromium"] if debian else "Fetching Chromium" in said
