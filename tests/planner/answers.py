"""One planner call for each kind of row of `cases.csv`. Answers are in bytes and seconds, or the unit the row names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from backend.planner import accelerators, capacity, catalogue, cost, kvcache, napkin, prefix, queueing, speculative
from backend.planner import roofline as roof
from backend.planner import weights as weighing
from backend.planner.accelerators import Accelerator
from backend.planner.arch import Architecture
from backend.planner.byhand import by_hand
from backend.planner.config import parse
from backend.planner.errors import PlannerError
from backend.planner.formats import KvFormat, WeightFormat, keeping, kv_format, kv_of_bytes, weight_format
from backend.planner.units import GB, GIB, TFLOPS, to_si

Row = dict[str, Any]
MOST_AT_ONCE = 1 << 16
LEFT_IN_BF16 = {"attention": 16.0, "head": 16.0, "embedding": 16.0}


# What a row is about.


def architecture(row: Row) -> Architecture:
    """The named model (with what the row changes in its configuration), or one made of the row's dimensions."""
    if "model" in row:
        model = catalogue.find(row["model"])
        changes = {key: row[key] for key in ("vocab_size",) if key in row}
        if row.get("ignore_window"):
            changes |= {"sliding_window": None, "layer_types": None}
        return parse(model.config | changes) if changes else model.architecture
    hybrid = "full_attention_interval" in row
    names = {
        "k_heads": "linear_num_key_heads",
        "v_heads": "linear_num_value_heads",
        "k_dim": "linear_key_head_dim",
        "v_dim": "linear_value_head_dim",
        "kernel": "linear_conv_kernel_dim",
    }
    latent = "kv_lora_rank" in row or "mla_layout" in row
    hidden = row.get("hidden")
    return by_hand(
        layers=row.get("layers", 1),
        kv_heads=row.get("kv_heads", row.get("q_heads", 1)),
        q_heads=row.get("q_heads"),
        head_dim=row.get("head_dim", 128),
        hidden=hidden,
        ff=row.get("ff", int(row["ffn_mult"] * hidden) if "ffn_mult" in row else 0),
        gated=row.get("gated", True),
        vocab=row.get("vocab", 0),
        tied=row.get("tied", True),
        norms=row.get("norms", True),
        window=row.get("window"),
        sliding_layers=row.get("sliding_layers"),
        kv_lora_rank=row.get("kv_lora_rank", 512) if latent else 0,
        qk_rope_head_dim=row.get("qk_rope_head_dim", 64) if latent else 0,
        index_head_dim=row.get("index_head_dim", 0),
        full_attention_interval=row.get("full_attention_interval", 0),
        linear={name: row[key] for name, key in names.items()} if hybrid else None,
    )


def kv(row: Row) -> KvFormat:
    if "mla_layout" in row:
        return kv_format(row["mla_layout"])
    if "kv_scheme" in row:
        return kv_format(row["kv_scheme"])
    return kv_of_bytes(row.get("kv_dtype_bytes", 2))


def weights(row: Row) -> WeightFormat:
    form = weight_format(row.get("weight_dtype") or row.get("scheme") or "bf16")
    return keeping(form, LEFT_IN_BF16, row["bf16_modules"]) if "bf16_modules" in row else form


def accelerator(row: Row) -> Accelerator:
    """The named one, or one of the row's own rates (no arithmetic known: infinitely fast)."""
    found = accelerators.find(row["gpu"]) if "gpu" in row else None
    bandwidth = row["bw_tb_s"] * 1000 * GB if "bw_tb_s" in row else row.get("bw_gb_s", 0) * GB
    rate = row.get("tflops", 0) * TFLOPS
    if found is None:
        rates = dict.fromkeys(("bf16", "fp16", "fp8", "int8", "fp4", "fp32"), rate or 1e30)
        return Accelerator(
            key="row", name="of this row", vendor="", memory_bytes=int(row.get("mem_gb", 1e6) * GB),
            bandwidth_bytes_per_s=bandwidth or 1e30, flops_per_s=rates,
        )  # fmt: skip
    return found


def tp(row: Row) -> int:
    return row.get("tp", row.get("n_gpus", 1))


def bandwidth(row: Row) -> float:
    return accelerator(row).bandwidth_bytes_per_s * row.get("n_gpus", 1)


