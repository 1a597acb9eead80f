"""Decode steps as CUDA graphs, one a batch size: a thousand launches become one.

A small model's eager decode step waits for the host, which takes some microseconds for each of its kernels, not for
memory. A graph replays them all, but always on the same memory and for the same batch: a batch is padded to the next
captured size with rows that attend to nothing and write into the trash block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from backend.engine.upload import upload


class Columns(NamedTuple):
    """A decode step's inputs, one number a request: int64 [B] each, on the host or in a graph's own memory."""

    ids: np.ndarray | torch.Tensor
    positions: np.ndarray | torch.Tensor
    slots: np.ndarray | torch.Tensor  # where its K and V go
    lengths: np.ndarray | torch.Tensor  # tokens to attend to, the new one included
    rows: np.ndarray | torch.Tensor  # of the block tables


class Graph(Protocol):
    def replay(self) -> torch.Tensor:
        """Computes on what its inputs hold now. The answer's memory is the graph's, good until the next replay."""


Forward = Callable[[Columns], torch.Tensor]  # -> logits [B, V]
Capture = Callable[[Callable[[], torch.Tensor]], Graph]


def sizes(largest: int) -> list[int]:
    """Batch sizes to capture, ascending, up to `largest`: padding adds less than half to a batch of 16 or more."""
    steps = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1025, 64)]
    return [size for size in steps if size < largest] + [largest]


def padded(columns: Columns, size: int, trash_slot: int) -> np.ndarray:
    """int64 [5, size]: rows beyond the batch are of length 0, so their block table is never read."""
    count = len(columns.ids)
    made = np.zeros((len(columns), size), dtype=np.int64)
    made[:, :count] = columns
    made[Columns._fields.index("slots"), count:] = trash_slot
    return made


class DecodeGraphs:
    """A graph for each of `sizes`, captured now, the largest first: the others then live in its memory."""

    def __init__(self, forward: Forward, capture: Capture, sizes: list[int], trash_slot: int, device: torch.device):
        self.sizes, self.trash_slot, self.device = sizes, trash_slot, device
        self._captured: dict[int, tuple[torch.Tensor, Graph]] = {}
        for size in reversed(sizes):
            nobody = Columns(*(np.zeros(0, dtype=np.int64) for _ in Columns._fields))
            inputs = upload(padded(nobody, size, trash_slot), device)
            columns = Columns(*inputs)
            self._captured[size] = inputs, capture(lambda columns=columns: forward(columns))

    def run(self, columns: Columns) -> torch.Tensor:
        """Logits [B, V] of a batch no larger than the largest size; good until the next run."""
        count = len(columns.ids)
        size = self.sizes[bisect_left(self.sizes, count)]
        inputs, graph = self._captured[size]
        inputs.copy_(upload(padded(columns, size, self.trash_slot), self.device), non_blocking=True)
        return graph.replay()[:count]


class CudaGraphs:
    """Captures CUDA graphs that share one pool of memory, as only one replays at a time."""

    def __init__(self):
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Graph:
        """`compute` runs twice before: where steps run, so that the memory of K and V belongs there, and beside it as
        the capture will. Kernels are then compiled and work spaces taken."""
        compute()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may well talk to the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = compute()
        return _CudaGraph(graph, out)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, out: torch.Tensor):
        self._graph, self._out = graph, out

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._out
