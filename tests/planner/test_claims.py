"""What the texts behind the explorer claim, reproduced; where they round, the exact value and how theirs came about."""

import pytest

from backend.planner import accelerators, capacity, catalogue, kvcache, levers, napkin, plan, speculative, weights
from backend.planner import roofline as roof
from backend.planner.byhand import by_hand
from backend.planner.formats import kv_format, weight_format
from backend.planner.units import GB, GIB, KIB

BF16, FP8 = kv_format("bf16"), kv_format("fp8")


def arch(name):
    return catalogue.find(name).architecture


def kv(name, form=BF16):
    return kvcache.kv_model(arch(name), form)


def setup(model="Llama-3-8B", gpu="h100-sxm-80gb", weight="bf16", cache="bf16", **more):
    return plan.Setup(
        name=model,
        arch=arch(model),
        accelerator=accelerators.find(gpu),
        weights=weight_format(weight),
        kv=kv_format(cache),
        **more,
    )


def test_kv_bytes_are_two_batch_tokens_layers_heads_width_bytes():
    dims = {"layers": 32, "kv_heads": 8, "head_dim": 128}
    base = kvcache.kv_model(by_hand(**dims, q_heads=32, ff=14336, vocab=128_256), BF16)
    assert base.bytes(1000) == 2 * 1000 * 32 * 8 * 128 * 2
    other = kvcache.kv_model(by_hand(**dims, q_heads=64, ff=100, vocab=5), BF16)
    assert other == base  # query heads, MLP and vocabulary do not enter


def test_llama_3_8b_keeps_128_kib_a_token_and_1_gib_for_8k():
    assert kv("Llama-3-8B").bytes_per_token == 128 * KIB
    assert kv("Llama-3-8B").bytes(8192) == GIB


def test_llama_2_7b_keeps_half_a_mebibyte_a_token():
    model = kv("Llama-2-7b-hf")
    assert model.bytes_per_token == 524_288
    assert model.bytes(4096) / GB == pytest.approx(2.147, abs=5e-4)  # printed "2.1 GB"; 2.00 GiB exactly
    many = 32 * model.bytes(4096)
    assert many / GB == pytest.approx(68.7, abs=0.05)  # printed "69 GB"
    assert many / 14e9 == pytest.approx(4.9, abs=0.01)  # 7e9 in 16 bit; of the real 13.48 GB: 5.1


def test_a_quarter_of_the_kv_heads_holds_four_times_the_conversations():
    full = arch("Llama-2-7b-hf")
    grouped = levers.regrouped(full, lambda mixer: 8)
    before, after = (kvcache.kv_model(a, BF16) for a in (full, grouped))
    assert (after.bytes_per_token, before.bytes_per_token / after.bytes_per_token) == (128 * KIB, 4)
    held = [capacity.concurrency(40 * GIB, model, 4096).value for model in (before, after)]
    assert held == [20, 80]


def test_an_8_bit_cache_halves_bytes_and_doubles_conversations():
    assert kv("Llama-3-8B", FP8).bytes(8192) * 2 == kv("Llama-3-8B").bytes(8192)
    held = [capacity.concurrency(40 * GIB, kv("Llama-3-8B", form), 8192).value for form in (BF16, FP8)]
    assert held == [40, 80]


def test_llama_3_8b_keeps_more_than_twice_what_qwen_keeps():
    llama, qwen = kv("Llama-3-8B").bytes_per_token, kv("Qwen2.5-7B").bytes_per_token
    assert (llama, qwen) == (128 * KIB, 56 * KIB)
    assert llama / qwen == pytest.approx(2.29, abs=0.005)


def test_deepseek_v3_does_not_fit_8_h100_and_fits_8_h200():
    assert not plan.make(setup("DeepSeek-V3", "h100-sxm-80gb", "fp8", tp=8)).fits
    assert plan.make(setup("DeepSeek-V3", "h200-sxm-141gb", "fp8", tp=8)).fits
    latent = [kvcache.kv_model(arch("DeepSeek-V3"), BF16, tp).bytes_per_token for tp in (1, 8)]
    assert latent == [70_272, 70_272]  # every GPU keeps its own


def test_64_long_conversations_overflow_80_gb_though_the_weights_are_14():
    one = kv("Llama-2-7b-hf").bytes(4096)
    assert 64 * one / GB == pytest.approx(137.4, abs=0.05)
    assert not capacity.fits(80e9, 14e9, 64 * one).value
    assert (80e9 - 14e9) // one == 30


