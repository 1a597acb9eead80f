"""What a scrape shows beyond the hub's state, counted from the engine's events."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from backend import events

REASONS = ("stop", "length", "abort", "error")

# vLLM's bucket bounds, with finer ones below: a small model lives under vLLM's first bound, where all would look alike.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_STEP_TOKENS = (1.0, *(float(2**e) for e in range(3, 15)))


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float | None, count: int = 1) -> None:
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += count
            self.sum += value * count

    def cumulative(self) -> list[tuple[str, int]]:
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))


class _Live:
    """What must be kept of a request to know when it says a token, and how long after the one before."""

    __slots__ = ("cached", "known", "prompt_tokens", "t_last", "t_queued")

    def __init__(self, event: events.Queued):
        self.t_queued = event.t
        self.cached: int | None = None  # tokens found in the prefix cache at its first admission
        self.prompt_tokens = self.known = event.prompt_tokens
        self.t_last: float | None = None


class Tally:
    """Folds events into what a scrape shows beyond the hub's state."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = 0  # the second is part of the first
        self.flops = 0.0
        self.read_bytes = self.write_bytes = 0
        self.recomputed_tokens = 0
        self.reasons = dict.fromkeys(REASONS, 0)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.step_s = Histogram(_TOKEN_S)
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(_TOKEN_S)
        self.per_token_s = Histogram(_TOKEN_S)
        self.whole_s = Histogram(_REQUEST_S)
        self.queue_s = Histogram(_REQUEST_S)
        self.prefill_s = Histogram(_REQUEST_S)
        self.decode_s = Histogram(_REQUEST_S)
        self.inference_s = Histogram(_REQUEST_S)
        self.prompt_lengths = Histogram(_LENGTHS)
        self.output_lengths = Histogram(_LENGTHS)
        self.max_tokens = Histogram(_LENGTHS)
        self.computed_lengths = Histogram(_LENGTHS)
        self.preemptions = Histogram(_PREEMPTIONS)
        self._block_size = 0
        self._live: dict[int, _Live] = {}
        self._decoding: dict[int, _Live] = {}

    def count(self, event: events.Event) -> None:
        match event:
            case events.Step():
                self._step(event)
            case events.Hello() | events.Configured():
                self._block_size = event.block_size
            case events.Queued():
                self._live[event.request] = _Live(event)
                self.max_tokens.observe(event.max_tokens)
            case events.Finished():
                self._finished(event)

    def _step(self, step: events.Step) -> None:
        decoding = self._decoding
        for op in step.ops:
            if op[0] == "preempt":
                decoding.pop(op[1], None)
            elif op[0] == "admit" and (live := self._live.get(op[1])) and live.cached is None:
                # One token is always left to compute: its logits choose the first word.
                live.cached = max(0, min((len(op) - 2) * self._block_size, live.prompt_tokens - 1))
        if step.decode is None:
            decoded = list(decoding.values())
        else:
            decoded = [decoding[number] for number in step.decode if number in decoding]
        # Nearly all of them spoke in the step before: few different gaps, counted at once.
        for t_last, count in Counter(live.t_last for live in decoded).items():
            self.between_tokens_s.observe(step.t - t_last, count)
        for live in decoded:
            live.known += 1
            live.t_last = step.t
        for number, tokens, before in step.prefill:
            live = self._live.get(number)
            if live is None or before + tokens < live.known:
                continue
            if live.t_last is None:
                self.first_token_s.observe(step.t - live.t_queued)
                self.prompt_tokens += live.prompt_tokens
                self.cached_tokens += live.cached or 0
            else:
                self.between_tokens_s.observe(step.t - live.t_last)
            live.known += 1
            live.t_last = step.t
            decoding[number] = live
        if step.step_s:  # a step that only preempted computed nothing
            self.step_tokens.observe(len(decoded) + sum(tokens for _, tokens, _ in step.prefill))
            self.step_s.observe(step.step_s)
        self.flops += step.flops
        self.read_bytes += step.weight_bytes + step.kv_read_bytes
        self.write_bytes += step.kv_write_bytes

    def _finished(self, end: events.Finished) -> None:
        self._live.pop(end.request, None)
        self._decoding.pop(end.request, None)
        self.reasons[end.reason] = self.reasons.get(end.reason, 0) + 1
        self.recomputed_tokens += end.recomputed_tokens
        self.whole_s.observe(end.e2e_s)
        self.queue_s.observe(end.queue_s)
        self.per_token_s.observe(end.tpot_s)
        self.prompt_lengths.observe(end.prompt_tokens)
        self.output_lengths.observe(end.output_tokens)
        self.preemptions.observe(end.preemptions)
        if end.ttft_s is not None:
            self.computed_lengths.observe(end.prompt_tokens - end.cached_tokens)
        if end.ttft_s is None or end.queue_s is None:
            return
        prefill_s = end.ttft_s - end.queue_s
        decode_s = (end.tpot_s or 0.0) * max(0, end.output_tokens - 1)
        self.prefill_s.observe(prefill_s)
        self.decode_s.observe(decode_s)
        self.inference_s.observe(prefill_s + decode_s)
