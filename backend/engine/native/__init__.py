"""Kernels in C++ for the CPU: torch.ops.kvscope.*. The engine works without them, slower."""

from __future__ import annotations

from backend.engine.native import build
from backend.engine.native.build import BuildError

_loaded = False


def load() -> str:
    """Loads the kernels if they have been built here: "" when they are there, else the reason in words.

    Never compiles, which takes a minute: `python -m backend.engine.native` does.
    """
    global _loaded
    if _loaded:
        return ""
    try:
        library = build.path()
    except BuildError as error:
        return f"{error}; `make run` builds them when g++ is installed"
    if not library.exists():
        return "they have not been built here yet; `python -m backend.engine.native` builds them"
    import torch

    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        return f"{library} cannot be loaded ({error}); delete it, `python -m backend.engine.native` builds it anew"
    _loaded = True
    return ""


def multiplies_bfloat16() -> bool:
    """Do they use this CPU's own arithmetic for bfloat16, rather than widen it? Once they are loaded."""
    import torch

    return torch.ops.kvscope.multiplies_bfloat16()