def test_the_cache_outgrows_the_weights():
    """At 16e9 and 14e9 bytes of weights, as the texts have them."""
    assert int(napkin.cache_equals_weights(16e9, kv("Llama-3-8B").bytes_per_token).value) == 122_070
    assert round(napkin.cache_equals_weights(14e9, kv("Llama-2-7b-hf").bytes_per_token).value) == 26_703


def test_twice_the_flops_halve_a_prompt_but_not_a_decode_step():
    base = setup(context=8192)
    faster = base.but(accelerator=base.accelerator.scaled(flops=2.0))
    assert plan.make(base)["ttft"].value / plan.make(faster)["ttft"].value == pytest.approx(2)
    assert plan.make(base)["step"].value == plan.make(faster)["step"].value


def test_context_and_batch_raise_the_share_of_the_cache_past_half():
    def share(batch, context):
        step = plan.decode(setup(context=context), batch)
        return step.terms[1].value / (step.terms[0].value + step.terms[1].value)

    by_batch = [share(batch, 8192) for batch in (1, 8, 16, 32)]
    by_context = [share(16, context) for context in (1024, 4096, 8192, 32_768)]
    assert by_batch == sorted(by_batch) and by_context == sorted(by_context)
    assert by_batch[0] < 0.5 < by_batch[-1] and by_context[0] < 0.5 < by_context[-1]


def test_a_mixture_reads_what_its_tokens_touch():
    mixtral, form = arch("Mixtral-8x7B-v0.1"), weight_format("bf16")
    alone = weights.read_bytes(mixtral, form, 1)
    assert alone / 2 == mixtral.active_parameters - mixtral.gathered
    assert weights.read_bytes(mixtral, form, 64) == pytest.approx(2 * (mixtral.parameters - mixtral.gathered), rel=1e-6)


def test_prefill_of_2000_tokens_of_a_7b_model():
    flops = napkin.parameters_flops(7e9, 2000).value
    assert flops == 2.8e13
    assert napkin.arithmetic_time(flops, 312e12, 1.25 / 3.12).value == pytest.approx(0.224)  # 40 % of an A100's peak


def test_output_costs_several_times_input_and_cached_input_a_tenth_or_less():
    found = plan.make(setup("Llama-3.1-70B", "h100-sxm-80gb", tp=4, context=4096, batch=32))
    assert found["cost"].value > 3 * found["cost_input"].value
    assert found["cost_cached"].value < 0.1 * found["cost_input"].value


def test_levers_are_ranked_by_their_computed_gain():
    ranked = levers.rank(setup("Llama-2-7b-hf", "a100-sxm-80gb", context=4096))
    gains = [lever.throughput for lever in ranked if lever.applies]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1
    named = {lever.name: lever for lever in ranked}
    assert named["KV cache in fp8"].concurrency == pytest.approx(2, abs=0.05)
    assert named["Twice the FLOP/s"].throughput == 1  # decode is limited by memory here
    assert named["Grouped-query attention"].throughput > named["KV cache in fp8"].throughput  # 8 to 1 against 2 to 1


def test_speculation_emits_several_tokens_a_step_until_the_batch_computes():
    assert speculative.expected_tokens(0.8, 5).value == pytest.approx(3.69, abs=0.005)
    short = setup(context=512, accept=0.8, gamma=5)
    assert plan.speculation(short, 1).value > 2.9
    assert plan.speculation(short, 512).value < 1.5


def test_a_cache_comes_back_from_the_host_at_the_speed_of_the_bus():
    found = plan.make(setup(context=8192))
    assert found["offload"].value == pytest.approx(GIB / 64e9)


def test_memory_not_weights_limits_how_many_run():
    held = [plan.room(setup(context=context)).value for context in (2048, 8192, 32_768)]
    assert held[0] / held[2] == pytest.approx(16, rel=0.1)
    weight_share = weights.per_gpu(arch("Llama-3-8B"), weight_format("bf16")).value / setup().accelerator.memory_bytes
    assert weight_share < 0.2 and held[2] < 20


def test_batches_stop_paying_at_the_ridge_for_weights_alone():
    part = accelerators.find("a100-sxm-80gb")
    assert napkin.critical_batch(part.rate("bf16"), part.bandwidth_bytes_per_s, 2).value == pytest.approx(153, abs=0.5)
    short, long = (
        roof.crossover_batch(arch("Llama-3-8B"), weight_format("bf16"), BF16, part, context=context)
        for context in (16, 8192)
    )
    assert 150 < short.value < 250
    assert long.value is None and "never" in long.note
