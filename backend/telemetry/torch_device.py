"""Which of NVML's devices torch computes on: by UUID, since the two count in different orders."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def used(device: torch.device) -> tuple[str, ...]:
    """UUIDs as NVML writes them; "host" for the CPU; () where torch does not say, and for a device that is modelled.

    A MIG slice is known by the token in CUDA_VISIBLE_DEVICES: torch may name the slice or its card.
    """
    if device.type != "cuda":
        return ("host",) if device.type == "cpu" else ()
    import torch

    index = device.index if device.index is not None else torch.cuda.current_device()
    tokens = [token.strip() for token in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if index < len(tokens) and tokens[index].startswith("MIG-"):
        return (tokens[index],)
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return () if uuid is None else (f"GPU-{uuid}", f"MIG-{uuid}")
