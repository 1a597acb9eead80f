"""A scripted engine: a deterministic scheduler and block pool without a model, which emits the real events.

It keeps its own truth (tables, reference counts, counters) in the plainest way, so that tests can hold the fold against
it, and it is cheap enough to drive the live picture at 50 steps a second with 64 requests in the batch.

    python tests/scripted_engine.py OUT.ndjson --steps 400 --blocks 96 --running 12 --seed 3
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from backend import events

WORDS = " the model reads every weight once per step and the cache grows by one token a stream é 日本 🙂 \n.".split(" ")


@dataclass(eq=False)
class Job:
    """One request: `pieces` are the texts of the tokens that it knows."""

    number: int
    pieces: list[str]
    prompt: int
    output: int  # tokens it will say
    shared: int = 0  # leading tokens that are the same for all jobs of its family
    family: int = 0
    parent: Job | None = None
    computed: int = 0
    table: list[int] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    sealed: int = 0
    said: int = 0
    cached: int = 0
    reached: int = 0
    recomputed: int = 0
    preemptions: int = 0
    admitted: bool = False
    decoding: bool = False  # said something since it was admitted: one token behind
    t_queued: float = 0.0
    t_admitted: float | None = None
    t_first: float | None = None

    @property
    def known(self) -> int:
        return self.prompt + self.said


class ScriptedEngine:
    """`emit` is called with stamped events. Each `step()` is one engine step of `1 / steps_per_s` simulated seconds,
    or, with `clock`, stamped with what the clock says."""

    def __init__(
        self,
        emit: Callable[[events.Event], None],
        *,
        blocks: int = 256,
        running: int = 8,
        block_size: int = 16,
        chunk: int = 64,
        prompt: tuple[int, int] = (8, 120),
        output: tuple[int, int] = (4, 60),
        shared_tokens: int = 48,
        families: int = 2,
        abort_share: float = 0.05,
        fork_share: float = 0.1,
        steps_per_s: float = 50.0,
        prefix_cache: bool = True,
        seed: int = 0,
        epoch: str = "scripted",
        clock: Callable[[], float] | None = None,
    ):
        self.emit_to = emit
        self.random = random.Random(seed)
        self.num_blocks, self.block_size, self.max_running, self.chunk = blocks, block_size, running, chunk
        self.prompt, self.output, self.shared_tokens, self.families = prompt, output, shared_tokens, families
        self.abort_share, self.fork_share, self.prefix_cache = abort_share, fork_share, prefix_cache
        self.step_s, self.clock, self.epoch = 1 / steps_per_s, clock, epoch
        self.seq, self.t, self.steps, self.jobs = 0, 0.0, 0, 0
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.done: dict[int, str] = {}
        self._reset_pool()

    # what a test may compare with

    @property
    def live(self) -> list[Job]:
        return self.running + self.waiting

    def state_of(self, job: Job) -> str:
        if not job.admitted:
            return "preempted" if job.preemptions else "queued"
        return "decode" if job.decoding else "prefill"

    # events

    def hello(self) -> None:
        self._emit(
            events.Hello(
                epoch=self.epoch,
                wall_time=1_700_000_000.0,
                model=events.ModelInfo(
                    name="scripted",
                    layers=30,
                    heads=9,
                    kv_heads=3,
                    head_dim=64,
                    kv_bytes_per_token=23040,
                    weight_bytes=269_000_000,
                    step_weight_bytes=269_000_000,
                    max_model_len=8192,
                ),
                device=events.DeviceInfo(name="none", threads=2),
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                config=self._config(),
            )
        )

    def submit(self, *, prompt: int | None = None, output: int | None = None, parent: Job | None = None) -> Job:
        self.jobs += 1
        family = self.random.randrange(self.families)
        length = prompt or self.random.randint(*self.prompt)
        shared = min(self.shared_tokens, length) if self.shared_tokens else 0
        if parent is not None:
            length, family, shared = parent.prompt, parent.family, parent.shared
        pieces = [WORDS[(i * 7 + family) % len(WORDS)] + " " for i in range(shared)]
        pieces += [self.random.choice(WORDS) + " " for _ in range(length - shared)]
        job = Job(
            self.jobs,
            pieces,
            length,
            output or self.random.randint(*self.output),
            shared,
            family,
            parent,
            t_queued=self.t,
        )
        self.waiting.append(job)
        self._emit(
            events.Queued(
                request=job.number,
                id=f"req-{job.number}",
                user=f"user {job.number % 8}",
                prompt_tokens=length,
                max_tokens=job.output,
            )
        )
        self._emit(events.Prompt(request=job.number, pieces=list(pieces)))
        return job

    def abort(self, job: Job) -> None:
        self._finish(job, "abort")

    def report(self, event: events.Event) -> None:
        self._emit(event)

    def clear(self) -> None:
        """Only when idle."""
        for block in range(self.num_blocks):
            self.hash_of[block] = None
        self.block_of.clear()
        self._emit(events.Cleared())

    def reconfigure(self, *, blocks: int, block_size: int) -> None:
        """Only when idle."""
        self.num_blocks, self.block_size = blocks, block_size
        self._reset_pool()
        self._emit(events.Configured(block_size=block_size, num_blocks=blocks, rebuilt=True, config=self._config()))

    def step(self) -> None:
        """Tops up the batch's queue, schedules, "computes", says."""
        self.steps += 1
        self.t = self.clock() if self.clock else self.t + self.step_s
        ops: list[list[str | int]] = []
        work: dict[Job, int] = {}
        preempted = False
        for job in list(self.running):
            if not job.admitted:
                continue
            tokens = min(job.known - job.computed, self.chunk)
            while job.admitted and not self._grow(job, job.computed + tokens, ops):
                victim = self.running[-1]
                work.pop(victim, None)
                self._preempt(victim, ops)
                preempted = True
            if job.admitted:
                work[job] = tokens
        if not preempted:
            self._admit(ops, work)

        decoders = [job for job in work if self.state_of(job) == "decode"]
        everyone = [job for job in self.running if self.state_of(job) == "decode" and job in decoders]
        prefill, texts, sealed, meanings = [], [], [], []
        for job, tokens in work.items():
            decoding = job in decoders
            if not decoding:
                prefill.append((job.number, tokens, job.computed))
                job.recomputed += max(0, min(job.computed + tokens, job.reached) - job.computed)
            job.computed += tokens
            self._seal(job, sealed, meanings)
            if job.computed == job.known:
                job.said += 1
                job.decoding = True
                piece = "" if self.random.random() < 0.05 else self.random.choice(WORDS) + " "
                job.pieces.append(piece)
                texts.append((job.number, piece))
                if job.t_first is None:
                    job.t_first = self.t
        held = sum(job.computed for job in self.running)
        self._emit(
            events.Step(
                step=self.steps,
                ops=ops,
                prefill=prefill,
                decode=None if len(everyone) == len(decoders) else [job.number for job in decoders],
                sealed=sealed,
                waiting=len(self.waiting),
                step_s=round(self.step_s * self.random.uniform(0.7, 0.9), 6),
                schedule_s=0.000213,
                build_s=0.000187,
                sample_s=0.000311,
                output_s=0.000402,
                forward_s=round(self.step_s * self.random.uniform(0.5, 0.6), 6),
                flops=float(sum(work.values()) * 269_000_000),
                attention_flops=float(held * 69_120),
                attention_s=round(self.step_s * 0.1, 6),
                weight_bytes=269_000_000,
                kv_read_bytes=held * 23040,
                kv_write_bytes=sum(work.values()) * 23040,
                activation_bytes=sum(work.values()) * 414_720,
            )
        )
        if texts:
            self._emit(events.Tokens(step=self.steps, texts=texts))
        if meanings:
            self._emit(events.Sealed(blocks=meanings))
        for job in list(self.running):
            if job.said >= job.output:
                self._finish(job, "stop" if job.number % 3 else "length")
            elif self.random.random() < self.abort_share / 50:
                self._finish(job, "abort")

    def run(self, steps: int, *, keep: int | None = None) -> Iterator[None]:
        """`steps` steps with always `keep` requests alive (default: a few more than fit into the batch)."""
        keep = self.max_running + 2 if keep is None else keep
        for _ in range(steps):
            self.top_up(keep)
            self.step()
            yield

    def top_up(self, keep: int) -> None:
        while len(self.live) < keep:
            parents = [job for job in self.running if job.computed >= job.prompt and job.prompt > 1]
            if parents and self.random.random() < self.fork_share:
                self.submit(parent=self.random.choice(parents))
            else:
                self.submit()

    def drain(self) -> None:
        while self.live:
            self.step()

    # pool and scheduler

    def _reset_pool(self) -> None:
        self.refs = [0] * self.num_blocks
        self.hash_of: list[str | None] = [None] * self.num_blocks
        self.block_of: dict[str, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))

    def _take(self) -> int:
        block, _ = self.free.popitem(last=False)
        if self.hash_of[block] is not None:
            del self.block_of[self.hash_of[block]]
            self.hash_of[block] = None
        self.refs[block] = 1
        return block

    def _grow(self, job: Job, tokens: int, ops: list) -> bool:
        missing = -(-tokens // self.block_size) - len(job.table)
        if missing > len(self.free):
            return False
        if missing > 0:
            blocks = [self._take() for _ in range(missing)]
            job.table += blocks
            ops.append(["alloc", job.number, *blocks])
        return True

    def _admit(self, ops: list, work: dict[Job, int]) -> None:
        while self.waiting and len(self.running) < self.max_running:
            job = self.waiting[0]
            parent = job.parent
            if job.preemptions or parent not in self.running or parent.computed < parent.prompt:
                parent = None  # nothing to share, or not any more: it computes its prompt itself
            if parent is not None:
                computed = job.prompt - 1
                found = parent.table[: -(-computed // self.block_size)]
            else:
                found = self._look_up(job)
                computed = len(found) * self.block_size
            copies = parent is not None and computed % self.block_size != 0
            tokens = min(job.known - computed, self.chunk)
            needed = -(-(computed + tokens) // self.block_size) - len(found) + copies
            if needed > len(self.free) - sum(1 for block in found if not self.refs[block]):
                return
            self.waiting.pop(0)
            for block in found:
                if not self.refs[block]:
                    del self.free[block]
                self.refs[block] += 1
            job.table, job.computed, job.admitted = list(found), computed, True
            job.sealed = computed // self.block_size
            if job.t_admitted is None:
                job.t_admitted, job.cached = self.t, computed
            self.running.append(job)
            ops.append(["admit", job.number, *found])
            if copies:
                old, new = job.table[-1], self._take()
                self._release([old])
                job.table[-1] = new
                ops.append(["copy", job.number, old, new])
            self._grow(job, computed + tokens, ops)
            work[job] = tokens

    def _look_up(self, job: Job) -> list[int]:
        found = []
        if self.prefix_cache:
            for digest in self._hashes(job, (job.known - 1) // self.block_size):
                block = self.block_of.get(digest)
                if block is None:
                    break
                found.append(block)
        return found

    def _hashes(self, job: Job, count: int) -> list[str]:
        size = self.block_size
        for i in range(len(job.hashes), count):
            parent = job.hashes[i - 1] if i else ""
            same = (
                job.family if (i + 1) * size <= job.shared else f"own {job.parent.number if job.parent else job.number}"
            )
            content = f"{parent}|{same}|{job.pieces[i * size : (i + 1) * size]}"
            job.hashes.append(hashlib.blake2b(content.encode(), digest_size=16).hexdigest())
        return job.hashes[:count]

    def _seal(self, job: Job, sealed: list[int], meanings: list) -> None:
        full = job.computed // self.block_size
        if full <= job.sealed or not self.prefix_cache:
            return
        hashes = self._hashes(job, full)
        for i in range(job.sealed, full):
            block = job.table[i]
            if hashes[i] not in self.block_of and self.hash_of[block] is None:
                self.block_of[hashes[i]] = block
                self.hash_of[block] = hashes[i]
                sealed.append(block)
                meanings.append((block, hashes[i], hashes[i - 1] if i else "", job.number, i * self.block_size))
        job.sealed = full

    def _preempt(self, job: Job, ops: list) -> None:
        self.running.remove(job)
        self._release(job.table)
        job.reached = max(job.reached, job.computed)
        job.table, job.computed, job.sealed, job.admitted, job.decoding = [], 0, 0, False, False
        job.preemptions += 1
        self.waiting.insert(0, job)
        ops.append(["preempt", job.number])

    def _release(self, table: list[int]) -> None:
        for block in reversed(table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
                if self.hash_of[block] is None:
                    self.free.move_to_end(block, last=False)

    def _finish(self, job: Job, reason: str) -> None:
        (self.running if job.admitted else self.waiting).remove(job)
        self._release(job.table)
        job.table, job.admitted = [], False
        self.done[job.number] = reason
        first = None if job.t_first is None else round(job.t_first - job.t_queued, 6)
        self._emit(
            events.Finished(
                request=job.number,
                reason=reason,
                prompt_tokens=job.prompt,
                cached_tokens=job.cached,
                output_tokens=job.said,
                preemptions=job.preemptions,
                recomputed_tokens=job.recomputed,
                queue_s=None if job.t_admitted is None else round(job.t_admitted - job.t_queued, 6),
                ttft_s=first,
                tpot_s=round(self.step_s, 6) if job.said > 1 else None,
                e2e_s=round(self.t - job.t_queued, 6),
            )
        )

    def _config(self) -> dict:
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "prefix_cache": self.prefix_cache,
            "max_running": self.max_running,
            "chunk_size": self.chunk,
        }

    def _emit(self, event: events.Event) -> None:
        self.seq += 1
        event.seq = self.seq
        event.t = round(self.clock() if self.clock else self.t, 6)
        self.emit_to(event)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--running", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with open(arguments.out, "wb") as out:
        engine = ScriptedEngine(
            lambda event: out.write(events.encode(event) + b"\n"),
            blocks=arguments.blocks,
            running=arguments.running,
            seed=arguments.seed,
        )
        engine.hello()
        for _ in engine.run(arguments.steps):
            pass
        engine.drain()


if __name__ == "__main__":
    main()
