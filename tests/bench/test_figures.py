"""Figures from token times, limits from ceilings, the table: arithmetic that can be done by hand."""

import math
import random

import pytest

from backend.bench import figures, workload
from backend.bench.run import summarise
from backend.bench.table import render
from backend.planner.shape import AttentionLayer, ModelShape

SHAPE = ModelShape.from_measured(
    attention=[AttentionLayer(4, 2, 8, 8)] * 3,
    hidden=32,
    vocab=100,
    parameters=10_000,
    matmul_parameters=10_000,
    head_parameters=3_200,
    gathered_parameters=0,
    dtype_bytes=4,
    kv_dtype_bytes=4,
)


def test_figures_of_one_job():
    found = figures.run_of([{"times": [1.0, 1.5, 2.0]}, {"times": [2.0, 3.0, 4.0]}, {"times": [3.0, 3.1, 3.2]}])
    assert found.output_tok_s == pytest.approx(9 / 4.0)
    assert found.ttft_s == 2.0
    assert found.tpot_s == pytest.approx(0.5)
    assert found.decode_tok_s == pytest.approx(3 / 0.5)


def test_one_token_has_no_time_between_tokens():
    assert math.isnan(figures.run_of([{"times": [1.0]}]).tpot_s)


def test_a_request_without_tokens_is_no_result():
    with pytest.raises(ValueError, match="no token"):
        figures.run_of([{"times": [1.0]}, {"times": []}])


def test_the_limit_is_the_slower_of_reading_and_multiplying():
    kv_token = 3 * 2 * 16 * 4
    limit = figures.limit_of(SHAPE, 2, 50, read_bytes_per_s=1e6, flops_per_s=1e9)
    assert limit.bytes == 10_000 * 4 + 2 * 50 * kv_token + 2 * kv_token
    assert limit.flops == 2 * 2 * 10_000 + 2 * 3 * 2 * 4 * 16 * 50
    assert limit.bound_by == "bandwidth"
    assert limit.limit_tok_s == limit.read_roof_tok_s == pytest.approx(2 / (limit.bytes / 1e6))
    slow = figures.limit_of(SHAPE, 2, 50, read_bytes_per_s=1e12, flops_per_s=1e3)
    assert slow.bound_by == "compute"
    assert slow.limit_tok_s == pytest.approx(2 / (slow.flops / 1e3))
    assert slow.limit_tok_s < slow.read_roof_tok_s


def test_the_breakdown_looks_at_steps_where_all_decode_and_nobody_prefills():
    steps = [
        {"prefill": 1, "rows": 2, "step_s": 9.0, "forward_s": 9.0},
        {"prefill": 0, "rows": 1, "step_s": 9.0, "forward_s": 9.0},
        {"prefill": 0, "rows": 2, "step_s": 1.0, "forward_s": 0.75, "sample_s": 0.125},
        {"prefill": 0, "rows": 2, "step_s": 1.0, "forward_s": 0.75, "sample_s": 0.125},
    ]
    found = figures.decode_breakdown(steps, 2)
    assert (found["steps"], found["step_s"], found["forward_s"], found["rest_s"]) == (2, 1.0, 0.75, 0.125)
    assert figures.decode_breakdown(steps, 3) is None


def test_answers_are_compared_request_by_request():
    answers = {"a": [[1, 2], [3, 4]], "b": [[1, 2], [3, 5]], "c": [[1, 2], [3, 4]]}
    assert figures.same_answers(answers, "a") == {"b": (1, 2), "c": (2, 2)}


def test_everyone_gets_the_same_prompts_and_no_prompt_twice():
    wanted = workload.workloads(list(workload.KINDS), [1, 4], 16, 8, vocab=300)
    assert wanted == workload.workloads(list(workload.KINDS), [1, 4], 16, 8, vocab=300)
    jobs = workload.jobs(wanted, 16, vocab=300)
    counts = [(job["name"], len(job["requests"])) for job in jobs]
    assert counts == [("warm-up", 4), ("1", 1), ("4", 4), ("long", 1), ("shared", 8), ("prefill", 1)]
    prompts = [tuple(r["tokens"]) for job in jobs for r in job["requests"]]
    assert len(set(prompts)) == len(prompts)
    assert all(0 <= token < 300 for p in prompts for token in p)
    lengths = {w.name: {len(r["tokens"]) for r in w.requests} for w in wanted}
    assert lengths["1"] == lengths["4"] == {16} and lengths["long"] == {128} and lengths["prefill"] == {256}
    assert {r["output_tokens"] for w in wanted[:3] for r in w.requests} == {8}
    shared = wanted[3]
    assert len({tuple(r["tokens"][:64]) for r in shared.requests}) == 1 and shared.job["shared_prefix"] == 64
    assert len(lengths["shared"]) > 1 and min(lengths["shared"]) > 64


