"""Part 2 of the GPU run, rehearsed on a CPU with tiny shapes: each check answers, and what one does harms no other."""

from __future__ import annotations

import pytest

from benchmarks.gpu import alone, right, shapes, speed, table
from tests.bench import lonely

# ---- processes of their own ----------------------------------------------------------------------------------------


def test_what_ends_the_process_is_said_and_costs_no_row():
    found = alone.run(lonely.dies, "gpu", 60)
    assert found["rows"] == [{"kept": "gpu"}]
    assert found["failed"] == "its process ended with 3" and "illegal memory access" in found["where"]


def test_what_hangs_is_ended(monkeypatch):
    started = alone.subprocess.Popen

    class Impatient(started):
        """Does not wait longer than it takes until the child has written its row."""

        def wait(self, timeout=None):
            if timeout == 60:
                file = self.args[-1]
                while not alone.Path(file).exists():
                    assert self.poll() is None
                raise alone.subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(alone.subprocess, "Popen", Impatient)
    found = alone.run(lonely.hangs, "gpu", 60)
    assert found["rows"] == [{"kept": "gpu"}] and found["failed"] == "it took more than 60 s"


def test_a_row_that_fails_says_so_and_the_next_ones_are_measured():
    found = alone.run(lonely.raises, "gpu", 60)
    assert found["failed"] == "RuntimeError: after 3 rows"
    first, second, third = found["rows"]
    assert (first["tokens_per_s"], third["tokens_per_s"]) == (10.0, 320.0)
    assert second == {"batch": 8, "failed": "MemoryError: no room for 8"}


def test_what_answers_is_handed_over():
    assert alone.run(lonely.answers, "gpu", 60) == {"rows": [], "in_words": "fine on gpu"}


def test_rows_for_which_there_is_no_time_say_so(monkeypatch):
    monkeypatch.setattr(alone, "left_s", lambda: 2.0)
    assert alone.rows([{"batch": 1}], lambda batch: {}) == [{"batch": 1, "skipped": "2 s are left"}]


# ---- the checks ----------------------------------------------------------------------------------------------------


def test_the_kernels_are_compared(triton):
    found = right.kernels("cpu")
    assert "failed" not in found and found["rows"][0]["worst"] < 1e-5


def test_a_kernel_that_is_wrong_fails_the_check(triton, monkeypatch):
    decode = triton.decode
    monkeypatch.setattr(triton, "decode", lambda *args, **more: decode(*args, **{**more, "window": None}))
    assert "1 of 1 kinds are wrong" in right.kernels("cpu")["failed"]


def test_tokens_are_compared_with_the_models_own(monkeypatch):
    monkeypatch.setattr(right, "FAMILIES", {"llama": shapes.FAMILIES["llama"]})
    found = right.equality("cpu")
    assert "failed" not in found and found["rows"][0]["differ"] == 0
    answer = right.Ours.answer
    monkeypatch.setattr(right.Ours, "answer", lambda *args: [[(t + 1) % 256 for t in a] for a in answer(*args)])
    assert "not equal: llama" in right.equality("cpu")["failed"]


@pytest.fixture(scope="module")
def result() -> dict:
    """What a run would keep, of the checks that measure speed."""
    checks = {
        "ceilings": {"ceilings": {"copy": {"value": 1e9}, "matmul": {"value": 1e12}}},
        "llama-3-8b": speed.llama_8b("cpu"),
        "switches": speed.switches("cpu"),
        "transformers": speed._beside("cpu", [("Llama-3.2-1B", "dynamic", 3), ("Llama-3.2-1B", "continuous", 3)]),
    }
    return {"machine": {"device": "cpu", "torch": "2", "transformers": "5", "started": "today"}, "checks": checks}


def test_every_batch_and_prompt_is_measured(result):
    measured = result["checks"]["llama-3-8b"]["rows"]
    assert [row.get("decode") or row["prefill"] for row in measured] == [1, 3, 16, 32]
    for row in measured:
        assert row["tokens_per_s"] > 0 and (row.get("bytes_per_s") or row["flops_per_s"]) > 0
    by_path = {row["paths"] for row in result["checks"]["switches"]["rows"] if row["step_ms"] > 0}
    assert by_path == {"all on", "no CUDA graphs", "torch's attention"}
    peers = result["checks"]["transformers"]["rows"]
    assert len(peers) == 2
    for row in peers:  # on a busy machine a few tokens of a tiny model may take no longer than one, and it says so
        assert "too busy to tell" in row.get("failed", "") or (row["tokens_per_s"] > 0 and row["step_ms"] > 0)


def test_the_table_has_every_figure_and_the_share_of_the_roof(result):
    text = table.markdown(result)
    assert "REHEARSAL, not a GPU" in text and "copy 1e+09 B/s, bf16 matmul 1e+12 FLOP/s" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == 4 + 6 + 2
    eight = result["checks"]["llama-3-8b"]["rows"][1]
    wanted = f"| KVScope | Llama-3-8B | decode, 3 at once | {eight['tokens_per_s']:.0f} | {eight['step_ms']:.2f} | "
    assert wanted + f"{eight['bytes_per_s'] / 1e9:.0%} |" in lines
    assert any(line.startswith("| transformers, continuous | Llama-3.2-1B |") for line in lines)
    bare = table.markdown({"machine": result["machine"], "checks": {"llama-3-8b": {"failed": "no memory"}}})
    assert "not measured" in bare
