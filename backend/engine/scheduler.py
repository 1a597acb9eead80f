"""What the next step computes. One rule covers prefill, chunks, decode, prefix hits and resuming:
every request has tokens that it knows and tokens that it has computed, and the difference is its work.

A step first serves requests that are one token behind (decode never waits for a long prompt), then those
with more to compute, in order of arrival, then admits waiting ones, all within one token budget. Out of
blocks, the newest running request gives up its own and nobody is admitted: it computes its tokens again later, or
their K and V wait in host memory (swap).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from backend.engine.allocator import Allocator
from backend.engine.block_pool import OutOfBlocks
from backend.engine.config import EngineConfig
from backend.engine.request import Request


@dataclass(slots=True)
class Plan:
    """A step. `work` maps each scheduled request to its number of new tokens, decodes first."""

    work: dict[Request, int] = field(default_factory=dict)
    ops: list[list[str | int]] = field(default_factory=list)  # block moves in order, as in events.Step
    # K and V to move before computing, in this order:
    swap_outs: list[tuple[Request, list[int]]] = field(default_factory=list)  # its filled blocks, to host memory
    swap_ins: list[tuple[Request, list[int]]] = field(default_factory=list)  # the last of them, back to these blocks
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to)
    preempted: list[Request] = field(default_factory=list)
    # Whose block tables changed, and how many of its first blocks are those that it had.
    moved: dict[Request, int] = field(default_factory=dict)
    decode_only: bool = False  # each request in it was one token behind before the step


def _order(request: Request) -> tuple[int, int]:
    return request.order


class Scheduler:
    def __init__(self, config: EngineConfig, allocator: Allocator):
        self.config = config
        self.pool, self.blocks_for = allocator.pool, allocator.blocks_for
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
        running, budget, block_size = self.running, self.config.token_budget, self.config.block_size
        served: list[Request] = []
        if self.config.kv_cache and len(running) <= budget:
            # Most of all steps of most requests: one more token, into a block that it has.
            served = [r for r in running if r.decoding and r.computed < len(r.table) * block_size]
        plan = Plan(dict.fromkeys(served, 1))
        work = plan.work
        others = [r for r in running if r not in work] if len(work) < len(running) else []
        chunked = [r for r in others if r.to_compute > 1]
        budget -= len(work)
        for request in [r for r in others if r.to_compute == 1] + chunked:
            if not request.admitted:  # preempted in this very step
                continue
            tokens = self._portion(request.to_compute, budget)
            if not tokens:
                continue
            budget += self._make_room(request, tokens, plan)
            if request.admitted:
                plan.work[request] = tokens
                budget -= tokens
        decodes = len(work)
        if not plan.preempted:
            self._admit(plan, budget)
        plan.decode_only = not chunked and len(work) == decodes and self.config.kv_cache
        return plan

    def _portion(self, missing: int, budget: int) -> int:
        """New tokens that a request with `missing` ones computes in this step; 0: it waits for the next.

        Alone in the engine it may use the whole budget. Without a KV cache it is all or nothing: there is no half of a
        sequence to go on from.
        """
        if not self.config.kv_cache:
            return missing if missing <= budget else 0
        alone = len(self.running) + len(self.waiting) == 1
        return min(missing, budget, self.config.token_budget if alone else self.config.chunk_size)

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
        missing = self.blocks_for(request, tokens) - len(request.table)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            plan.moved.setdefault(request, len(request.table))
            request.table += blocks
            plan.ops.append(["alloc", request.number, *blocks])

    def _preempt(self, request: Request, plan: Plan) -> None:
        self.running.remove(request)
        if self.config.preemption == "swap" and request.computed:
            filled = -(-request.computed // self.config.block_size)
            plan.swap_outs.append((request, request.table[:filled]))
            request.swapped = request.computed
        self._release(request)
        request.lost, request.computed = request.computed, 0
        request.preemptions += 1
        plan.preempted.append(request)
        plan.ops.append(["swap_out" if request.swapped else "preempt", request.number])
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
            start = self._start(request)
            if start is None:
                return  # its sibling still computes the prompt that it will share
            found, computed = start
            tokens = self._portion(request.known - computed, budget)
            copied = len(found) * self.config.block_size > computed  # a forked table ends in a block both will write
            needed = self.blocks_for(request, computed + tokens) - len(found) + copied
            if not tokens or not self.pool.fits(needed, found):
                return  # first come, first served: nobody overtakes
            self.waiting.pop(0)
            self._enter(request, found, computed, plan)
            if copied:
                self._copy_last(request, plan)
            self._grow(request, computed + tokens, plan)
            if request.swapped:
                filled = -(-computed // self.config.block_size)
                plan.swap_ins.append((request, request.table[len(found) : filled]))
                request.swapped = 0
            plan.work[request] = tokens
            budget -= tokens

    def _start(self, request: Request) -> tuple[list[int], int] | None:
        """Where a waiting request begins: (blocks that it shares, tokens that need no computing); None: not yet."""
        size = self.config.block_size
        if request.swapped:
            return self._cached(request, request.swapped // size), request.swapped
        parent = request.fork_of
        if parent is None or parent.done or request.preemptions or not self.pool.can_share or not self.config.kv_cache:
            # One token at least is left to compute: its logits are needed.
            found = self._cached(request, (request.known - 1) // size)
            return found, len(found) * size
        if parent.computed < parent.prompt_tokens:
            return None
        computed = request.prompt_tokens - 1  # the last prompt token again: its logits choose the first word
        return parent.table[: -(-computed // size)], computed

    def _cached(self, request: Request, full: int) -> list[int]:
        """Cached blocks of the longest prefix of its first `full` blocks."""
        if not self.pool.prefix_cache:
            return []
        return self.pool.lookup(request.hash_blocks(full, self.config.block_size))

    def _enter(self, request: Request, found: list[int], computed: int, plan: Plan) -> None:
        self.pool.share(found)
        plan.moved[request] = 0
        request.table = list(found)
        request.computed = computed
        request.sealed_blocks = min(len(found), computed // self.config.block_size)
        request.admitted = True
        request.row = self._free_rows.pop()
        if request.preemptions == 0:
            request.cached_tokens = computed
        else:
            request.recomputed_tokens += max(0, request.lost - computed)  # what the cache kept is not computed twice
        insort(self.running, request, key=_order)
        plan.ops.append(["swap_in" if request.swapped else "admit", request.number, *found])

    def _copy_last(self, request: Request, plan: Plan) -> None:
        """Copy-on-write: the last, partly filled block is about to be written by both holders."""
        old = request.table[-1]
        (new,) = self.pool.allocate(1)
        self.pool.release([old])
        request.table[-1] = new
        plan.copies.append((old, new))
        plan.ops.append(["copy", request.number, old, new])
