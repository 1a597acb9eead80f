"""Which number format to compute in: the fastest one that this device has instructions for."""

from __future__ import annotations

from pathlib import Path

import torch

from backend.cpu import has_bf16
from backend.models.errors import ModelError

NAMES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}

_SLOW_ON_CPU = "one to eight times slower than float32"  # measured on AVX2: equal at batch 1, 4-8 times from 8 on


def choose(device: torch.device, asked: str | None = None) -> tuple[torch.dtype, str]:
    """(dtype, a note in plain words that says why). Raises ModelError for a name that is no dtype we run."""
    if asked in (None, "auto"):
        return _best(device)
    dtype = NAMES.get(asked.lower().removeprefix("torch."))
    if dtype is None:
        raise ModelError(f"unknown dtype '{asked}'; known: auto, float32, bfloat16, float16")
    return dtype, _warning(device, dtype)


def _best(device: torch.device) -> tuple[torch.dtype, str]:
    if device.type == "cuda":
        if gpu_has_bf16():
            return torch.bfloat16, "bfloat16: this GPU computes it natively"
        return torch.float16, "float16: this GPU has no bfloat16 arithmetic; values beyond 65504 overflow"
    if cpu_has_bf16():
        return torch.bfloat16, "bfloat16: this CPU has instructions for it, and it halves the bytes a step reads"
    return torch.float32, "float32: this CPU has no bfloat16 instructions, without which half precision is slower"


def _warning(device: torch.device, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu" and dtype == torch.float16:
        return f"{name} was asked for: on a CPU it is {_SLOW_ON_CPU}"
    if device.type == "cpu" and dtype == torch.bfloat16 and not cpu_has_bf16():
        return (
            f"{name} was asked for: half the bytes of float32. This CPU has no instructions for it; where the compiled "
            f"kernels do not widen it, it is {_SLOW_ON_CPU}"
        )
    if device.type == "cuda" and dtype == torch.bfloat16 and not gpu_has_bf16():
        return f"{name} was asked for: this GPU emulates it, slowly; float16 or float32 are native"
    return f"{name} was asked for"


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Bfloat16 matrix instructions (AVX512-BF16, AMX, Arm BF16) *and* oneDNN kernels that use them.

    oneDNN's own answer is not enough: it says yes to any AVX512 machine and then emulates. Without /proc/cpuinfo: no.
    """
    if not has_bf16(cpuinfo):
        return False
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())


def gpu_has_bf16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)