def rate(row: Row) -> float:
    if "tflops" in row:
        return row["tflops"] * TFLOPS * row.get("n_gpus", 1)
    return accelerator(row).rate(row.get("dtype", "bf16")) * row.get("n_gpus", 1)


def weight_bytes(row: Row) -> float:
    if "weight_bytes" in row:
        return row["weight_bytes"]
    if "weight_gib" in row or "weight_gb" in row:
        return row["weight_gib"] * GIB if "weight_gib" in row else row["weight_gb"] * GB
    if "params" in row and "model" not in row:
        return row["params"] * weights(row).of("mlp") / 8
    return weighing.read_bytes(architecture(row), weights(row), row.get("batch", 1))


def kv_bytes(row: Row) -> float:
    """Of the whole batch."""
    if "kv_bytes_per_seq" in row:
        return row["batch"] * row["kv_bytes_per_seq"]
    if "kv_bytes_per_token" in row:
        return row["batch"] * row["tokens"] * row["kv_bytes_per_token"]
    if not row.get("tokens") or not ("layers" in row or "model" in row):
        return 0.0
    return row["batch"] * kvcache.kv_model(architecture(row), kv(row)).kv_bytes(row["tokens"])


# Kinds with more to them than one call.


def step_s(row: Row) -> float:
    flops = 2 * row["params"] * row["batch"] if "params" in row and "tflops" in row else 0.0
    return napkin.step_time(
        weight_bytes=weight_bytes(row),
        kv_bytes=kv_bytes(row),
        bytes_per_s=bandwidth(row),
        flops=flops,
        flops_per_s=rate(row) if flops else None,
    ).value


def step_sum_s(row: Row) -> float:
    return napkin.step_time_unoverlapped(
        weight_bytes=weight_bytes(row),
        kv_bytes=kv_bytes(row),
        bytes_per_s=bandwidth(row),
        flops=2 * row["params"] * row["batch"],
        flops_per_s=rate(row),
    ).value


def running(row: Row, context: int) -> int:
    """A configured concurrency is not a running batch: no more run than the cache of that accelerator holds."""
    if "gpu" not in row:
        return row["batch"]
    most = capacity.max_concurrency(
        architecture(row), weights(row), kv(row), accelerator(row), context=context, tp=tp(row)
    )
    return min(row["batch"], most.value) if most.value else row["batch"]


def decode_s(row: Row) -> float:
    if "model" not in row:
        return step_s(row)
    context = row.get("context", row.get("tokens", 0))
    return roof.decode_step(
        architecture(row), weights(row), kv(row), accelerator(row),
        batch=running(row, context), context=context, tp=tp(row),
    ).value  # fmt: skip


def decode_tps(row: Row) -> float:
    if "model" not in row:
        return row["batch"] / step_s(row)
    return running(row, row.get("context", row.get("tokens", 0))) / decode_s(row)


def prefill_s(row: Row) -> float:
    tokens = row.get("isl", row.get("tokens"))
    if "model" not in row:
        flops = napkin.parameters_flops(row["params"], tokens).value
        if row.get("attention") and "layers" in row:
            flops += roof.attention_flops(architecture(row), tokens)
        return napkin.arithmetic_time(flops, rate(row), row.get("mfu", 1.0)).value
    if "tflops" in row:
        flops = roof.prefill_flops(architecture(row), tokens).value
        return napkin.arithmetic_time(flops, rate(row), row.get("mfu", 1.0)).value
    form, where = weights(row), accelerator(row)
    return roof.prefill_time(architecture(row), form, where, tokens=tokens, tp=tp(row)).value


def throughput(row: Row) -> float:
    arch, form, cache, where = architecture(row), weights(row), kv(row), accelerator(row)
    batch = row.get("batch")
    if batch is None:
        whole = capacity.Reserve(utilisation=1.0, step_tokens=1, other_bytes=0, graph_bytes=0)
        most = capacity.max_concurrency(arch, form, cache, where, context=row["isl"], tp=tp(row), reserve=whole).value
        batch = most or MOST_AT_ONCE  # somebody ran what we say does not fit: then weights cost each of them nothing
    return roof.throughput(
        arch, form, cache, where, prompt=row["isl"], output=row["osl"], batch=batch, tp=tp(row)
    ).value