def test_the_least_time_computes_a_common_prefix_once_and_every_token_of_an_answer():
    requests = [{"tokens": [1] * 20, "output_tokens": 3}, {"tokens": [1] * 24, "output_tokens": 2}]
    shared, apart = (workload.Workload("w", "shared", "w", requests, prefix) for prefix in (16, 0))
    assert shared.prefills() == [(16, 0), (4, 16), (8, 16)]
    assert apart.prefills() == [(20, 0), (24, 0)]
    assert shared.decodes() == [[(1, 20), (1, 24)], [(1, 21)]]
    linear = lambda tokens, rows: 2 * (10_000 - 3_200) * tokens + 2 * 3_200 * rows  # noqa: E731
    pair = 2 * 3 * 4 * 16  # FLOPs of one query that sees one token, three layers
    pairs = 16 * 17 // 2 + (4 * 16 + 10) + (8 * 16 + 36) + 21 + 25 + 22
    flops = linear(28 + 3, 2 + 3) + pair * pairs
    assert figures.least_s(SHAPE, shared, 1e12, 1e3) == pytest.approx(flops / 1e3)
    assert figures.least_s(SHAPE, apart, 1e12, 1e3) > flops / 1e3
    kv_token = 3 * 2 * 16 * 4
    read = 16 + 4 + 8 + (16 + 5 + 9) + 22  # tokens whose K and V are read, the prefix once a step
    moved = 3 * 10_000 * 4 + (read + 16 + 28 + 3) * kv_token  # weights in each of three steps; what is written
    assert figures.least_s(SHAPE, shared, 1e3, 1e12) == pytest.approx(moved / 1e3, rel=1e-3)


def test_a_tiny_vocabulary_still_has_ids_to_draw():
    assert len(workload.requests(random.Random(0), 2, 5, 1, vocab=4)) == 2


def round_of(tok_s: dict[str, float], read: float) -> dict:
    """A round in which one request got 11 tokens at these rates."""
    jobs = {
        name: {"requests": [{"times": [i / rate for i in range(1, 12)], "tokens": list(range(11))}], "steps": []}
        for name, rate in tok_s.items()
    }
    turns = {name: {"load_average": 0.5, "jobs": {"1": job}} for name, job in jobs.items()}
    return {"ceilings": {"read": {"value": read}, "matmul": {"value": 1e12}}, "turns": turns}


def test_shares_and_ratios_are_paired_within_a_round_and_shown():
    rounds = [
        round_of({"kvscope": 8.0, "generate": 4.0}, 1e6),
        round_of({"kvscope": 4.0, "generate": 2.0}, 5e5),  # everything half as fast, the roof too
        round_of({"kvscope": 8.0, "generate": 2.0}, 1e6),
    ]
    work = workload.Workload("1", "decode", "1 at once", [{"tokens": [1] * 128, "output_tokens": 11}])
    result = summarise(rounds, work, SHAPE, ["kvscope", "generate"])
    ours = result["engines"]["kvscope"]
    assert ours["output_tok_s"] == pytest.approx({"median": 8.0, "low": 4.0, "high": 8.0})
    assert ours["share_of_read_roof"]["low"] == pytest.approx(ours["share_of_read_roof"]["high"])
    assert result["engines"]["generate"]["ours_over_this"] == pytest.approx({"median": 2.0, "low": 2.0, "high": 4.0})
    text = render(
        {
            "started": "now",
            "machine": {"cpu": "a CPU", "cores": 2, "torch": "2", "transformers": "5"},
            "settings": {
                "model": "tiny",
                "dtype": "float32",
                "input_tokens": 128,
                "output_tokens": 128,
                "rounds": 3,
                "threads": 2,
            },
            "engines": {"kvscope": {"title": "KVScope"}, "generate": {"title": "the peer"}},
            "left_out": {"other": "the other: not installed"},
            "load_average": [0.5, 3.5],
            "results": [result],
        }
    )
    assert "8.0 (4.0–8.0)" in text
    assert "2.00 (2.00–4.00)" in text
    assert "left out: the other: not installed" in text
    assert "the peer 1 of 1" not in text  # the peer is the reference …
    assert "token for token as the peer: KVScope 1 of 1" in text
    assert "other work ran" in text
