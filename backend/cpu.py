"""What this machine's processor says of itself, and how threads wait on it; for those who may not import torch too."""

from __future__ import annotations

from pathlib import Path

# How often a thread looks for work before it sleeps: layers follow on each other faster than a sleeper wakes (1.7 times
# the speed at one request on two quiet cores), but not for long, because the page wants the cores too.
SPIN_COUNT = "3000"
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether it has matrix instructions for bfloat16. Without /proc/cpuinfo: no."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return bool(BF16_FLAGS.intersection(flags.split()))
