"""What this machine's processor says of itself, for those who may not import torch too."""

from __future__ import annotations

from pathlib import Path

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether it has matrix instructions for bfloat16. Without /proc/cpuinfo: no."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return bool(BF16_FLAGS.intersection(flags.split()))
