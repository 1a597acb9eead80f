"""GET /metrics: Prometheus text, under vLLM's names where the meaning is vLLM's, so that its dashboards work.

Counted from the engine's events and outside its steps: `take` is a deque append, the counting happens on the event
loop. What vLLM has no name for is under `kvscope:`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from starlette.responses import Response

from backend import events

if TYPE_CHECKING:
    from backend.fold import State
    from backend.hub import Hub

router = APIRouter()

COUNT_EVERY_S = 0.5
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

    __slots__ = ("known", "prompt_tokens", "t_last", "t_queued")

    def __init__(self, event: events.Queued):
        self.t_queued = event.t
        self.prompt_tokens = self.known = event.prompt_tokens
        self.t_last: float | None = None


class Tally:
    """Folds events into what a scrape shows beyond the hub's state."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
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
        self._live: dict[int, _Live] = {}
        self._decoding: dict[int, _Live] = {}

    def count(self, event: events.Event) -> None:
        match event:
            case events.Step():
                self._step(event)
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
        if end.ttft_s is None or end.queue_s is None:
            return
        prefill_s = end.ttft_s - end.queue_s
        decode_s = (end.tpot_s or 0.0) * max(0, end.output_tokens - 1)
        self.prefill_s.observe(prefill_s)
        self.decode_s.observe(decode_s)
        self.inference_s.observe(prefill_s + decode_s)


class Metrics:
    """`take` every event of the engine, from its thread; `render` on the event loop."""

    def __init__(self, hub: Hub):
        self._hub = hub
        self._tally = Tally()
        self._inbox: deque[events.Event] = deque()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def take(self, event: events.Event) -> None:
        self._inbox.append(event)

    async def run(self) -> None:
        """Counts now and then, so that nothing piles up between scrapes."""
        while True:
            await asyncio.sleep(COUNT_EVERY_S)
            self._count()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _count(self) -> None:
        while self._inbox:
            self._tally.count(self._inbox.popleft())

    def describe(self) -> list[Metric]:
        """Asked once, at registration: what there is depends on the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        self._count()
        families = self._hub.read(self._of_state)
        if families:
            yield from families
            yield from self._of_tally()

    def _of_state(self, state: State) -> list[Metric]:
        """[] before the engine has said hello."""
        if not state.epoch:
            return []
        self._labels = {"model_name": state.model.name, "engine": "0"}
        running, totals, pool = len(state.running), state.totals, state.pool
        info = {
            "block_size": str(state.block_size),
            "num_gpu_blocks": str(state.num_blocks),
            "enable_prefix_caching": str(state.config.get("prefix_cache", True)),
            "cache_dtype": state.model.dtype,
            "kv_cache_size_tokens": str(state.num_blocks * state.block_size),
            "kv_cache_memory_bytes": str(state.num_blocks * state.block_size * state.model.kv_bytes_per_token),
            "engine": "0",
        }
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(info)
        )
        config.add_metric(list(info.values()), 1)
        return [
            config,
            self._gauge("vllm:num_requests_running", "Requests in the batch.", running),
            self._gauge("vllm:num_requests_waiting", "Requests waiting to be processed.", state.in_flight - running),
            self._gauge(
                "vllm:kv_cache_usage_perc",
                "Blocks that requests hold over all blocks, 0 to 1 (cached blocks that nobody holds do not count).",
                pool.used_blocks / state.num_blocks if state.num_blocks else 0.0,
            ),
            self._counter(
                "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.lookup_tokens
            ),
            self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.cached_tokens),
            self._counter("vllm:num_preemptions", "Preemptions.", totals.preemptions),
            self._counter("vllm:generation_tokens", "Generated tokens.", totals.output_tokens),
            self._gauge(
                "kvscope:kv_cached_blocks", "Blocks that nobody holds, kept for their content.", pool.cached_blocks
            ),
            self._gauge("kvscope:kv_wasted_slots", "Token slots of held blocks that hold nothing.", pool.wasted_slots),
            self._gauge(
                "kvscope:kv_shared_saved_blocks",
                "Holders of blocks beyond the first of each.",
                pool.shared_saved_blocks,
            ),
            self._counter("kvscope:kv_evictions", "Cached blocks reused for other content.", totals.evictions),
        ]

    def _of_tally(self) -> list[Metric]:
        tally = self._tally
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*self._labels, "finished_reason"]
        )
        for reason, number in tally.reasons.items():
            success.add_metric([*self._labels.values(), reason], number)
        # One accelerator: "per GPU" is all there is.
        return [
            success,
            self._counter("vllm:prompt_tokens", "Prompt tokens processed, cached ones included.", tally.prompt_tokens),
            self._counter(
                "vllm:estimated_flops_per_gpu", "Floating point operations, computed from shapes.", tally.flops
            ),
            self._counter(
                "vllm:estimated_read_bytes_per_gpu", "Weights and KV read, computed from shapes.", tally.read_bytes
            ),
            self._counter("vllm:estimated_write_bytes_per_gpu", "KV written, computed from shapes.", tally.write_bytes),
            self._counter(
                "kvscope:recomputed_tokens",
                "Tokens of ended requests computed again after preemption.",
                tally.recomputed_tokens,
            ),
            self._histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", tally.step_tokens),
            self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", tally.first_token_s),
            self._histogram("vllm:inter_token_latency_seconds", "Time between tokens.", tally.between_tokens_s),
            self._histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per output token of a request.",
                tally.per_token_s,
            ),
            self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", tally.whole_s),
            self._histogram("vllm:request_queue_time_seconds", "Arrival to first scheduled.", tally.queue_s),
            self._histogram("vllm:request_prefill_time_seconds", "First scheduled to first token.", tally.prefill_s),
            self._histogram("vllm:request_decode_time_seconds", "First token to last token.", tally.decode_s),
            self._histogram("vllm:request_inference_time_seconds", "First scheduled to last token.", tally.inference_s),
            self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", tally.prompt_lengths),
            self._histogram("vllm:request_generation_tokens", "Output tokens of a request.", tally.output_lengths),
            self._histogram("vllm:request_params_max_tokens", "max_tokens of a request.", tally.max_tokens),
            self._histogram("kvscope:step_seconds", "Duration of a step.", tally.step_s),
        ]

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.sum)
        return family


@router.api_route("/metrics", methods=["GET", "HEAD"])
async def metrics(request: Request) -> Response:
    return Response(request.app.state.host.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