def kv_total(row: Row) -> float:
    """Keys and values; with the states of recurrent layers where the row says how those are stored."""
    arch, form, tokens = architecture(row), kv(row), row["tokens"]
    index = row.get("index_bytes_per_token_layer", 0) * len(arch.layers) * tokens
    model = kvcache.kv_model(arch, form)
    one = model.bytes(tokens) if "state_dtype_bytes" in row else model.kv_bytes(tokens)
    return row.get("batch", 1) * (one + index)


def kv_per_gpu(row: Row) -> float:
    return kvcache.kv_model(architecture(row), kv(row), row["tp"]).bytes_per_token


def one_more_token(model: kvcache.KvModel) -> float:
    """Bytes; where windows are all there is, before they are full."""
    return model.bytes_per_token or model.slot_bytes_per_token


def kv_tokens(row: Row) -> float:
    model = kvcache.kv_model(architecture(row), kv(row), row.get("tp", 1))
    return kvcache.tokens_from_bytes(row["kv_gib"] * GIB, one_more_token(model), row.get("block", 1)).value


def hybrid_concurrency(row: Row) -> float:
    one = kvcache.kv_model(architecture(row), kv(row), row.get("tp", 1)).bytes(row["max_model_len"])
    return row["available_kv_gib"] * GIB / one


def kv_to_weights(row: Row) -> float:
    return kv_bytes(row) / weight_bytes(row)


def checkpoint(row: Row) -> float:
    model, arch = catalogue.find(row["model"]), architecture(row)
    return weighing.checkpoint(
        arch, weights(row), head_twice=model.file_stores_tied_head, extra_bytes=model.file_extra_bytes
    ).value


def forward_flops(row: Row) -> float:
    arch = architecture(row)
    active = arch.active_matmul_parameters - (0 if row.get("embed", True) else arch.head)
    return napkin.parameters_flops(active, row.get("tokens", 1)).value


def attention_flops(row: Row) -> float:
    arch = architecture(row)
    before, causal = row.get("offset", row.get("cached", 0)), row.get("causal", True)
    return roof.attention_flops(arch, row.get("chunk", row["tokens"]), before, causal=causal)


def saved_share(row: Row) -> float:
    return prefix.saved_share(row["prompt"], row["cached"]).value


def identity(row: Row) -> str:
    """Whether a logged capacity is what concurrency × length says; of a hybrid it is not."""
    said = row["max_concurrency"] * row["max_model_len"]
    return "equal" if abs(said / row["logged_tokens"] - 1) < 0.01 else "not equal"


def mla_ratio(row: Row) -> float:
    """Tokens with the latent counted once, over tokens with it counted `wrong_factor` times."""
    size, budget = kvcache.kv_model(architecture(row), kv(row)).bytes_per_token, 10 * GIB
    wrong = kvcache.tokens_from_bytes(budget, size * row["wrong_factor"]).value
    return kvcache.tokens_from_bytes(budget, size).value / wrong


def memory_size(row: Row) -> float:
    """Bytes of an accelerator that is named by its printed size, or of a size itself."""
    if size := re.fullmatch(r"([\d.,]+) ?([KMGT]i?B)", row["value"].strip()):
        return to_si(float(size[1].replace(",", "")), size[2])
    return accelerators.find(row["value"]).memory_bytes


def max_concurrency(row: Row) -> float:
    if "kv_budget_gib" not in row:
        arch, where, reserve = architecture(row), accelerator(row), reserved(row)
        found = capacity.max_concurrency(
            arch, weights(row), kv(row), where, context=row["tokens_per_seq"], tp=tp(row), reserve=reserve
        )
        return found.value or 0
    model = kvcache.kv_model(architecture(row), kv(row), row.get("tp", 1))
    return capacity.concurrency(row["kv_budget_gib"] * GIB, model, row["tokens_per_seq"], row.get("block", 1)).value


def reserved(row: Row) -> capacity.Reserve:
    given = {"utilisation": row.get("utilisation", row.get("utilization")), "block_size": row.get("block")}
    return capacity.Reserve(**{name: value for name, value in given.items() if value is not None})


def fits(row: Row) -> bool:
    if "gpu" in row and "mem_gb" not in row:
        budget = capacity.memory_budget(architecture(row), weights(row), accelerator(row), reserved(row), tp=tp(row))
        return budget.value >= kv_bytes({"batch": 1} | row) / tp(row)
    return bool(capacity.fits(row["mem_gb"] * GB * row.get("n_gpus", 1), weight_bytes(row), kv_bytes(row)).value)


