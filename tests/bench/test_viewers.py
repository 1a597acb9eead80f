"""The viewers benchmark from end to end on a tiny model: a real server, real streams, real followers."""

import json

import pytest

from benchmarks import viewers


@pytest.mark.slow
def test_a_pair_with_and_without_viewers(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kept = tmp_path / "report.json"
    words = ["--model", str(tiny_model), "--pairs", "1", "--viewers", "2", "--concurrency", "3", "--vocab", "400"]
    viewers.main([*words, "--input-tokens", "8", "--output-tokens", "5", "--out", str(kept)])
    report = json.loads(kept.read_text())
    (pair,) = report["pairs"]
    ratio = pair["watched"]["output_tok_s"] / pair["alone"]["output_tok_s"]
    assert report["throughput_kept"] == {"median": ratio, "low": ratio, "high": ratio}
    assert pair["watched"]["bytes"] > 0  # the followers did hear the engine
    assert "bytes" not in pair["alone"]
    assert f"keeps {ratio:.1%} of its throughput" in capsys.readouterr().out
