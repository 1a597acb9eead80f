"""The names that numbers of foreign engines get here, whatever the engine calls them."""

from __future__ import annotations

QUANTILES = {"p50": 0.5, "p95": 0.95}
LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode")

GAUGES = (
    "running",  # requests
    "waiting",
    "waiting_capacity",  # of those, for room in the cache
    "waiting_deferred",  # of those, for something else (a transfer, a grammar)
    "kv_usage",  # 0 … 1; mean over engines, weighted by blocks
    "kv_usage_max",  # of the fullest engine; only where there is more than one
    "block_size",  # tokens
    "num_blocks",  # as the engine counts them (vLLM's block 0 is never given out)
    "used_blocks",
)
RATES = (
    "prefix_queries_per_s",  # tokens
    "prefix_hits_per_s",  # tokens
    "hit_rate",  # 0 … 1, of the window
    "preemptions",  # since we attached
    "prompt_tokens_per_s",
    "prompt_tokens_computed_per_s",  # without those that were found in a cache
    "output_tokens_per_s",
    "tokens_per_step",  # mean of the window
    "flops_per_s",  # of one accelerator, as the engine estimates it
    "read_bytes_per_s",
    "write_bytes_per_s",
)
BY_MEDIUM = "cached_tokens_"  # beside NAMES, one for each medium that KV events name, in lower case: gpu, cpu, disk …

NAMES = (*GAUGES, *RATES, *(f"{latency}_{quantile}_s" for latency in LATENCIES for quantile in QUANTILES))
