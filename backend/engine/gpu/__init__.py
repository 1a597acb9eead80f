"""Kernels in Triton and CUDA graphs for NVIDIA GPUs. The engine works without them, slower."""

from __future__ import annotations

import importlib
import importlib.util


def obstacle() -> str:
    """Why the Triton kernels cannot be used on a GPU here, in words; "" when they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; the CUDA build of torch brings it"
    try:
        kernels = importlib.import_module("backend.engine.gpu.kernels")
    except (ImportError, AttributeError, RuntimeError) as error:  # another Triton than the kernels were written for
        return f"the Triton kernels cannot be loaded ({type(error).__name__}: {error})"
    if kernels.INTERPRETED:
        return "TRITON_INTERPRET is set, so Triton would interpret its kernels instead of compiling them; unset it"
    return ""
