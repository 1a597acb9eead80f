"""Computing a step: from a plan to logits. The runner owns the K and V pool and nothing of the policy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from backend.engine import attention
from backend.engine.block_tables import BlockTables
from backend.engine.config import EngineConfig
from backend.engine.gpu.graphs import Capture, Columns, DecodeGraphs, sizes
from backend.engine.gpu.spans import Spans
from backend.engine.kv_cache import KVCache
from backend.engine.native import paged as native
from backend.engine.request import Request
from backend.engine.sampling import all_plain, sample
from backend.engine.scheduler import Plan
from backend.engine.timer import ForwardTimer
from backend.engine.upload import upload
from backend.models.errors import ModelError, first_line

if TYPE_CHECKING:
    from backend.models.loader import LoadedModel


@dataclass(slots=True)
class StepResult:
    """Tokens for the requests that computed all they know, with the times it took (seconds)."""

    requests: list[Request]
    tokens: list[int]  # one for each of `requests`; -1: its logits were not finite
    logits: torch.Tensor | None  # [S, V] float32, for log probabilities
    build_s: float
    forward_s: float
    sample_s: float
    attention_s: float = 0.0  # part of forward_s; 0: not measured


class _Decoded(NamedTuple):
    """A decode step and what it said. Where the next one has the very same requests, its inputs follow from that, and
    hundreds of requests need not be looked through."""

    work: list[Request]  # in the plan's order
    singles: list[Request]  # in the order of the columns
    columns: Columns
    tokens: np.ndarray  # [S], in the order of `singles`
    plain: bool  # nobody among them asks for more than the best token


_row, _computed = attrgetter("row"), attrgetter("computed")


class Runner(Protocol):
    """`TorchRunner` computes; a modelled runner says how long it would take."""

    def configure(self, config: EngineConfig) -> None:
        """A new, empty pool."""

    def move(self, plan: Plan) -> None:
        """K and V where the step wants them: out to host memory, back in, copied. Before `execute`."""

    def execute(self, plan: Plan) -> StepResult: ...


def _on_its_device(method):
    """Triton and graphs work on the current GPU, which each thread has of its own."""

    @wraps(method)
    def there(self, *args):
        if self.device.type != "cuda":
            return method(self, *args)
        with torch.cuda.device(self.device):
            return method(self, *args)

    return there


class TorchRunner:
    def __init__(
        self,
        loaded: LoadedModel,
        *,
        native_attention: bool = False,
        triton_attention: bool = False,
        capture: Capture | None = None,
    ):
        """Attention of single tokens by torch.ops.kvscope, which is loaded, or by Triton's kernels, in every layer that
        they know. capture: makes a graph of a decode step, which takes Triton's kernels; None: there are no graphs.
        There is no pool before `configure`.
        """
        self.loaded, self.native_attention = loaded, native_attention
        self.device, self.capture = loaded.device, capture
        self._paged = None
        if triton_attention:
            from backend.engine.gpu import paged

            self._paged = paged
        self.notes: list[str] = []  # in words: are there graphs, and if not, why not
        if not attention.put_under(loaded.model):
            raise ModelError(f"{loaded.name}: this architecture does not let its attention be replaced")

    @torch.inference_mode()
    @_on_its_device
    def configure(self, config: EngineConfig) -> None:
        self.config = config
        self._graphs, self.notes = None, []  # graphs hold on to the old pool
        self._before: _Decoded | None = None
        self.cache = KVCache(config.num_blocks, config.block_size, self.device, self.loaded.dtype)
        widest = -(-config.max_model_len // config.block_size)
        mirror = self.device if self._paged else None
        self._tables = BlockTables(config.max_running, widest + 1, self.cache.trash_block, mirror)
        if self._paged and self.capture and config.kv_cache:
            self._graphs = self._captured()

    def _captured(self) -> DecodeGraphs | None:
        trash_slot = self.cache.trash_block * self.config.block_size
        try:
            made = DecodeGraphs(self._decode, self.capture, sizes(self.config.max_running), trash_slot, self.device)
            self.notes.append(f"decode steps as CUDA graphs, for {len(made.sizes)} sizes of the batch")
            return made
        except RuntimeError as error:  # the model asks its tensors for values on the way, or memory ran out
            self.notes.append(f"no CUDA graphs, each kernel is launched by itself: {first_line(error)}")
            return None

    @torch.inference_mode()
    def move(self, plan: Plan) -> None:
        for request, blocks in plan.swap_outs:
            request.saved = self.cache.save(blocks)
        for request, blocks in plan.swap_ins:
            self.cache.restore(blocks, request.saved)
            request.saved = None
        self.cache.copy_blocks(plan.copies)

    @torch.inference_mode()
    @_on_its_device
    def execute(self, plan: Plan) -> StepResult:
        start = time.perf_counter()
        if plan.moved:
            self._tables.update({request: kept for request, kept in plan.moved.items() if request in plan.work})
        before = self._following(plan)
        singles, columns = (before.singles, before.columns) if before else self._gathered(plan)
        # Those among them that compute all they know.
        requests = singles if plan.decode_only else [r for r in singles if r.computed + 1 == len(r.tokens)]
        step = None
        if not self._graphs or len(requests) < len(plan.work):
            ids, positions, last_rows, requests, step = self._inputs(plan, singles, columns, requests)
        built = time.perf_counter()
        timer = ForwardTimer(self.device)
        logits = self._graphs.run(columns) if step is None else self._forward(ids, positions, step, last_rows)
        timer.stop()
        tokens: list[int] = []
        if requests:
            plain = before.plain if before else all_plain(requests)
            chosen, logits = sample(logits, requests, self.loaded.stop_ids, plain)
            if plan.decode_only:
                self._before = _Decoded(list(plan.work), singles, columns, chosen, plain)
            tokens = chosen.tolist()
        forward_s = timer.seconds()
        end = time.perf_counter()
        # On a GPU the host saw only launches, and an event pair a layer would cost launches of its own.
        attention_s = step.seconds if step and self.device.type == "cpu" else 0.0
        sample_s = max(0.0, end - built - forward_s)
        return StepResult(requests, tokens, logits, built - start, forward_s, sample_s, attention_s)

    def _forward(self, ids, positions, step: attention.Step, rows) -> torch.Tensor:
        """Logits of `rows`, a tensor of indices into the step; 0: of all."""
        with attention.active(step):
            return self.loaded.model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
            ).logits[0]

    def _decode(self, columns: Columns) -> torch.Tensor:
        """The part of a decode step that a graph replays, on the graph's own memory."""
        singles = self._singles(columns.rows, columns.lengths, self.config.max_model_len)
        step = attention.Step(self.cache, columns.slots, [], [], singles, write=self._paged.write, captured=True)
        return self._forward(columns.ids, columns.positions, step, 0)

    def _singles(self, rows: torch.Tensor, lengths: torch.Tensor, longest: int) -> attention.CompiledSingles:
        return self._paged.Singles(rows, self._tables.mirror, lengths, longest, self.config.block_size)

    def _gathered(self, plan: Plan) -> tuple[list[Request], Columns]:
        """The requests with one new token, by context length, and their inputs."""
        # A span reads nothing from the pool where it has no context: without a KV cache there is nothing to read.
        singles = [request for request, count in plan.work.items() if count == 1] if self.config.kv_cache else []
        singles.sort(key=_computed)
        rows = np.fromiter(map(_row, singles), np.int64, len(singles))
        positions = np.fromiter(map(_computed, singles), np.int64, len(singles))
        ids = np.array([r.tokens[r.computed] for r in singles], dtype=np.int64)
        return singles, self._columns(ids, positions, rows)

    def _following(self, plan: Plan) -> _Decoded | None:
        """The step before with the columns of this one; None where it tells nothing of this one."""
        before, self._before = self._before, None
        if not before or not plan.decode_only or before.work != list(plan.work):
            return None
        return before._replace(columns=self._columns(before.tokens, before.columns.lengths, before.columns.rows))

    def _columns(self, ids: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> Columns:
        block_size = self.config.block_size
        slots = self._tables.host[rows, positions // block_size] * block_size + positions % block_size
        return Columns(ids, positions, slots, positions + 1, rows)

    def _inputs(self, plan: Plan, singles: list[Request], columns: Columns, requests: list[Request]):
        """Flat inputs of a step, requests with one new token first and by context length, then the longer spans."""
        block_size, tables = self.config.block_size, self._tables.host
        rows, lengths = columns.rows, columns.lengths
        ids, positions, slots = [columns.ids], [columns.positions], [columns.slots]
        spans, at = [], len(singles)
        cached, whole = self.config.kv_cache, at == len(plan.work)
        ends = range(at)  # the last rows of those who compute all they know
        if not whole or len(requests) < at:
            ends = [row for row, r in enumerate(singles) if r.computed + 1 == len(r.tokens)]
        for request in () if whole else [r for r, n in plan.work.items() if n > 1 or not cached]:
            first, end = request.computed, request.computed + plan.work[request]
            blocks = tables[request.row, : -(-end // block_size)]
            where = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:end]
            ids.append(np.array(request.tokens[first:end], dtype=np.int64))
            positions.append(np.arange(first, end, dtype=np.int64))
            slots.append(where[first:])
            spans.append(attention.Span(at, end - first, first, upload(where, self.device)))
            at += end - first
            if end == len(request.tokens):
                requests.append(request)
                ends.append(at - 1)

        groups = attention.Groups(tables, rows, lengths, block_size, self.device)
        step = attention.Step(self.cache, self._flat(slots), groups, spans)
        if self._paged:
            step.write = self._paged.write
            if spans:
                slots_of = [span.slots for span in spans]
                step.ragged = Spans(spans[0].first, [s.length for s in spans], [s.context for s in spans], slots_of)
        elif self.native_attention and spans and cached:  # without a cache the pool holds nothing to read
            step.ragged = native.Spans(spans)
        if self._paged and singles:
            longest = int(lengths[-1])
            step.singles = self._singles(upload(rows, self.device), upload(lengths, self.device), longest)
        elif self.native_attention and singles:
            longest = int(lengths[-1])
            own = torch.from_numpy(tables[rows, : -(-longest // block_size)].astype(np.int32))
            step.singles = native.Singles(own, torch.from_numpy(lengths.astype(np.int32)), longest, block_size)
        last_rows = 0 if len(ends) == at else self._flat([np.array(ends, dtype=np.int64)])
        return self._flat(ids), self._flat(positions), last_rows, requests, step

    def _flat(self, parts: list[np.ndarray]) -> torch.Tensor:
        return upload(np.concatenate(parts) if len(parts) > 1 else parts[0], self.device)