def touched(row: Row) -> float:
    arch = by_hand(layers=1, ff=1, experts=row["experts"], experts_per_token=row["topk"])
    return arch.mixtures[0].touched(row["batch"])


def dtype_error(row: Row) -> float:
    return accelerators.find(row["gpu"]).rate(row["dtype"])


def capacity_tokens(row: Row) -> float:
    left = row["mem_gb"] * GB * row.get("n_gpus", 1) - row["weight_bytes"]
    if left < 0:
        raise PlannerError("the weights alone do not fit")
    return kvcache.tokens_from_bytes(left, row["kv_bytes_per_token"]).value


def comm_s(row: Row) -> float:
    return napkin.all_reduce_time(
        layers=row["layers"], hidden=row["hidden"], tokens=row["batch"], per_layer=row.get("comms_per_layer", 2),
        element_bytes=row.get("bytes_per_el", 2), bytes_per_s=row["link_gb_s"] * GB, gpus=row.get("n_gpus"),
    ).value  # fmt: skip


def rate_little(row: Row) -> float:
    ttft_s = row.get("ttft_s", row.get("ttft_ms", 0) / 1e3)
    return queueing.arrival_rate(row["concurrency"], row["tokens_out"], row["tpot_ms"] / 1e3, ttft_s).value


def ridge(row: Row) -> float:
    """The row's own rates where it gives them, else those of the named accelerator."""
    own = {"bw_tb_s", "bw_gb_s"} & row.keys()
    where = accelerator({k: v for k, v in row.items() if k != "gpu"} if own else row)
    flops = row["tflops"] * TFLOPS if "tflops" in row else where.rate(row.get("dtype", "bf16"))
    return napkin.ridge(flops, where.bandwidth_bytes_per_s).value


def kv_projection(row: Row) -> float:
    """Making K and V of one token: two matrices of hidden × (KV heads × head size), in each layer."""
    width = row.get("kv_heads", 0) * row.get("head_dim", 0) or row["hidden"]
    return napkin.parameters_flops(2 * row["layers"] * row["hidden"] * width, row.get("tokens", 1)).value


def kv_of(name: str, row: Row) -> float:
    return one_more_token(kvcache.kv_model(catalogue.find(name).architecture, kv(row)))


