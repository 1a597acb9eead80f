"""Measured ceilings: what comes back, what is refused, what is kept. No speed is asserted."""

import itertools
import json
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from backend.telemetry import ceiling, report
from backend.telemetry.cli import app

torch = pytest.importorskip("torch")
SMALL = 64 * 2**20


@pytest.fixture(scope="module")
def measured():
    """One real measurement, over arrays too small for the truth and small enough for a test."""
    shares = []
    found = ceiling.measure(
        "cpu", "float32", rounds=2, working_set_bytes=SMALL, progress=lambda share, text: shares.append((share, text))
    )
    return found, shares


def test_each_ceiling_is_the_best_way_with_its_spread(measured):
    found, _ = measured
    for value in (found.copy, found.read, found.matmul):
        assert 0 < value.low <= value.value <= value.high
        assert value.value == max(value.ways.values()) == value.ways[value.way]
        assert value.rounds == 2
        assert value.evidence == "measured"
    assert (found.copy.unit, found.read.unit, found.matmul.unit) == ("B/s", "B/s", "FLOP/s")
    assert {"linear, batch 1", "matrix times vector", "sum"} <= set(found.read.ways)


def test_it_says_under_which_conditions(measured):
    where = measured[0].conditions
    assert (where.device, where.dtype, where.threads) == ("cpu", "float32", torch.get_num_threads())
    assert where.torch == str(torch.__version__)
    assert where.working_set_bytes == SMALL
    assert where.cores >= 1
    assert where.date.endswith("+00:00")


def test_progress_rises_to_the_end(measured):
    shares = [share for share, _ in measured[1]]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert all(text for _, text in measured[1])


def test_half_precision_is_measured_too():
    found = ceiling.measure("cpu", "bfloat16", rounds=1, working_set_bytes=SMALL)
    assert found.read.value > 0
    assert found.conditions.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [("cpu", "int8", "int8"), ("cpu", "float99", "float99"), ("cpu", "nn", "nn"), ("abacus", "float32", "abacus")],
)
def test_what_cannot_be_measured_is_refused_by_name(device, dtype, words):
    with pytest.raises(ValueError, match=words):
        ceiling.measure(device, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_said():
    with pytest.raises(ValueError, match="CUDA"):
        ceiling.measure("cuda", "float32")


def test_little_memory_means_small_arrays_and_a_note(monkeypatch):
    monkeypatch.setattr(ceiling.psutil, "virtual_memory", lambda: SimpleNamespace(available=400 * 2**20))
    found = ceiling.measure("cpu", "float32", rounds=1)
    assert found.conditions.working_set_bytes == SMALL  # a sixth, in whole matrices
    assert any("0.4 GiB are free" in note for note in found.conditions.notes)


def test_other_work_on_the_machine_is_noted(monkeypatch):
    monkeypatch.setattr(ceiling.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    found = ceiling.measure("cpu", "float32", rounds=1, working_set_bytes=SMALL)
    assert found.conditions.load_average == 1000.0
    assert any("other work" in note for note in found.conditions.notes)


def test_slow_rounds_stop_early_but_not_before_three(monkeypatch):
    clock = itertools.count(step=ceiling.PATIENCE_S)
    monkeypatch.setattr(ceiling.time, "perf_counter", lambda: float(next(clock)))
    probe = ceiling._Probe(torch, torch.device("cpu"), torch.float32)
    times = probe.rounds({"nothing": ceiling._Way(lambda: None, 1)}, 50, lambda share, name: None)
    assert len(times["nothing"]) == ceiling.LEAST_ROUNDS


def test_the_best_way_is_the_one_with_the_best_median():
    ways = {"steady": ceiling._Way(print, 100), "lucky once": ceiling._Way(print, 100)}
    best = ceiling._best({"steady": [2.0, 2.0, 2.5], "lucky once": [1.0, 4.0, 4.0]}, ways, "B/s")
    assert (best.way, best.value, best.low, best.high) == ("steady", 50.0, 40.0, 50.0)
    assert best.ways == {"steady": 50.0, "lucky once": 25.0}


def test_what_was_kept_is_found_for_the_same_conditions_only(measured, tmp_path, monkeypatch):
    found, _ = measured
    assert ceiling.cached("cpu", "float32", tmp_path) is None
    path = ceiling.keep(found, tmp_path)
    assert ceiling.cached("cpu", "float32", tmp_path) == found
    assert ceiling.cached("cpu", "bfloat16", tmp_path) is None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert ceiling.cached("cpu", "float32", tmp_path) is None
    finally:
        torch.set_num_threads(threads)
    path.write_text("{ not JSON")
    assert ceiling.cached("cpu", "float32", tmp_path) is None
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no half-written file stays


def test_the_command_measures_once_then_uses_what_it_kept(measured, tmp_path, monkeypatch):
    found, _ = measured
    calls = []
    monkeypatch.setattr(report, "HOST_S", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ceiling, "measure", lambda *a, **k: calls.append(a) or found)
    run = lambda *words: CliRunner().invoke(app, ["--device", "cpu", "--dtype", "float32", *words])  # noqa: E731
    first, second, third = run(), run("--json"), run("--fresh")
    assert first.exit_code == second.exit_code == third.exit_code == 0, first.output + second.output
    assert len(calls) == 2
    assert "GB/s" in first.output
    assert "GFLOP/s" in first.output
    assert f"{found.read.value / 1e9:.1f} GB/s" in first.output
    (load,) = [line for line in first.output.splitlines() if line.startswith("  load average")]
    assert load.endswith("measured: operating system, one-minute average")
    (dram,) = [line for line in first.output.splitlines() if line.startswith("  dram bandwidth")][-1:]
    assert dram.split()[2] == "-" and "not available:" in dram
    answer = json.loads(second.output)
    assert msgspec.convert(answer["ceilings"], ceiling.Ceilings) == found
    assert answer["sensors"]["devices"]["devices"][-1]["uuid"] == "host"


def test_a_measurement_that_is_not_to_be_kept_leaves_the_one_before(measured, tmp_path, monkeypatch):
    found, _ = measured
    monkeypatch.setattr(report, "HOST_S", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ceiling.keep(found)
    other = msgspec.structs.replace(found, read=msgspec.structs.replace(found.read, value=1e9))
    monkeypatch.setattr(ceiling, "measure", lambda *a, **k: other)
    words = ["--device", "cpu", "--dtype", "float32", "--fresh", "--json"]
    told = json.loads(CliRunner().invoke(app, [*words, "--no-keep"]).output)
    assert told["ceilings"]["read"]["value"] == 1e9
    assert ceiling.cached("cpu", "float32").read.value == found.read.value
    CliRunner().invoke(app, words)
    assert ceiling.cached("cpu", "float32").read.value == 1e9


def test_the_command_names_a_wrong_dtype():
    done = CliRunner().invoke(app, ["--device", "cpu", "--dtype", "float99"])
    assert done.exit_code == 2
    assert "float99" in done.output
