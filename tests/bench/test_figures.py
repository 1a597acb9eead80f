"""Figures from token times, limits from ceilings, the table: arithmetic that can be done by hand."""

import math
import random

import pytest

from backend.bench import figures, workload
from backend.bench.run import Settings, summarise
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
    jobs = workload.jobs([1, 4], 16, 8, vocab=300)
    assert jobs == workload.jobs([1, 4], 16, 8, vocab=300)
    assert [(job["name"], len(job["requests"])) for job in jobs] == [("warm-up", 4), ("1", 1), ("4", 4)]
    prompts = [tuple(r["tokens"]) for job in jobs for r in job["requests"]]
    assert len(set(prompts)) == len(prompts)
    assert {len(p) for p in prompts} == {16}
    assert all(0 <= token < 300 for p in prompts for token in p)
    assert all(r["output_tokens"] == 8 for r in jobs[-1]["requests"])


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
    settings = Settings("/m", "tiny", "float32", 2, ["kvscope", "generate"], [1], 3, 128, 128)
    result = summarise(rounds, "1", SHAPE, settings, ["kvscope", "generate"])
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
