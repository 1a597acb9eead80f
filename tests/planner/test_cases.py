"""Published numbers (cases.csv, with their sources) that the shape and the step arithmetic must reproduce."""

import csv
import json
from pathlib import Path

import pytest

from backend.planner.shape import AttentionLayer, ModelShape, UnsupportedArchitecture
from backend.planner.step import step_cost

HERE = Path(__file__).parent
CONFIGS = json.loads((HERE / "models.json").read_text())
CASES = list(csv.DictReader((HERE / "cases.csv").open()))
UNITS = {"KiB": 2**10, "GiB": 2**30, "GB": 1e9, "KB(1000)": 1e3, "ms": 1e-3}  # all others: as they are
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def shape_of(case: dict) -> ModelShape:
    """The named model, or one built from the row's dimensions (missing ones do not matter for that row)."""
    kv_dtype_bytes = case.get("kv_dtype_bytes", 2)
    if "model" in case:
        config = CONFIGS[case["model"]] | {k: case[k] for k in ("vocab_size",) if k in case}
        if case.get("ignore_window"):
            config = config | {"sliding_window": None}
        return ModelShape.from_config(config, DTYPE_BYTES[case.get("weight_dtype", "bf16")], kv_dtype_bytes)
    head_dim, kv_heads = case.get("head_dim", 128), case.get("kv_heads", 8)
    heads = case.get("q_heads", kv_heads)
    layers = case.get("layers", 1)
    sliding = case.get("sliding_layers", layers if "window" in case else 0)
    weights = int(case.get("weight_bytes", case.get("weight_gib", 0) * 2**30)) // 2
    return ModelShape.from_measured(
        attention=[
            AttentionLayer(heads, kv_heads, head_dim, head_dim, case["window"] if i < sliding else None)
            for i in range(layers)
        ],
        hidden=heads * head_dim,
        vocab=0,
        parameters=weights,
        matmul_parameters=weights,
        head_parameters=0,
        gathered_parameters=0,
        dtype_bytes=2,
        kv_dtype_bytes=kv_dtype_bytes,
    )


def decode(case: dict):
    """One decode step of `batch` sequences that then hold `tokens` each (0: the text leaves the cache out)."""
    return step_cost(shape_of(case), [(1, max(case["tokens"], 1) - 1)] * case["batch"], case["batch"])


def memory_s(case: dict) -> float:
    cost = decode(case)
    kv = cost.kv_read_bytes if case["tokens"] else 0
    return (cost.weight_bytes + kv) / (case["bw_tb_s"] * 1e12)


def linear_intensity(case: dict) -> float:
    shape = shape_of({"weight_bytes": 1_000_000})
    cost = step_cost(shape, [(1, 0)] * case["tokens"], 0)
    return cost.linear_flops / cost.weight_bytes


def attention_intensity(case: dict) -> float:
    cost = step_cost(shape_of(case), [(1, 999)] * 5, 0)
    return cost.attention_flops / cost.kv_read_bytes


def experts_touched(case: dict) -> float:
    shape = ModelShape(
        attention=(AttentionLayer(1, 1, 1, 1),),
        hidden=1,
        mlp=1,
        vocab=1,
        parameters=case["experts"],
        matmul_parameters=case["experts"],
        head_parameters=0,
        moe_layers=1,
        experts=case["experts"],
        experts_per_token=case["topk"],
        expert_parameters=1,
    )
    return shape.experts_touched(case["batch"])


def saved_fraction(case: dict) -> float:
    shape = shape_of({"weight_bytes": 1_000_000})
    warm = step_cost(shape, [(case["prompt"] - case["cached"], case["cached"])], 0).linear_flops
    return 1 - warm / step_cost(shape, [(case["prompt"], 0)], 0).linear_flops


def kv_to_weights(case: dict) -> float:
    cost = decode(case)
    return cost.kv_read_bytes / cost.weight_bytes


COMPUTE = {
    "kv_bytes_per_token": lambda c: shape_of(c).kv_bytes_per_token,
    "kv_bytes_total": lambda c: c["batch"] * shape_of(c).kv_bytes(c["tokens"]),
    "block_bytes": lambda c: shape_of(c).kv_bytes_per_token * c["block"],
    "param_count": lambda c: shape_of(c).parameters,
    "checkpoint_bytes": lambda c: shape_of(c).stored_weight_bytes,
    "checkpoint_gib": lambda c: shape_of(c).stored_weight_bytes,
    "decode_weight_bytes_read": lambda c: shape_of(c).step_weight_bytes,
    "kv_ratio_between_models": lambda c: (
        shape_of({"model": c["a"]}).kv_bytes_per_token / shape_of({"model": c["b"]}).kv_bytes_per_token
    ),
    "kv_to_weight_read_ratio": kv_to_weights,
    "kv_read_share": lambda c: kv_to_weights(c) / (1 + kv_to_weights(c)),
    "decode_step_lb_ms": memory_s,
    "decode_ceiling_tps": lambda c: c["batch"] / memory_s(c),
    "linear_intensity": linear_intensity,
    "decode_attention_intensity": attention_intensity,
    "moe_expected_distinct_experts": experts_touched,
    "prefill_attention_flops": lambda c: step_cost(shape_of(c), [(c["tokens"], 0)], 0).attention_flops,
    "prefix_flops_saved_fraction_linear": saved_fraction,
}


NUMBERS = [row for row in CASES if row["kind"] != "config_error"]
REFUSALS = [row for row in CASES if row["kind"] == "config_error"]


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: f"{row['id']}-{row['kind']}")
def test_published_number(row):
    found = COMPUTE[row["kind"]](json.loads(row["inputs_json"]))
    expected = float(row["expected"]) * UNITS.get(row["unit"], 1)
    assert found == pytest.approx(expected, rel=float(row["tolerance"]) or 1e-12), row["source"]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row["id"])
def test_refuses_what_it_does_not_know(row):
    with pytest.raises(UnsupportedArchitecture) as raised:
        ModelShape.from_config(json.loads(row["inputs_json"])["config"], 2)
    assert raised.value.reasons
