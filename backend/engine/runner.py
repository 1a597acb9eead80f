"""Computing a step: from a plan to logits. The runner owns the K and V pool and nothing of the policy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from backend.engine import attention
from backend.engine.config import EngineConfig
from backend.engine.kv_cache import KVCache
from backend.engine.request import Request
from backend.engine.sampling import sample
from backend.engine.scheduler import Plan
from backend.models.errors import ModelError

if TYPE_CHECKING:
    from backend.models.loader import LoadedModel


@dataclass(slots=True)
class StepResult:
    """Tokens for the requests that computed all they know, in the plan's order, with the times it took (seconds)."""

    sampled: dict[Request, int]  # -1: its logits were not finite
    logits: torch.Tensor | None  # [S, V] float32 in the order of `sampled`, for log probabilities
    build_s: float
    forward_s: float
    sample_s: float
    attention_s: float = 0.0  # part of forward_s; 0: not measured


class Runner(Protocol):
    """`TorchRunner` computes; a modelled runner says how long it would take."""

    def configure(self, config: EngineConfig) -> None:
        """A new, empty pool."""

    def move(self, plan: Plan) -> None:
        """K and V where the step wants them: out to host memory, back in, copied. Before `execute`."""

    def execute(self, plan: Plan) -> StepResult: ...


class TorchRunner:
    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, native_attention: bool = False):
        """`native_attention`: by torch.ops.kvscope, which is loaded, in every layer whose attention it knows."""
        self.loaded, self.native_attention = loaded, native_attention
        self.device = loaded.device
        loaded.model.set_attn_implementation(attention.NAME)
        if loaded.model.config._attn_implementation != attention.NAME:
            raise ModelError(f"{loaded.name}: this architecture does not let its attention be replaced")
        self.configure(config)

    def configure(self, config: EngineConfig) -> None:
        self.config = config
        self.cache = KVCache(config.num_blocks, config.block_size, self.device)
        widest = -(-config.max_model_len // config.block_size)
        # One row a running request; what lies beyond a request's table is the trash block.
        self._tables = np.full((config.max_running, widest + 1), self.cache.trash_block, dtype=np.int64)

    @torch.inference_mode()
    def move(self, plan: Plan) -> None:
        for request, blocks in plan.swap_outs:
            request.saved = self.cache.save(blocks)
        for request, blocks in plan.swap_ins:
            self.cache.restore(blocks, request.saved)
            request.saved = None
        self.cache.copy_blocks(plan.copies)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        start = time.perf_counter()
        ids, positions, last_rows, requests, step = self._inputs(plan)
        built = time.perf_counter()
        with attention.active(step):
            logits = self.loaded.model(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last_rows
            ).logits[0]
        attention_s = step.seconds
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            attention_s = 0.0  # the host saw only launches, and an event pair a layer would cost launches of its own
        computed = time.perf_counter()
        sampled: dict[Request, int] = {}
        if requests:
            tokens, logits = sample(logits, requests, self.loaded.stop_ids)
            sampled = dict(zip(requests, tokens, strict=True))
        end = time.perf_counter()
        return StepResult(sampled, logits, built - start, computed - built, end - computed, attention_s)

    def _inputs(self, plan: Plan):
        """Flat inputs of a step, requests with one new token first and by context length, then the longer spans."""
        block_size = self.config.block_size
        moved = {op[1] for op in plan.ops}
        for request in plan.work:
            if request.number in moved:
                self._tables[request.row, : len(request.table)] = request.table
        # What has no context reads nothing from the pool: without a KV cache there is none to read.
        singles = sorted((r for r, n in plan.work.items() if n == 1 and r.computed), key=lambda r: r.computed)
        longer = [(r, n) for r, n in plan.work.items() if n > 1 or not r.computed]

        rows = np.array([r.row for r in singles], dtype=np.int64)
        before = np.array([r.computed for r in singles], dtype=np.int64)
        ids = [np.array([r.tokens[r.computed] for r in singles], dtype=np.int64)]
        positions = [before]
        slots = [self._tables[rows, before // block_size] * block_size + before % block_size]
        groups, spans = [], []
        for first, end in attention.group_rows(before + 1, block_size):
            longest = int(before[end - 1]) + 1
            blocks = self._tables[rows[first:end], : -(-longest // block_size)]
            groups.append(attention.Group(first, blocks, before[first:end] + 1, block_size, self.device))

        at = len(singles)
        ends = list(range(at))
        for request, count in longer:
            first, end = request.computed, request.computed + count
            blocks = self._tables[request.row, : -(-end // block_size)]
            where = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:end]
            ids.append(np.array(request.tokens[first:end], dtype=np.int64))
            positions.append(np.arange(first, end, dtype=np.int64))
            slots.append(where[first:])
            spans.append(attention.Span(at, count, first, torch.from_numpy(where).to(self.device)))
            at += count
            ends.append(at - 1)

        order = [*singles, *(r for r, _ in longer)]
        complete = [(r, end) for r, end in zip(order, ends, strict=True) if r.computed + plan.work[r] == r.known]
        step = attention.Step(self.cache, self._flat(slots), groups, spans)
        if self.native_attention and singles:
            longest = int(before[-1]) + 1
            tables = self._tables[rows, : -(-longest // block_size)].astype(np.int32)
            lengths = torch.from_numpy((before + 1).astype(np.int32))
            step.singles = attention.Singles(torch.from_numpy(tables), lengths, longest)
        last_rows = self._flat([np.array([end for _, end in complete], dtype=np.int64)])
        return self._flat(ids)[None], self._flat(positions)[None], last_rows, [r for r, _ in complete], step

    def _flat(self, parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.device)