ANSWERS: dict[str, Callable[[Row], Any]] = {
    "active_params_excl_input_embedding": lambda r: architecture(r).active_parameters - architecture(r).gathered,
    "active_params_incl_embedding": lambda r: architecture(r).active_parameters,
    "answer_time_s": lambda r: r["ttft_s"] + r["tokens_out"] * r["tpot_ms"] / 1e3,
    "b_crit": lambda r: napkin.critical_batch(rate(r), bandwidth(r), r["weight_bytes_per_param"]).value,
    "block_bytes": lambda r: kvcache.kv_model(architecture(r), kv(r)).slot_bytes_per_token * r["block"],
    "block_waste_tokens": lambda r: kvcache.block_waste(r["tokens"], r["block"]).value,
    "checkpoint_bytes": checkpoint,
    "checkpoint_gib": checkpoint,
    "compute_time_ms": lambda r: (
        napkin.arithmetic_time(napkin.parameters_flops(r["params"], r["tokens"]).value, rate(r)).value
    ),
    "concurrency_ratio": lambda r: r["kv_tokens"] / r["max_model_len"],
    "config_error": lambda r: parse(r["config"]).parameters,
    "cost_per_1k_tokens": lambda r: (
        cost.per_thousand_in(r["usd_per_gpu_hour"], r["n_gpus"], r["seconds"], r["tokens"]).value
    ),
    "cost_per_million_tokens": lambda r: cost.per_million(r["usd_per_gpu_hour"], r["n_gpus"], r["tok_s"]).value,
    "decode_attention_intensity": lambda r: (
        napkin.attention_intensity(r["q_heads"], r["kv_heads"], r["kv_dtype_bytes"]).value
    ),
    "decode_ceiling_tps": decode_tps,
    "decode_measured_vs_ceiling_tps": decode_tps,
    "decode_measured_vs_lb_ms": decode_s,
    "decode_step_lb_ms": decode_s,
    "decode_step_sum_ms": step_sum_s,
    "decode_weight_bytes_read": weight_bytes,
    "disagg_ratio": lambda r: (
        queueing.prefill_servers(r["prefill_s"], r["decode_step_s"], r["batch"], r["output"]).value
    ),
    "dtype_error": dtype_error,
    "effective_bits_per_param": lambda r: weighing.effective_bits(architecture(r), weights(r)).value,
    "fits": fits,
    "forward_flops_per_token": forward_flops,
    "hybrid_concurrency": hybrid_concurrency,
    "kv_bytes_group_per_token": lambda r: r["tp"] * kv_per_gpu(r),
    "kv_bytes_per_gpu_per_token": kv_per_gpu,
    "kv_bytes_per_gpu_ratio": lambda r: kv_per_gpu(r) / kv_per_gpu(r | {"tp": r["vs_tp"]}),
    "kv_bytes_per_gpu_total": lambda r: (
        r.get("batch", 1) * kvcache.kv_model(architecture(r), kv(r), r["tp"]).kv_bytes(r["tokens"])
    ),
    "kv_bytes_per_token": lambda r: kvcache.kv_model(architecture(r), kv(r)).bytes_per_token,
    "kv_bytes_total": kv_total,
    "kv_evict_tokens_per_step": lambda r: queueing.evicted_per_step(r["batch"], r["prompt"], r["output"]).value,
    "kv_projection_flops": kv_projection,
    "kv_ratio_between_models": lambda r: kv_of(r["a"], r) / kv_of(r["b"], r),
    "kv_read_share": lambda r: kv_to_weights(r) / (1 + kv_to_weights(r)),
    "kv_to_weight_read_ratio": kv_to_weights,
    "kv_tokens_capacity": capacity_tokens,
    "kv_tokens_from_bytes": kv_tokens,
    "linear_intensity": lambda r: napkin.linear_intensity(r["tokens"], r["weight_bytes_per_param"]).value,
    "littles_law_rate": rate_little,
    "littles_law_stability": lambda r: queueing.stable(r["arrival_rate"], rate_little(r)),
    "matmul_time_ms": lambda r: napkin.arithmetic_time(r["flops"], rate(r)).value,
    "max_concurrency": max_concurrency,
    "measured_ratio": lambda r: r["decode_ms_per_token"] / (r["prefill_ms"] / r["prefill_tokens"]),
    "mla_token_ratio": mla_ratio,
    "moe_expected_distinct_experts": touched,
    "param_count": lambda r: architecture(r).parameters,
    "param_count_from_dims": lambda r: architecture(r).parameters,
    "prefill_attention_flops": attention_flops,
    "prefill_measured_vs_ceiling_tps": lambda r: r.get("isl", r.get("tokens")) / prefill_s(r),
    "prefill_measured_vs_lb_ms": prefill_s,
    "prefill_time_s": prefill_s,
    "prefix_flops_saved_fraction_linear": saved_share,
    "prefix_hit_last_block": lambda r: prefix.cached_tokens(r["prompt"], r["shared_prefix"], r["block"]).value,
    "qps_per_chip": lambda r: queueing.arrival_rate(r["batch"], r["output"], r["step_s"]).value / r["n_chips"],
    "ridge_flop_per_byte": ridge,
    "spec_expected_tokens": lambda r: speculative.expected_tokens(r["accept"], r["gamma"]).value,
    "spec_measured_speedup_le_accept_len": lambda r: speculative.most_speedup(r["accept_len"]).value,
    "spec_speedup": lambda r: speculative.speedup(r["accept"], r["gamma"], r["draft_cost_ratio"]).value,
    "tail_queue": lambda r: queueing.sojourn(r["rho"], r["service_s"], r["model"]).value,
    "throughput_measured_vs_bound_tps": throughput,
    "tokens_processed_no_cache": lambda r: napkin.tokens_without_cache(r["prompt"], r["new"]).value,
    "tp_comm_time_ms": comm_s,
    "tpot_to_tps": lambda r: 1e3 / r["tpot_ms"],
    "unit": memory_size,
    "vllm_log_identity": identity,
    "weights_gib_per_gpu": lambda r: weighing.per_gpu(architecture(r), weights(r), tp(r), r.get("pp", 1)).value,
}
