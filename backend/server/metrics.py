"""GET /metrics: Prometheus text, under vLLM's names where the meaning is vLLM's, so that its dashboards work.

Counted from the engine's events and outside its steps: `take` is a deque append, the counting happens on the event
loop. What vLLM has no name for is under `kvscope:`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from starlette.responses import Response

from backend import events
from backend.server.http_tally import HttpTally
from backend.server.tally import Histogram, Tally

if TYPE_CHECKING:
    from backend.fold import State
    from backend.hub import Hub

router = APIRouter()

COUNT_EVERY_S = 0.5


class Metrics:
    """`take` every event of the engine, from its thread; `render` on the event loop."""

    def __init__(self, hub: Hub):
        self._hub = hub
        self.http = HttpTally()
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
        yield from self.http.families()

    def _of_state(self, state: State) -> list[Metric]:
        """[] before the engine has said hello."""
        if not state.epoch:
            return []
        self._labels = {"model_name": state.model.name, "engine": "0"}
        running, totals, pool = len(state.running), state.totals, state.pool
        waiting, longest = state.in_flight - running, state.model.max_model_len
        info = {
            "block_size": str(state.block_size),
            "effective_attention_block_size": str(state.block_size),
            "num_gpu_blocks": str(state.num_blocks),
            "kv_cache_max_concurrency": str(round(state.num_blocks * state.block_size / longest, 2))
            if longest
            else "None",
            "enable_prefix_caching": str(state.config.get("prefix_cache", True)),
            "cache_dtype": state.model.dtype,
            "kv_cache_size_tokens": str(state.num_blocks * state.block_size),
            "kv_cache_memory_bytes": str(state.num_blocks * state.block_size * state.model.kv_bytes_per_token),
            "engine": "0",
            "kvscope_evidence": state.evidence,  # "modelled": nothing here was measured
        }
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(info)
        )
        config.add_metric(list(info.values()), 1)
        return [
            config,
            self._gauge("vllm:num_requests_running", "Requests in the batch.", running),
            self._gauge("vllm:num_requests_waiting", "Requests waiting to be processed.", waiting),
            self._by(
                GaugeMetricFamily,
                "vllm:num_requests_waiting_by_reason",
                "Requests that wait for room in the batch or the pool; nothing else defers one here.",
                "reason",
                {"capacity": waiting, "deferred": 0},
            ),
            self._gauge(
                "vllm:kv_cache_usage_perc",
                "Blocks that requests hold over all blocks, 0 to 1 (cached blocks that nobody holds do not count).",
                pool.used_blocks / state.num_blocks if state.num_blocks else 0.0,
            ),
            self._counter(
                "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.lookup_tokens
            ),
            self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.cached_tokens),
            self._by(
                CounterMetricFamily,
                "vllm:prompt_tokens_cached_by_source",
                "Prompt tokens found in the prefix cache, by where they were kept; counted at admission.",
                "source",
                {"device": totals.cached_tokens, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0},
            ),
            self._by(
                GaugeMetricFamily,
                "vllm:engine_sleep_state",
                "Which of these states the engine is in; ours never sleeps.",
                "sleep_state",
                {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            ),
            *(
                self._counter(f"vllm:{cache}_{name}", f"Nothing: there is no {words} here.", 0)
                for cache, words in (("external_prefix_cache", "cache beyond this engine"), ("mm_cache", "image input"))
                for name in ("queries", "hits")
            ),
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
        computed = tally.prompt_tokens - tally.cached_tokens
        by_source = {"local_compute": computed, "local_cache_hit": tally.cached_tokens, "external_kv_transfer": 0}
        # One accelerator: "per GPU" is all there is.
        return [
            self._by(
                CounterMetricFamily,
                "vllm:request_success",
                "Requests that ended, by reason.",
                "finished_reason",
                tally.reasons,
            ),
            self._counter("vllm:prompt_tokens", "Prompt tokens processed, cached ones included.", tally.prompt_tokens),
            self._by(
                CounterMetricFamily,
                "vllm:prompt_tokens_by_source",
                "The same by where their keys and values are from.",
                "source",
                by_source,
            ),
            self._counter("vllm:prompt_tokens_cached", "Of those, found in the prefix cache.", tally.cached_tokens),
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
            self._histogram(
                "vllm:request_max_num_generation_tokens",
                "Output tokens of a request; with n > 1 each continuation counts, where vLLM counts the longest.",
                tally.output_lengths,
            ),
            self._histogram("vllm:request_params_max_tokens", "max_tokens of a request.", tally.max_tokens),
            self._histogram(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were computed, not found in the prefix cache.",
                tally.computed_lengths,
            ),
            self._histogram("vllm:request_num_preemptions", "Preemptions of a request.", tally.preemptions),
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

    def _by(self, kind: type[Metric], name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        """A gauge or counter with one value for each of a label's."""
        family = kind(name, text, labels=[*self._labels, label])
        for each, value in values.items():
            family.add_metric([*self._labels.values(), each], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.sum)
        return family


@router.api_route("/metrics", methods=["GET", "HEAD"])
async def metrics(request: Request) -> Response:
    return Response(request.app.state.host.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
