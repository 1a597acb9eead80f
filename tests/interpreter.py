"""Triton's kernels without a GPU: by its interpreter, which tests/conftest.py asks for before anything imports it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def triton():
    """The interpreter, told what it does not know of bfloat16. Yields the module `backend.engine.gpu.paged`."""
    pytest.importorskip("triton", reason="Triton has no package for this platform: its kernels were not tested")
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    from backend.engine.gpu import kernels, paged

    assert kernels.INTERPRETED, "something imported Triton before tests/conftest.py asked for its interpreter"
    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    with pytest.MonkeyPatch.context() as patch:
        # Its numbers in bfloat16 are the bits as integers, and a product is of those, unless they are widened first.
        patch.setattr(builder, "create_dot", lambda self, a, b, *rest: plain(self, widened(a), widened(b), *rest))
        # Checks every sum of integers for overflow, at half the speed.
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield paged
