"""Where peers live that have an environment of their own; benchmarks/peers/install.py makes them."""

from __future__ import annotations

import os
from pathlib import Path

from backend.models.cache import root

VARIABLES = {"vllm": "KVSCOPE_VLLM_ENV", "llamacpp": "KVSCOPE_LLAMACPP_ENV"}
INSTALL = "python benchmarks/peers/install.py"


def environment(name: str) -> Path:
    """The virtual environment of a peer, there or not: where its variable says, else in the user's cache."""
    return Path(os.environ.get(VARIABLES[name]) or root() / "peers" / name)


def python_of(name: str) -> Path:
    return environment(name) / "bin" / "python"


def missing(name: str) -> str:
    """Why the peer cannot take part, with the fix; "" when its environment is there."""
    if python_of(name).exists():
        return ""
    return f"not installed in {environment(name)}: `{INSTALL} {name}`, or name its environment with {VARIABLES[name]}"
