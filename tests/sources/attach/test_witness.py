"""The witnesses that real engines are checked with, checked themselves; and that the check says when it cannot run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.attach import real
from benchmarks.attach.witness import Cache, Sample, quantile_bounds

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "data" / "attach" / "kv_events_64_blocks.rawhex"


def test_the_brute_force_replay_tells_what_is_known_of_the_recording():
    """vLLM 0.32 with 63 usable blocks of 32 tokens, through preemptions; eight hashes are stored twice."""
    cache = Cache()
    for line in RECORDED.read_text().split():
        cache.apply(bytes.fromhex(line))
    assert (cache.stored, cache.removed, cache.most, cache.copies.total()) == (148, 104, 60, 44)
    assert set(cache.parent) >= set(cache.copies) and all(len(tokens) == 32 for tokens in cache.tokens.values())


def test_a_quantile_lies_in_the_bucket_of_what_was_observed_in_between():
    before = Sample(0.0, {}, {"h": {0.1: 5, 1.0: 5, 10.0: 6, float("inf"): 6}})
    after = Sample(1.0, {}, {"h": {0.1: 5, 1.0: 9, 10.0: 15, float("inf"): 16}})
    assert quantile_bounds(before, after, "h", 0.4) == (0.1, 1.0)
    assert quantile_bounds(before, after, "h", 0.5) == (1.0, 10.0)
    assert quantile_bounds(before, after, "h", 0.95) == (10.0, float("inf"))
    assert quantile_bounds(after, after, "h", 0.5) is None and quantile_bounds(before, after, "other", 0.5) is None


@pytest.mark.parametrize(("kind", "said"), [("vllm", "vLLM is not installed"), ("llamacpp", "xllamacpp")])
def test_where_the_engine_is_not_installed_one_line_says_so(kind, said, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("KVSCOPE_VLLM", raising=False)
    monkeypatch.setattr(sys, "argv", ["real", "--kind", kind])
    assert real.main() == real.SKIPPED
    out = capsys.readouterr().out
    assert out.startswith("skipped: ") and said in out and out.count("\n") == 1
