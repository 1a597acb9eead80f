"""The engine: requests in, one step at a time, facts and text out. Not thread-safe; `loop.py` gives it its thread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from operator import attrgetter

import msgspec

from backend.engine import allocator
from backend.engine.config import EngineConfig, Limits, changed
from backend.engine.detokenize import IncrementalDecoder, StopStrings
from backend.engine.request import Delta, Request, SamplingParams, TokenLogprob, Usage
from backend.engine.runner import Runner, StepResult
from backend.engine.sampling import top_logprobs
from backend.engine.scheduler import Plan, Scheduler
from backend.engine.text import Text
from backend.events import Cleared, Configured, Event, Fault, Finished, Prompt, Queued, Sealed, Step, Tokens
from backend.planner.step import Costs

_decoding, _computed = attrgetter("decoding"), attrgetter("computed")

# Switches that the scheduler reads anew in every step; the others shape the pool and wait for an idle engine.
LIVE_SWITCHES = {"chunk_size", "token_budget", "max_waiting"}


class Refused(Exception):
    """A request that can never be served as asked; `param` names the field at fault."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


class Busy(Exception):
    """The queue is full; try again later."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotIdle(Exception):
    """Only possible while no request is in the engine."""


class Output:
    """The text side of a request: decoder, stop strings."""

    __slots__ = ("decoder", "stops")

    def __init__(self, decode: Callable[[list[int]], str], request: Request):
        self.decoder = IncrementalDecoder(decode, request.tokens)
        self.stops = StopStrings(request.params.stop, request.params.include_stop)


class Engine:
    """`text` decodes ids (`decode(ids) -> str`, `piece(id) -> str`); `emit(event)` must cost next to nothing."""

    front_wait_s = 0.0  # wall time for which each request is held in front; only where a server is modelled

    def __init__(
        self,
        runner: Runner,
        text: Text,
        shape: Costs,
        config: EngineConfig,
        emit: Callable[[Event], None],
        stop_ids: Iterable[int] = (),
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.runner, self.text, self.shape = runner, text, shape
        self.stop_ids = frozenset(stop_ids)
        self.limits = limits
        self._emit_to = emit
        self._clock, self._started = clock, clock()
        self._seq = self._number = self._steps = 0
        self._requests: dict[int, Request] = {}
        self._outputs: dict[int, Output] = {}
        self._build(config)

    # ---- requests ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds on the engine's monotonic clock."""
        return self._clock() - self._started

    @property
    def steps(self) -> int:
        """Made so far."""
        return self._steps

    @property
    def idle(self) -> bool:
        return not self._requests

    def limit(self) -> int:
        """Tokens that a request may come to know: the model's length, or the pool's if that is shorter.

        The last token's K and V are never needed, so the pool holds one token more than it has slots.
        """
        slots = self.config.num_blocks * self.config.block_size
        return min(self.config.max_model_len, slots + 1) if self.config.kv_cache else self.config.max_model_len

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Raises Refused, with numbers, for what can never be served."""
        if prompt_tokens == 0:
            raise Refused("the prompt is empty: at least one token is needed", "prompt")
        limit = self.limit()
        why = (
            f"the model's context of {limit} tokens"
            if limit == self.config.max_model_len
            else f"the KV pool ({self.config.num_blocks} blocks of {self.config.block_size} tokens)"
        )
        if prompt_tokens >= limit:
            raise Refused(f"the prompt has {prompt_tokens} tokens and leaves no room for an answer in {why}", "prompt")
        if prompt_tokens + params.max_tokens > limit:
            raise Refused(
                f"prompt ({prompt_tokens} tokens) and max_tokens ({params.max_tokens}) do not fit {why}; "
                f"max_tokens can be at most {limit - prompt_tokens}",
                "max_tokens",
            )

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        id: str,
        user: str = "",
        n: int = 1,
        salt: bytes = b"",
        priority: int = 0,
        arrived: float | None = None,
    ) -> list[Request]:
        """Queues `n` continuations of one prompt. Raises Refused or Busy, and then has queued none."""
        self.check(len(tokens), params)
        waiting = len(self.scheduler.waiting)
        if waiting + n > self.config.max_waiting:
            raise Busy(f"{waiting} requests are waiting, the queue holds {self.config.max_waiting}", retry_after_s=1.0)
        arrived = self.now() if arrived is None else arrived
        requests: list[Request] = []
        for i in range(n):
            self._number += 1
            request = Request(
                number=self._number,
                id=id if n == 1 else f"{id}-{i}",
                group=id,
                tokens=list(tokens),
                prompt_tokens=len(tokens),
                params=params,
                user=user,
                priority=priority,
                salt=salt,
                fork_of=requests[0] if requests else None,
                t_queued=arrived,
                rng=random.Random() if params.seed is None else random.Random(params.seed + i),
            )
            requests.append(request)
            self._requests[request.number] = request
            self._outputs[request.number] = Output(self.text.decode, request)
            self._emit(
                Queued(
                    request=request.number,
                    id=request.id,
                    user=user,
                    prompt_tokens=len(tokens),
                    max_tokens=params.max_tokens,
                ),
                t=arrived,
            )
            self._emit(Prompt(request=request.number, pieces=[self.text.piece(token) for token in tokens]))
            self.scheduler.add(request)
        return requests

    def abort(self, number: int) -> Delta | None:
        """Ends a request in whatever state it is. None when there is no such request (any more)."""
        request = self._requests.get(number)
        return self._finish(request, "abort") if request else None

    def content(self, number: int, begin: int, end: int) -> tuple[list[int], bytes]:
        """Token ids begin … end - 1 of a live request, and the namespace of its hashes; for who publishes blocks."""
        request = self._requests.get(number)
        return (request.tokens[begin:end], request.salt) if request else ([], b"")

    def find(self, id: str) -> list[int]:
        """Numbers of the live requests with this API id, all siblings of an n > 1 included."""
        return [r.number for r in self._requests.values() if id in (r.id, r.group)]

    # ---- switches ------------------------------------------------------------------------------------------------

    def configure(self, changes: dict) -> EngineConfig:
        """Raises ConfigError for what does not exist, NotIdle where an idle engine is needed."""
        new = changed(self.config, changes)
        self.limits.check(new)
        really = {k for k in changes if getattr(new, k) != getattr(self.config, k)}
        if really <= LIVE_SWITCHES:
            self.config = self.scheduler.config = new
        elif not self.idle:
            raise NotIdle(
                f"{', '.join(sorted(really - LIVE_SWITCHES))}: {len(self._requests)} requests are in the engine"
            )
        else:
            self._build(new)
        self._emit(
            Configured(
                block_size=new.block_size,
                num_blocks=new.num_blocks,
                rebuilt=not really <= LIVE_SWITCHES,
                config=msgspec.structs.asdict(new),
            )
        )
        return new

    def reset_prefix_cache(self) -> None:
        if not self.idle:
            raise NotIdle(f"the prefix cache is emptied when idle; {len(self._requests)} requests are in the engine")
        self.pool.clear()
        self._emit(Cleared())

    def _build(self, config: EngineConfig) -> None:
        self.runner.configure(config)
        self.config = config
        memory = allocator.make(config)
        self.pool, self.scheduler = memory.pool, Scheduler(config, memory)

    # ---- a step --------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Schedules, computes and commits one step. [] when there is nothing to do."""
        start = self.now()
        plan = self.scheduler.schedule()
        scheduled = self.now()
        try:
            self.runner.move(plan)
        except Exception as error:  # most likely no room in host memory; then K and V that were to go there are lost
            return self._give_up(plan, error, [*plan.work, *(request for request, _ in plan.swap_outs)])
        moved = self.now()
        if not plan.work:
            self._tell_moves(plan, moved - scheduled)  # all that could have run was preempted; the next step goes on
            return []
        for request in plan.moved:  # who was admitted is among them
            if request.t_admitted is None:
                request.t_admitted = scheduled
        try:
            result = self.runner.execute(plan)
        except Exception as error:  # whatever the model raised: these requests end, the others and the engine go on
            return self._give_up(plan, error, list(plan.work))
        self._steps += 1
        computed = self.now()
        event = self._describe(plan)
        self._account(event, plan, result)
        sealed = self._advance(plan)
        event.sealed = [block for block, *_ in sealed]
        deltas = self._say(result, computed)
        event.waiting = len(self.scheduler.waiting)
        event.schedule_s = scheduled - start
        self._account_moves(event, plan, moved - scheduled)
        end = self.now()
        event.output_s = end - computed
        event.step_s = end - start
        self._emit(event)
        if sealed:
            self._emit(Sealed(blocks=[(b, h.hex(), p.hex(), number, at) for b, h, p, number, at in sealed]))
        self._emit(Tokens(step=self._steps, texts=[(d.request, d.text) for d in deltas]))
        for delta in deltas:
            if delta.finish_reason:
                self._finish(self._requests[delta.request], delta.finish_reason, delta)
        if self.idle:
            self.pool.check([])
        return deltas

    def _tell_moves(self, plan: Plan, move_s: float = 0.0) -> None:
        """Block moves of a step that computed nothing: viewers must hear of every block that changed hands."""
        if plan.ops:
            event = Step(step=self._steps, ops=plan.ops, decode=[], waiting=len(self.scheduler.waiting))
            self._account_moves(event, plan, move_s)
            self._emit(event)

    def _describe(self, plan: Plan) -> Step:
        """What the step did, told before the counters move."""
        running = self.scheduler.running
        if plan.decode_only and len(plan.work) == len(running) and all(map(_decoding, running)):
            return Step(step=self._steps, ops=plan.ops)  # as most steps are
        decode = [r.number for r in plan.work if r.decoding] if self.config.kv_cache else []
        prefill = [(r.number, n, r.computed) for r, n in plan.work.items() if not (r.decoding and self.config.kv_cache)]
        everyone = sum(map(_decoding, running))
        return Step(step=self._steps, ops=plan.ops, prefill=prefill, decode=None if len(decode) == everyone else decode)

    def _advance(self, plan: Plan) -> list[tuple[int, bytes, bytes, int, int]]:
        """Counts what was computed and offers blocks that became full to the prefix cache."""
        size, sealed = self.config.block_size, []
        if not self.config.kv_cache:
            return sealed  # nothing was kept: the next step computes it all again
        for request, count in plan.work.items():
            request.computed += count
            full = request.computed // size
            if not self.pool.prefix_cache or full == request.sealed_blocks:
                continue
            hashes = request.hash_blocks(full, size)
            for i in range(request.sealed_blocks, full):
                if self.pool.seal(request.table[i], hashes[i]):
                    sealed.append((request.table[i], hashes[i], hashes[i - 1] if i else b"", request.number, i * size))
            request.sealed_blocks = full
        return sealed

    def _say(self, result: StepResult, now: float) -> list[Delta]:
        """One new token for each request that has computed all it knew."""
        deltas = []
        for row, (request, token) in enumerate(zip(result.requests, result.tokens, strict=True)):
            if token < 0:
                message = "the model's logits are not finite (NaN or infinity); try another dtype"
                deltas.append(Delta(request=request.number, finish_reason="error", message=message))
                continue
            request.tokens.append(token)
            request.decoding = True
            if request.t_first is None:
                request.t_first = now
            request.t_last = now
            delta = Delta(request=request.number, token_ids=(token,))
            if request.params.logprobs is not None:
                delta.logprobs = (self._logprob(result.logits[row], token, request.params.logprobs),)
            self._continue_text(request, token, delta)
            deltas.append(delta)
        return deltas

    def _continue_text(self, request: Request, token: int, delta: Delta) -> None:
        """Text of a new token, and whether it is the last one."""
        params, output = request.params, self._outputs[request.number]
        if token in params.stop_token_ids or (token in self.stop_ids and not params.ignore_eos):
            delta.finish_reason = "stop"
            delta.stop_reason = token if token in params.stop_token_ids else None
            text = output.decoder.add(token) if params.include_stop else output.decoder.flush()
        else:
            text = output.decoder.add(token)
            if request.output_tokens >= params.max_tokens or request.known >= self.config.max_model_len:
                delta.finish_reason = "length"
                text += output.decoder.flush()
        if request.output_tokens <= params.min_tokens and not delta.finish_reason:
            delta.text = output.stops.pass_by(text)
            return
        delta.text, stop = output.stops.add(text)
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        elif delta.finish_reason:
            delta.text += output.stops.flush()

    def _logprob(self, logits, token: int, count: int) -> TokenLogprob:
        chosen, best = top_logprobs(logits, token, count)
        return TokenLogprob(token, self.text.piece(token), chosen, [(i, self.text.piece(i), p) for i, p in best])

    def _finish(self, request: Request, reason: str, delta: Delta | None = None) -> Delta:
        """Blocks back, the last event, the last delta."""
        delta = delta or Delta(request=request.number)
        self.scheduler.remove(request)
        request.done = True
        del self._requests[request.number]
        output = self._outputs.pop(request.number)
        if reason == "abort":
            delta.text = output.decoder.flush() + output.stops.flush()
        now = self.now()
        first, last, spoken = request.t_first, request.t_last, request.output_tokens
        delta.finish_reason = reason
        delta.usage = Usage(
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            output_tokens=spoken,
            preemptions=request.preemptions,
            queue_s=None if request.t_admitted is None else request.t_admitted - request.t_queued,
            ttft_s=None if first is None else first - request.t_queued,
            tpot_s=(last - first) / (spoken - 1) if spoken > 1 else None,
            e2e_s=now - request.t_queued,
        )
        self._emit(
            Finished(
                request=request.number,
                reason=reason,
                recomputed_tokens=request.recomputed_tokens,
                message=delta.message,
                **msgspec.structs.asdict(delta.usage),
            )
        )
        return delta

    def _give_up(self, plan: Plan, error: Exception, lost: list[Request]) -> list[Delta]:
        message = f"{type(error).__name__}: {error}"
        self._tell_moves(plan)
        self._emit(Fault(message=f"a step failed, its {len(lost)} requests were ended: {message}"))
        return [self._finish(request, "error", Delta(request=request.number, message=message)) for request in lost]

    def _account(self, event: Step, plan: Plan, result: StepResult) -> None:
        spans = zip(plan.work.values(), map(_computed, plan.work), strict=True)
        cost = self.shape.step_cost(spans, len(result.tokens))
        event.flops, event.attention_flops = float(cost.flops), float(cost.attention_flops)
        event.weight_bytes, event.activation_bytes = cost.weight_bytes, cost.activation_bytes
        event.kv_read_bytes, event.kv_write_bytes = cost.kv_read_bytes, cost.kv_write_bytes
        event.build_s, event.forward_s, event.sample_s = result.build_s, result.forward_s, result.sample_s
        event.attention_s = round(result.attention_s, 6)

    def _account_moves(self, event: Step, plan: Plan, seconds: float) -> None:
        if plan.swap_outs or plan.swap_ins or plan.copies:
            event.move_s = seconds
        blocks = sum(len(blocks) for _, blocks in [*plan.swap_outs, *plan.swap_ins])
        event.swap_bytes = blocks * self.config.block_size * self.shape.kv_bytes_per_token

    def _emit(self, event: Event, t: float | None = None) -> None:
        self._seq += 1
        event.seq, event.t = self._seq, self.now() if t is None else t
        self._emit_to(event)

    # ---- looking in ----------------------------------------------------------------------------------------------

    def report(self, event: Event, t: float | None = None) -> None:
        """Puts a fact of the surroundings (Hello, Fault, Sample) into the stream, stamped like the engine's own.

        `t`: when it was so, if not now.
        """
        self._emit(event, t)

    def state(self) -> dict:
        """For GET /engine/state: config, blocks, live requests, counters."""
        pool, size = self.pool, self.config.block_size
        return {
            "config": msgspec.structs.asdict(self.config),
            "blocks": {
                "total": pool.num_blocks,
                "block_size": size,
                "used": pool.used_count,
                "cached": pool.cached_count,
                "free": pool.free_count - pool.cached_count,
                "largest_hole": pool.largest_hole,
            },
            "requests": [
                {
                    "request": r.number,
                    "id": r.id,
                    "state": "waiting" if not r.admitted else "decode" if r.decoding else "prefill",
                    "prompt_tokens": r.prompt_tokens,
                    "cached_tokens": r.cached_tokens,
                    "computed_tokens": r.computed,
                    "swapped_tokens": r.swapped,
                    "output_tokens": r.output_tokens,
                    "preemptions": r.preemptions,
                    "blocks": list(r.table),
                }
                for r in self._requests.values()
            ],
            "counters": {
                "steps": self._steps,
                "evictions": pool.evictions,
                "requests": self._number,
                "events": self._seq,
            },
        }
