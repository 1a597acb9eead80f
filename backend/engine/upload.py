"""Numbers from the host to where the model is, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On a GPU through fresh pinned memory: a copy from ordinary memory would wait for all that was launched before,
    and one from memory that is written again could be overtaken by the next step's numbers."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if device.type == "cpu" else tensor.to(device)
