"""What servers export, where nothing was recorded: texts built from the names that each engine's source and
documentation have. Numbers are made up; `grown` is how far counters are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DATA = Path(__file__).parents[2] / "data" / "attach"


def recorded(name: str) -> bytes:
    return (DATA / f"{name}.txt").read_bytes()


def line(name: str, value: float | str, **labels: str) -> str:
    told = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{told}}} {value}" if told else f"{name} {value}"


def histogram(name: str, counts: dict[str, int], total: float, **labels: str) -> list[str]:
    """`counts`: cumulative, by upper bound."""
    rows = [line(f"{name}_bucket", count, le=bound, **labels) for bound, count in counts.items()]
    return [*rows, line(f"{name}_sum", total, **labels), line(f"{name}_count", list(counts.values())[-1], **labels)]


def body(*lines: str | Iterable[str]) -> bytes:
    flat = [row for part in lines for row in ([part] if isinstance(part, str) else part)]
    return ("\n".join(flat) + "\n").encode()


def vllm_v0(grown: int = 0) -> bytes:
    """0.6: no `engine` label, swapped requests, a hit rate as a gauge."""
    m = {"model_name": "opt"}
    return body(
        line("vllm:num_requests_running", 3.0, **m),
        line("vllm:num_requests_waiting", 2.0, **m),
        line("vllm:num_requests_swapped", 1.0, **m),
        line("vllm:gpu_cache_usage_perc", 0.25, **m),
        line("vllm:cpu_cache_usage_perc", 0.0, **m),
        line("vllm:gpu_prefix_cache_hit_rate", 0.5, **m),
        line("vllm:cache_config_info", 1.0, block_size="16", num_gpu_blocks="101", cache_dtype="auto"),
        line("vllm:num_preemptions_total", 7 + grown, **m),
        line("vllm:prompt_tokens_total", 1000 + 100 * grown, **m),
        line("vllm:generation_tokens_total", 500 + 10 * grown, **m),
        histogram("vllm:time_per_output_token_seconds", {"0.01": grown, "0.025": 4 * grown, "+Inf": 4 * grown}, 1, **m),
        histogram("vllm:time_in_queue_requests", {"1.0": grown, "+Inf": grown}, 1, **m),
    )


def vllm_010(grown: int = 0) -> bytes:
    """0.10: old and new names at once; two data-parallel engines, one of them with 'None' blocks (0.8's bug)."""
    rows: list[str] = []
    for engine, usage, running in (("0", 0.1, 4), ("1", 0.5, 6)):
        m = {"engine": engine, "model_name": "qwen"}
        rows += [
            line("vllm:num_requests_running", running, **m),
            line("vllm:num_requests_waiting", 1, **m),
            line("vllm:kv_cache_usage_perc", usage, **m),
            line("vllm:gpu_cache_usage_perc", 0.99, **m),
            line("vllm:prefix_cache_queries_total", 100 * grown, **m),
            line("vllm:prefix_cache_hits_total", 25 * grown, **m),
            line("vllm:gpu_prefix_cache_queries_total", 9999 * grown, **m),
            line("vllm:gpu_prefix_cache_hits_total", 9999 * grown, **m),
            line("vllm:generation_tokens_total", 10 * grown, **m),
        ]
    blocks = {"0": "101", "1": "301"}
    rows += [line("vllm:cache_config_info", 1, block_size="16", engine=e, num_gpu_blocks=n) for e, n in blocks.items()]
    return body(rows)


def sglang(grown: int = 0, prefix: str = "sglang:") -> bytes:
    """Two tensor-parallel ranks of each of two data-parallel engines; series of requests without ranks."""
    rows: list[str] = []
    for dp in ("0", "1"):
        for tp in ("0", "1"):
            m = {"model_name": "llama", "engine_type": "unified", "tp_rank": tp, "pp_rank": "0", "dp_rank": dp}
            rows += [
                line(f"{prefix}num_running_reqs", 5, **m),
                line(f"{prefix}num_queue_reqs", 2, **m),
                line(f"{prefix}token_usage", 0.25 if dp == "0" else 0.75, **m),
                line(f"{prefix}page_size", 4, **m),
                line(f"{prefix}max_total_num_tokens", 4000, **m),
                line(f"{prefix}cache_hit_rate", 0.5, **m),
                line(f"{prefix}num_retracted_requests_total", 3 * grown, **m),
                *(
                    line(f"{prefix}realtime_tokens_total", count * grown, mode=mode, **m)
                    for mode, count in (("prefill_compute", 60), ("prefill_cache", 20), ("decode", 8))
                ),
            ]
    m = {"model_name": "llama", "engine_type": "unified"}
    rows += [line(f"{prefix}prompt_tokens_total", 7 * grown, is_streaming="true", **m)]
    rows += histogram(f"{prefix}time_to_first_token_seconds", {"0.1": 9 * grown, "+Inf": 10 * grown}, 1, **m)
    return body(rows)


def trtllm(grown: int = 0) -> bytes:
    m = {"model_name": "m", "engine_type": "trtllm"}
    return body(
        line("trtllm_num_requests_running", 2, **m),
        line("trtllm_num_requests_waiting", 1, **m),
        line("trtllm_num_paused_requests", 1, **m),
        line("trtllm_kv_cache_utilization", 0.5, **m),
        line("trtllm_kv_cache_tokens_per_block", 32, **m),
        line("trtllm_kv_cache_max_blocks", 200, **m),
        line("trtllm_kv_cache_used_blocks", 99, **m),
        line("trtllm_kv_cache_hit_rate", 0.4, **m),
        line("trtllm_generation_tokens_total", 5 * grown, **m),
        histogram("trtllm_time_to_first_token_seconds", {"1.0": grown, "+Inf": grown}, 1, **m),
    )


def tgi(grown: int = 0) -> bytes:
    return body(
        line("tgi_batch_current_size", 6),
        line("tgi_queue_size", 4),
        histogram("tgi_request_generated_tokens", {"10.0": grown, "+Inf": grown}, 7 * grown),
        histogram("tgi_request_input_length", {"100.0": grown, "+Inf": grown}, 50 * grown),
        histogram("tgi_request_mean_time_per_token_duration", {"0.02": grown, "0.04": 2 * grown, "+Inf": 2 * grown}, 1),
    )


def dynamo(grown: int = 0) -> bytes:
    m = {"model": "m", "dynamo_namespace": "dynamo"}
    return body(
        line("dynamo_frontend_inflight_requests", 8, **m),
        line("dynamo_frontend_queued_requests", 3, **m),
        line("dynamo_frontend_model_kv_cache_block_size", 16, **m),
        line("dynamo_frontend_model_total_kv_blocks", 500, **m),
        line("dynamo_frontend_output_tokens_total", 40 * grown, **m),
    )


def ray(grown: int = 0) -> bytes:
    """vLLM under Ray Serve: another prefix, labels of the replica, counters without `_total`."""
    text = vllm_010(grown).decode().replace("vllm:", "ray_vllm_").replace("_total{", "{")
    return text.replace('engine="', 'WorkerId="w1",engine="').encode()
