"""The running requests' block tables, a row each; where kernels read them on the device, the same rows there."""

from __future__ import annotations

import numpy as np
import torch

from backend.engine.request import Request
from backend.engine.upload import upload


class BlockTables:
    """What lies beyond a request's table is the trash block."""

    def __init__(self, rows: int, blocks: int, trash_block: int, mirror: torch.device | None = None):
        """mirror: a device to keep the tables on as well, in one tensor for good: graphs read that very memory."""
        self.host = np.full((rows, blocks), trash_block, dtype=np.int64)
        self.mirror = None if mirror is None else upload(self.host.astype(np.int32), mirror)

    def update(self, moved: dict[Request, int]) -> None:
        """Takes over tables whose blocks have changed, each but for so many of its first blocks."""
        for request, kept in moved.items():
            self.host[request.row, kept : len(request.table)] = request.table[kept:]
        if self.mirror is not None and moved:
            rows = np.array([request.row for request in moved], dtype=np.int64)
            device = self.mirror.device
            self.mirror.index_copy_(0, upload(rows, device), upload(self.host[rows].astype(np.int32), device))
