"""The prepared GPU run: one check's failure costs the others nothing, and it fits into its time."""

from __future__ import annotations

import json

from benchmarks import gpu_check
from benchmarks.gpu_check import Check


def test_a_check_that_fails_is_said_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "describe", lambda device: {"device": device})
    wanted = [
        Check("good", "?", 0.0, lambda device: {"answer": 1, "in_words": f"fine on {device}"}),
        Check("bad", "?", 0.0, lambda device: {"never": 1 / 0}),
        Check("long", "?", 1000.0, lambda device: {"answer": 3}),
        Check("last", "?", 0.0, lambda device: {"answer": 4}),
    ]
    gpu_check.run(wanted, "cuda", 1.0, tmp_path)
    found = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
    assert found["good"]["answer"] == 1 and found["last"]["answer"] == 4
    assert "ZeroDivisionError" in found["bad"]["failed"]
    assert "1000 s" in found["long"]["skipped"]
    assert "fine on cuda" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_check.json", "gpu_check.md"]


def test_all_checks_have_names_of_their_own_and_fit_into_eight_minutes():
    checks = gpu_check.checks()
    assert len({check.name for check in checks}) == len(checks) >= 10
    assert sum(check.seconds for check in checks) <= 8 * 60
