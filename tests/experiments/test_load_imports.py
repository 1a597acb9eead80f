"""Results that `vllm bench serve` 0.32, guidellm 0.8.1 and aiperf 0.13 wrote of runs against this project's server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from backend.experiments import ExperimentError
from backend.experiments.imports import MAX_BYTES, read

FILES = Path(__file__).parents[1] / "data" / "load"


def imported(name: str):
    return read((FILES / name).read_bytes(), name)


def test_vllm_bench_serve_says_the_same_as_its_own_summary():
    """Percentiles are ours, of its samples; its own, by numpy, stand in the same file."""
    found = imported("vllm-bench-serve.json")
    told = json.loads((FILES / "vllm-bench-serve.json").read_text())
    row = found.table.iloc[0]
    for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2el")):
        for share in (50, 95, 99):
            assert row[f"{ours}_p{share}_s"] * 1000 == pytest.approx(told[f"p{share}_{theirs}_ms"], rel=1e-4)
        assert row[f"{ours}_mean_s"] * 1000 == pytest.approx(told[f"mean_{theirs}_ms"], rel=1e-4)
    assert (row["offered_rate_per_s"], row["requests"], row["ok"]) == (2.0, 40, 40)
    assert len(found.samples[0]["itl"]) == 40 * 31
    assert row["source"] == "vllm bench serve: vllm-bench-serve.json"


def test_without_details_vllms_own_figures_are_taken():
    told = json.loads((FILES / "vllm-bench-serve.json").read_text())
    for name in ("ttfts", "itls", "latencies", "errors", "input_lens", "output_lens"):
        told.pop(name)
    found = read(json.dumps(told | {"request_rate": "inf"}).encode(), "short.json")
    row = found.table.iloc[0]
    assert row["ttft_p99_s"] == pytest.approx(told["p99_ttft_ms"] / 1000) and np.isnan(row["offered_rate_per_s"])
    assert found.samples == [{}]


def test_guidellms_requests_are_counted_by_our_rule():
    found = imported("guidellm.json")
    told = json.loads((FILES / "guidellm.json").read_text())["benchmarks"][0]
    row = found.table.iloc[0]
    at = [request["info"]["timings"] for request in told["requests"]["successful"]]
    ttfts = [one["first_token_iteration"] - one["request_start"] for one in at]
    assert row["ttft_p95_s"] == pytest.approx(np.percentile(ttfts, 95))
    own = told["metrics"]["time_to_first_token_ms"]["successful"]
    assert row["ttft_mean_s"] * 1000 == pytest.approx(own["mean"], rel=0.01)
    own = told["metrics"]["inter_token_latency_ms"]["successful"]
    assert row["tpot_mean_s"] * 1000 == pytest.approx(own["mean"], rel=0.01)  # its ITL is our TPOT
    assert row["ok"] == 6 and "itl_p50_s" not in found.table


def test_aiperfs_summary_is_taken_as_it_is():
    row = imported("aiperf.json").table.iloc[0]
    told = json.loads((FILES / "aiperf.json").read_text())
    assert row["offered_rate_per_s"] == 4.0 and row["ok"] == 8
    for ours, theirs in (
        ("ttft", "time_to_first_token"),
        ("tpot", "inter_token_latency"),
        ("itl", "inter_chunk_latency"),
        ("e2e", "request_latency"),
    ):
        assert row[f"{ours}_p99_s"] * 1000 == pytest.approx(told[theirs]["p99"])


@pytest.mark.parametrize(
    "data, words",
    [
        (b"\xff\xfe{}", "not UTF-8"),
        (b"{", "no JSON"),
        (b"[1, 2]", "no result of vllm bench serve, guidellm, aiperf"),
        (b'{"request_throughput": 1, "completed": 3}', "looks like vllm bench serve, but has no"),
        (b'{"request_throughput": 1, "completed": 3, "output_throughput": NaN, "duration": 1}', "nan is no number"),
        (b'{"benchmarks": []}', "no finished run of guidellm"),
        (b'{"benchmarks": [{"metrics": 3}]}', "looks like guidellm"),
        (b'{"request_throughput": {"unit": "requests/sec"}}', "looks like aiperf"),
        (b" " * (MAX_BYTES + 1), "at most 64 MiB"),
    ],
)
def test_what_is_no_result_is_refused_with_the_files_name(data, words):
    with pytest.raises(ExperimentError, match=f"mine.json.*{words}"):
        read(data, "mine.json")
