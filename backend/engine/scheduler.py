"""What the next step computes. One rule covers prefill, chunks, decode, prefix hits and resuming:
every request has tokens that it knows and tokens that it has computed, and the difference is its work.

A step first serves requests that are one token behind (decode never waits for a long prompt), then those
with more to compute, in order of arrival, then admits waiting ones, all within one token budget. Out of
blocks, the newest running request gives up its own (preemption by recompute) and nobody is admitted.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from backend.engine.block_pool import BlockPool, OutOfBlocks
from backend.engine.config import EngineConfig
from backend.engine.request import Request


@dataclass(slots=True)
class Plan:
    """A step. `work` maps each scheduled request to its number of new tokens, decodes first."""

    work: dict[Request, int] = field(default_factory=dict)
    ops: list[list[str | int]] = field(default_factory=list)  # block moves in order, as in events.Step
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to) blocks to copy before computing
    preempted: list[Request] = field(default_factory=list)


def _order(request: Request) -> tuple[int, int]:
    return request.order


class Scheduler:
    def __init__(self, config: EngineConfig, pool: BlockPool):
        self.config = config
        self.pool = pool
        self.waiting: list[Request] = []  # both lists: best priority first, then in order of arrival
        self.running: list[Request] = []
        self.wave: set[Request] = set()  # static batching: who may be in the batch until it has drained
        self._free_rows = list(range(config.max_running))[::-1]

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands, and releases its blocks. Harmless when it is already out."""
        if request.admitted:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.wave.discard(request)

    def schedule(self) -> Plan:
        plan = Plan()
        budget = self.config.token_budget
        decoding = [r for r in self.running if r.to_compute == 1]
        chunked = [r for r in self.running if r.to_compute != 1]
        for request in decoding + chunked:
            if not request.admitted:  # preempted in this very step
                continue
            tokens = min(request.to_compute, budget, self._chunk(request))
            if tokens <= 0:
                continue
            budget += self._make_room(request, tokens, plan)
            if request.admitted:
                plan.work[request] = tokens
                budget -= tokens
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def _chunk(self, request: Request) -> int:
        """New tokens a request may compute in one step. Alone in the engine it may use the whole budget."""
        alone = not self.waiting and len(self.running) == 1 and self.running[0] is request
        return self.config.token_budget if alone else self.config.chunk_size

    def _make_room(self, request: Request, tokens: int, plan: Plan) -> int:
        """Blocks for `tokens` more, preempting the newest until they fit. Returns budget that victims gave back."""
        freed_budget = 0
        while True:
            try:
                self._grow(request, request.computed + tokens, plan)
                return freed_budget
            except OutOfBlocks:
                victim = self.running[-1]
                freed_budget += plan.work.pop(victim, 0)
                self._preempt(victim, plan)
                if victim is request:
                    return freed_budget

    def _grow(self, request: Request, tokens: int, plan: Plan) -> None:
        missing = -(-tokens // self.config.block_size) - len(request.table)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            request.table += blocks
            plan.ops.append(["alloc", request.number, *blocks])

    def _preempt(self, request: Request, plan: Plan) -> None:
        self.running.remove(request)
        self._release(request)
        request.lost, request.computed = request.computed, 0
        request.preemptions += 1
        plan.preempted.append(request)
        plan.ops.append(["preempt", request.number])
        self.add(request)  # by its arrival, so in front of all that came later

    def _release(self, request: Request) -> None:
        self.pool.release(request.table)
        request.table = []
        request.sealed_blocks = 0
        request.admitted = False
        request.decoding = False
        self._free_rows.append(request.row)
        request.row = -1

    def _admit(self, plan: Plan, budget: int) -> None:
        if self.config.policy == "static" and not self.wave:
            self.wave = set(self.waiting[: self.config.max_running])
        while self.waiting and budget > 0 and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            if self.config.policy == "static" and request not in self.wave:
                return
            forked = self._fork(request)
            if forked is None:
                found = self._cached_prefix(request)
                computed = len(found) * self.config.block_size
            elif forked:
                found, computed = forked
            else:
                return  # its sibling still computes the prompt that it will share
            alone = not self.running and len(self.waiting) == 1
            limit = self.config.token_budget if alone else self.config.chunk_size
            tokens = min(request.known - computed, budget, limit)
            copied = (
                1 if computed % self.config.block_size else 0
            )  # a forked table ends in a block that both will write
            needed = -(-(computed + tokens) // self.config.block_size) - len(found) + copied
            if needed > self.pool.free_after_sharing(found):
                return  # first come, first served: nobody overtakes
            self.waiting.pop(0)
            self._enter(request, found, computed, plan)
            if copied:
                self._copy_last(request, plan)
            self._grow(request, computed + tokens, plan)
            plan.work[request] = tokens
            budget -= tokens

    def _enter(self, request: Request, found: list[int], computed: int, plan: Plan) -> None:
        self.pool.share(found)
        request.table = list(found)
        request.computed = computed
        request.sealed_blocks = computed // self.config.block_size
        request.admitted = True
        request.row = self._free_rows.pop()
        if request.preemptions == 0:
            request.cached_tokens = computed
        else:
            request.recomputed_tokens += max(0, request.lost - computed)  # what the cache kept is not computed twice
        insort(self.running, request, key=_order)
        plan.ops.append(["admit", request.number, *found])

    def _cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the longest known prefix. One token at least is left to compute: its logits are needed."""
        if not self.pool.prefix_cache:
            return []
        full = (request.known - 1) // self.config.block_size
        return self.pool.lookup(request.hash_blocks(full, self.config.block_size))

    def _fork(self, request: Request) -> tuple[list[int], int] | bool | None:
        """n > 1: the blocks of a sibling's computed prompt. None: compute it itself; False: wait for the sibling."""
        parent = request.fork_of
        if parent is None or parent.done or request.preemptions:
            return None
        if parent.computed < parent.prompt_tokens:
            return False
        computed = (
            request.prompt_tokens - 1
        )  # the last prompt token is computed again: its logits choose the first word
        return parent.table[: -(-computed // self.config.block_size)], computed

    def _copy_last(self, request: Request, plan: Plan) -> None:
        """Copy-on-write: the last, partly filled block is about to be written by both holders."""
        old = request.table[-1]
        (new,) = self.pool.allocate(1)
        self.pool.release([old])
        request.table[-1] = new
        plan.copies.append((old, new))
        plan.ops.append(["copy", request.number, old, new])
