"""The page's JavaScript in node's own test runner."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed: the page's JavaScript is not tested here"
)
@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("*.test.mjs")))
def test_javascript(file):
    environment = {name: value for name, value in os.environ.items() if name != "KVSCOPE_EXPECTED"}
    done = subprocess.run(
        ["node", "--test", str(HERE / file)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
