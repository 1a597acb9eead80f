"""The comparison of caches: what each process is told, what comes out, and when it is refused."""

from __future__ import annotations

import json
import os
import sys

import pytest

from backend.experiments import ExperimentError, Partial, caches
from tests.server.test_serve import TINY
from tests.waiting import eventually

STATE = {"model": {"name": "m", "dtype": "bfloat16"}, "device": {"kind": "cpu", "threads": 2}, "requests": []}


class Client:
    def __init__(self, state):
        self._state = state

    def state(self):
        return self._state


def finish(experiment):
    partials = []
    while True:
        try:
            said = next(experiment)
        except StopIteration as end:
            return end.value, partials
        if isinstance(said, Partial):
            partials.append(said.result)


def test_every_kind_takes_a_turn_on_the_engines_model():
    orders = []

    def run(order):
        orders.append(order)
        yield
        held = 2**20 * len(orders)
        return {job["name"]: {"step_s": [0.03, 0.01, 0.02], "cache_bytes": held} for job in order["jobs"]}

    result, partials = finish(caches.compare(Client(STATE), caches.Settings(contexts=(64, 256)), run))
    assert [order["jobs"][0]["kind"] for order in orders] == ["dynamic", "static", "paged", "paged"]
    assert orders[2]["jobs"][0]["kernels"] == caches.PLAIN and orders[3]["jobs"][0]["kernels"] == {}
    assert {(order["model"], order["dtype"], order["threads"]) for order in orders} == {("m", "bfloat16", 2)}
    assert result.table["ms a step"].tolist() == [20.0] * 8
    assert result.table["context (tokens)"].tolist() == [64, 256] * 4
    assert [len(partial.table) for partial in partials] == [2, 4, 6, 8]


def test_it_waits_for_nobody_and_says_so():
    with pytest.raises(ExperimentError, match="requests run"):
        finish(caches.compare(Client(STATE | {"requests": [{"id": "x"}]})))


def test_stopping_ends_the_process(monkeypatch, tmp_path):
    left = tmp_path / "pid"
    script = f"import os, sys; open({str(left)!r}, 'w').write(str(os.getpid())); sys.stdin.read()"
    monkeypatch.setattr(caches, "COMMAND", [sys.executable, "-c", script])
    experiment = caches.compare(Client(STATE))
    next(experiment)
    eventually(lambda: next(experiment) and left.exists() and left.read_text())
    experiment.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.read_text()), 0)


def test_a_process_that_fails_ends_it_with_its_last_words(monkeypatch):
    monkeypatch.setattr(caches, "COMMAND", [sys.executable, "-c", "raise SystemExit('no such model: m')"])
    with pytest.raises(ExperimentError, match="no such model: m"):
        finish(caches.compare(Client(STATE)))


def test_a_process_really_decodes_with_each_kind(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    same = {"context": 20, "steps": 4, "reserve": 64, "kernels": caches.PLAIN}
    jobs = [{"name": kind, "kind": kind, **same} for kind in ("dynamic", "static", "paged")]
    order = {"model": str(tmp_path), "weights": "random", "dtype": "float32", "threads": 1, "jobs": jobs}
    said, _ = finish(caches.in_a_process(order))
    assert {name: len(line["step_s"]) for name, line in said.items()} == {"dynamic": 4, "static": 4, "paged": 4}
    token = said["static"]["cache_bytes"] // 64
    assert said["dynamic"]["cache_bytes"] == (20 + 4 + 3) * token  # as many as it computed
    assert said["paged"]["cache_bytes"] == 32 * token  # whole blocks of 16
