"""/metrics against an independent parser and against what was really asked."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from backend import events
from backend.server.tally import Histogram, Tally
from tests.server.conftest import eventually, serving
from tests.server.scripted import Bird

DASHBOARD = Path(__file__).with_name("vllm_dashboard.txt")
LABELS = {"model_name": "parrot", "engine": "0"}


def samples(url: str) -> dict[tuple[str, frozenset], float]:
    text = httpx.get(f"{url}/metrics").text
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "a family appears twice"
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


@pytest.fixture(scope="module")
def measured():
    """The samples after a known load: 3 requests that end by length, 1 by the end token, 1 aborted, 1 that failed."""
    with serving(Bird()) as served, httpx.Client(base_url=served.wait_ready().url, timeout=20) as http:
        for _ in range(2):
            http.post("/v1/completions", json={"prompt": "the same twelve", "max_tokens": 5})
        http.post("/v1/completions", json={"prompt": "and others", "max_tokens": 1})
        http.post("/v1/completions", json={"prompt": "bye\0", "max_tokens": 50})
        served.bird.runner.fail = "once"
        http.post("/v1/completions", json={"prompt": "z"})
        served.bird.runner.step_s = 0.02
        with http.stream(
            "POST", "/v1/completions", json={"prompt": "leave", "max_tokens": 400, "stream": True}
        ) as answer:
            lines = answer.iter_lines()  # kept: a dropped iterator closes the stream
            next(lines)
            during = samples(served.url)
        eventually(served.idle)
        yield during, samples(served.url), served.bird.loop.engine.state()


def value(found: dict, name: str, **labels: str) -> float:
    return found[name, frozenset((LABELS | labels).items())]


def test_gauges_show_what_runs(measured):
    during, after, _ = measured
    assert value(during, "vllm:num_requests_running") == 1
    assert value(during, "vllm:num_requests_waiting") == 0
    assert 0 < value(during, "vllm:kv_cache_usage_perc") < 0.5
    assert value(after, "vllm:num_requests_running") == 0
    assert value(after, "vllm:kv_cache_usage_perc") == 0
    assert value(after, "kvscope:kv_cached_blocks") > 0


def test_counters_agree_with_what_was_asked(measured):
    _, after, state = measured
    by_reason = {
        reason: value(after, "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert by_reason == {"stop": 1, "length": 3, "abort": 1, "error": 1}
    said_by_leaver = value(after, "vllm:request_generation_tokens_sum") - 5 - 5 - 1 - 4
    assert said_by_leaver >= 1
    assert value(after, "vllm:generation_tokens_total") == 15 + said_by_leaver
    assert value(after, "vllm:prompt_tokens_total") == 15 + 15 + 10 + 4 + 5  # the failed one's prompt was not processed
    assert value(after, "vllm:prefix_cache_hits_total") == 12
    assert value(after, "vllm:prefix_cache_queries_total") == 15 + 15 + 10 + 4 + 5 + 1  # the failed one's was looked up
    assert value(after, "vllm:num_preemptions_total") == 0
    assert value(after, "vllm:iteration_tokens_total_count") == state["counters"]["steps"]
    for name in ("flops", "read_bytes", "write_bytes"):
        assert value(after, f"vllm:estimated_{name}_per_gpu_total") > 0


def test_prompt_tokens_are_told_by_where_their_keys_and_values_are_from(measured):
    _, after, _ = measured
    by_source = {
        source: value(after, "vllm:prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert by_source == {"local_compute": 49 - 12, "local_cache_hit": 12, "external_kv_transfer": 0}
    assert value(after, "vllm:prompt_tokens_cached_total") == 12
    assert value(after, "vllm:prompt_tokens_cached_by_source_total", source="device") == 12
    assert value(after, "vllm:request_prefill_kv_computed_tokens_sum") == 49 - 12
    assert value(after, "vllm:request_num_preemptions_count") == 6
    assert value(after, "vllm:num_requests_waiting_by_reason", reason="capacity") == 0


def test_every_query_of_vllms_dashboard_has_an_answer(measured):
    _, after, _ = measured
    queries = [line for line in DASHBOARD.read_text().splitlines() if line and not line.startswith("#")]
    names: set[str] = set()
    for query in queries:
        grouped = {label for group in re.findall(r"by\(([\w, ]+)\)", query) for label in group.split(", ")}
        for name, matchers in re.findall(r"((?:vllm:|http_)\w+)(?:\{([^}]*)\})?", query):
            wanted = set(re.findall(r'(\w+)="([\w.]+)"', matchers))  # labels with a value of the dashboard's own
            found = [dict(labels) for sample, labels in after if sample == name]
            assert any(wanted <= set(labels.items()) for labels in found), f"{name} is not on /metrics: {query}"
            assert all(grouped <= set(labels) for labels in found), query
            if name.startswith("vllm:"):  # HTTP's are of the server, not of a model
                assert {labels.get("model_name") for labels in found} == {"parrot"}
            names.add(name)
    assert len(queries) == 36 and len(names) == 38


def test_http_requests_are_counted_as_vllms_server_counts_them(measured):
    _, after, _ = measured

    def http(name: str, **labels: str) -> float:
        return after[f"http_{name}", frozenset(labels.items())]

    completions = {"handler": "/v1/completions", "method": "POST"}
    assert http("requests_total", **completions, status="2xx") == 5  # the one who left too: it had begun
    assert http("requests_total", **completions, status="5xx") == 1
    assert http("request_duration_seconds_count", **completions) == 6
    assert http("request_duration_highr_seconds_count") == 6  # /metrics and /health are left out
    assert http("request_duration_highr_seconds_sum") > 0
    assert {name for name, labels in after if ("handler", "/metrics") in labels} == set()


def test_what_strangers_send_makes_no_series_of_its_own():
    with serving(Bird(), api_key="a-key-of-sixteen-letters") as served, httpx.Client(base_url=served.url) as http:
        http.get("/v1/models")  # 401, before it has a route
        http.headers["authorization"] = "Bearer a-key-of-sixteen-letters"
        http.request("BREW", "/coffee")
        http.request("PUT", "/v1/completions")
        told = re.findall(r"^http_requests_total\{(.*)\} (.*)$", http.get("/metrics").text, re.MULTILINE)
    assert sorted(told) == [
        ('handler="/v1/completions",method="PUT",status="4xx"', "1.0"),
        ('handler="none",method="GET",status="4xx"', "1.0"),
        ('handler="none",method="other",status="4xx"', "1.0"),
    ]


def test_histograms_hold_every_request(measured):
    _, after, _ = measured
    assert value(after, "vllm:e2e_request_latency_seconds_count") == 6
    assert value(after, "vllm:request_prompt_tokens_count") == 6
    assert value(after, "vllm:time_to_first_token_seconds_count") == 5  # the failed one said nothing
    assert value(after, "vllm:request_prefill_time_seconds_count") == 5
    tokens = value(after, "vllm:generation_tokens_total")
    assert value(after, "vllm:inter_token_latency_seconds_count") == tokens - 5
    assert value(after, "vllm:request_time_per_output_token_seconds_count") in (3, 4)  # those that said two or more
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "e2e_request_latency",
        "request_queue_time",
        "request_decode_time",
    ):
        buckets = [
            (float(dict(labels)["le"]), count)
            for (sample, labels), count in after.items()
            if sample == f"vllm:{name}_seconds_bucket"
        ]
        counts = [count for _, count in sorted(buckets)]
        assert counts == sorted(counts)
        assert counts[-1] == value(after, f"vllm:{name}_seconds_count")


def test_the_pool_is_described(measured):
    _, after, _ = measured
    (labels,) = [dict(labels) for name, labels in after if name == "vllm:cache_config_info"]
    assert (labels["block_size"], labels["num_gpu_blocks"], labels["engine"]) == ("4", "128", "0")


def test_nothing_is_claimed_before_there_is_an_engine():
    bird = Bird()
    bird.boot_gate.clear()
    with serving(bird) as served:
        answer = httpx.get(f"{served.url}/metrics")
        assert answer.status_code == 200
        assert "vllm:" not in answer.text


def test_preemption_and_its_gap_are_counted():
    tally = Tally()
    step = dict(step_s=0.5, decode=[])
    for event in (
        events.Queued(request=1, id="a", prompt_tokens=4, max_tokens=9, t=0.0),
        events.Step(step=1, t=1.0, ops=[["admit", 1], ["alloc", 1, 0]], prefill=[(1, 4, 0)], **step),
        events.Step(step=2, t=2.0, step_s=0.5, decode=None),
        events.Step(step=3, t=2.4, ops=[["preempt", 1]], decode=None),
        events.Step(step=4, t=5.0, ops=[["admit", 1], ["alloc", 1, 0, 1]], prefill=[(1, 3, 0)], **step),
        events.Step(step=5, t=6.0, prefill=[(1, 3, 3)], **step),
        events.Step(step=6, t=6.5, step_s=0.5, decode=[1]),
        events.Finished(request=1, reason="length", t=6.6, prompt_tokens=4, output_tokens=4, recomputed_tokens=5),
    ):
        tally.count(event)
    assert tally.first_token_s.sum == 1.0
    assert tally.between_tokens_s.sum == 1.0 + 4.0 + 0.5
    bounds = [*tally.between_tokens_s.bounds, None]
    told = [bound for bound, count in zip(bounds, tally.between_tokens_s.counts, strict=True) for _ in range(count)]
    assert told == [0.5, 1.0, 5.0]
    assert tally.step_tokens.sum == 4 + 1 + 3 + 3 + 1
    assert (tally.prompt_tokens, tally.recomputed_tokens) == (4, 5)


def test_a_value_on_a_bound_belongs_under_it():
    histogram = Histogram((1.0, 2.0))
    for number in (1.0, 1.5, 2.0, 3.0, None):
        histogram.observe(number)
    assert histogram.cumulative() == [("1.0", 1), ("2.0", 3), ("+Inf", 4)]
    assert histogram.sum == 7.5
