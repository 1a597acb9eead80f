"""What is said of many replicas together: sums of what can be summed, and no sum of shares."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.events import EngineRow, Value
from backend.sources.attach.fleet_rows import ReplicaRow, by_rank, sums
from backend.sources.attach.node_gpus import gpus, reader


def row(key: str, state: str = "live", **values: float | None) -> ReplicaRow:
    told = {name: Value(value=value) for name, value in values.items()}
    return ReplicaRow(key=key, name=key, url=f"http://{key}", host=key, state=state, values=told)


def test_requests_are_summed_and_shares_are_weighted():
    rows = [
        row("a", running=3, kv_usage=0.9, num_blocks=100, prefix_hits_per_s=10, prefix_queries_per_s=100),
        row("b", running=1, kv_usage=0.1, num_blocks=300, prefix_hits_per_s=90, prefix_queries_per_s=100),
        row("c", running=None),
    ]
    found = sums(rows, rows)
    assert (found.totals["running"].value, found.totals["running"].of) == (4, 2)
    assert "kv_usage" not in found.totals and "hit_rate" not in found.totals
    assert found.kv_usage.value == pytest.approx(0.3) and found.hit_rate.value == 0.5
    assert found.imbalance == {"running": 1.5, "kv_usage": pytest.approx(1.8)}
    spread = found.spread["kv_usage"]
    assert (spread.low, spread.high, spread.lowest, spread.highest, spread.of) == (0.1, 0.9, "b", "a", 2)


def test_where_a_replica_tells_no_blocks_all_count_alike():
    rows = [row("a", kv_usage=0.9, num_blocks=100), row("b", kv_usage=0.1)]
    assert sums(rows, rows).kv_usage.value == pytest.approx(0.5)


def test_replicas_that_are_not_live_count_as_such_and_nowhere_else():
    rows = [row("a", running=2), row("b", "down", running=50), row("c", "stale", running=50), row("d", "probing")]
    found = sums(rows, rows)
    assert found.states == {"live": 1, "probing": 1, "stale": 1, "down": 1} and found.replicas == 4
    assert found.totals["running"].value == 2 and found.spread["running"].high == 2
    assert found.imbalance == {}
    nothing = sums([], [])
    assert nothing.kv_usage is None and nothing.totals == {} and nothing.spread == {}


def test_ranks_of_one_address_are_replicas_of_their_own_and_counted_once():
    address = row("a", running=6, waiting=1, kv_usage=0.5, output_tokens_per_s=100)
    engines = [
        EngineRow(labels={"engine": "0"}, running=5, waiting=1, kv_usage=0.8),
        EngineRow(labels={"engine": "1"}, running=1, waiting=0, kv_usage=0.2),
    ]
    ranks = by_rank(address, engines)
    assert [(r.key, r.rank, r.value("running"), r.value("output_tokens_per_s")) for r in ranks] == [
        ("a#0", "0", 5, None),
        ("a#1", "1", 1, None),
    ]
    assert ranks[0].values["output_tokens_per_s"].quality == "absent"
    found = sums([address], ranks)
    assert found.totals["running"].value == 6 and found.totals["output_tokens_per_s"].value == 100
    assert found.imbalance["running"] == pytest.approx(5 / 3) and found.replicas == 2
    assert by_rank(address, engines[:1]) == [address]


numbers = st.one_of(st.none(), st.floats(0, 1e6), st.just(math.nan), st.just(math.inf))


@given(st.lists(st.tuples(numbers, st.one_of(st.none(), st.floats(0, 1)), st.floats(0, 1e5)), max_size=8))
def test_no_number_makes_a_sum_that_is_none(told):
    rows = [row(str(i), running=r, kv_usage=u, num_blocks=b) for i, (r, u, b) in enumerate(told)]
    found = sums(rows, rows)
    if found.kv_usage:
        assert 0 <= found.kv_usage.value <= 1 + 1e-9
    for ratio in found.imbalance.values():
        assert 1 - 1e-9 <= ratio <= len(rows) + 1e-6
    for spread in found.spread.values():
        assert spread.low <= spread.median <= spread.high


DCGM = """\
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",modelName="NVIDIA H200",Hostname="n"} 80
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="NVIDIA H200",Hostname="n"} 100
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="NVIDIA H200",GPU_I_ID="3"} 7
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",UUID="GPU-a"} 0.5
DCGM_FI_PROF_DRAM_ACTIVE{gpu="1",UUID="GPU-b"} 9223372036854775792
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a"} 1024
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} 612.5
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} NaN
something_else 1
"""


def test_a_hosts_gpus_are_read_in_our_units_without_blanks_and_slices():
    first, second = gpus(reader(), DCGM.encode())
    assert (first.uuid, first.index, first.name, first.busy, first.dram_active) == (
        "GPU-a",
        "0",
        "NVIDIA H200",
        1.0,
        0.5,
    )
    assert (first.memory_used_bytes, first.power_w, first.temperature_c) == (1024 * 2**20, 612.5, None)
    assert (second.uuid, second.busy, second.dram_active) == ("GPU-b", 0.8, None)
    assert gpus(reader(), b"<html>no metrics</html>\n") == []
