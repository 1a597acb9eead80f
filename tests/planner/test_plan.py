"""A plan as a whole: consistent in itself, honest about what it is."""

import pytest

from backend.planner import accelerators, catalogue, compare, estimates, levers, plan
from backend.planner.errors import PlannerError
from backend.planner.formats import KV, WEIGHTS, keeping, kv_format, weight_format


def setup(model="llama-3-8b", gpu="h100-sxm", weights="bf16", kv="bf16", **more):
    found = catalogue.find(model)
    return plan.Setup(
        name=found.name,
        arch=found.architecture,
        accelerator=accelerators.find(gpu),
        weights=WEIGHTS[weights],
        kv=KV[kv],
        **more,
    )


def test_bounds_and_estimates_stay_apart():
    made = plan.make(setup(accept=0.6, arrivals_per_s=0.5, tp=2, shared_prefix=1000))
    for name, result in made.results.items():
        assert result.kind in ("exact", "bound", "estimate"), name
        assert (result.low is not None) <= (result.kind == "estimate"), name
    assert made["step"].kind == "bound" and made["step_estimate"].kind == "estimate"
    assert made["step_estimate"].low > made["step"].value
    assert made["rate"].high < made["ceiling"].value
    assert "public measurements" in made["step_estimate"].note


def test_sums_are_the_sums_of_their_terms():
    made = plan.make(setup("deepseek-v3", "h200", "fp8", tp=8))
    for name in ("checkpoint", "weights_per_gpu", "weights_read", "kv_per_sequence", "memory", "prefill_flops"):
        assert sum(term.value for term in made[name].terms) == pytest.approx(made[name].value), name
        assert all(term.formula for term in made[name].terms), name
    step = made["step"]
    weights, cache, arithmetic = (term.value for term in step.terms)
    assert step.value == max(weights + cache, arithmetic)


def test_no_more_run_than_fit_and_the_plan_says_so():
    made = plan.make(setup(batch=500))
    assert made.running == made["concurrency"].value < 500
    assert any("wait" in note for note in made.notes)
    assert made["ceiling"].value == pytest.approx(made.running / made["step"].value)


def test_what_does_not_fit_is_said_and_its_budget_is_negative():
    made = plan.make(setup("llama-3.1-405b"))
    assert made["memory"].value < 0 and made["concurrency"].value is None and not made.fits
    assert "does not fit" in made["memory"].note
    assert any("more memory" in note for note in made.notes)


def test_a_pipeline_holds_less_on_each_gpu_and_a_token_still_passes_every_layer():
    one, two = plan.make(setup(tp=4)), plan.make(setup(tp=4, pp=2))
    assert two["weights_per_gpu"].value < 0.6 * one["weights_per_gpu"].value
    assert two["concurrency"].value > 1.9 * one["concurrency"].value
    assert two["step"].value < one["step"].value  # half the batch in each stage's step …
    alone = [plan.decode(setup(tp=4, pp=stages), 1).value for stages in (1, 2)]
    assert alone[0] == alone[1]  # … but nothing for a single sequence


def test_formats_that_a_part_cannot_compute_only_shrink_the_bytes():
    ampere = plan.make(setup(gpu="a100-sxm-80gb", weights="fp8"))
    assert any("computed in bf16" in note for note in ampere.notes)
    plain = plan.make(setup(gpu="a100-sxm-80gb"))
    assert ampere["ttft"].value == plain["ttft"].value
    assert ampere["weights_per_gpu"].value < 0.6 * plain["weights_per_gpu"].value


def test_a_shared_prefix_is_stored_once_and_computed_once():
    alone, shared = plan.make(setup(context=4096)), plan.make(setup(context=4096, shared_prefix=2048))
    assert shared["concurrency"].value == pytest.approx(2 * alone["concurrency"].value, rel=0.03)
    assert shared["ttft"].value == pytest.approx(alone["ttft"].value * (1 - 2048 / 3840), rel=0.1)
    assert plan.cached_prefix(setup(context=4096, shared_prefix=2050)) == 2048  # whole blocks only


def test_more_arrivals_keep_more_at_work_until_the_queue_has_no_end():
    found = [plan.make(setup(arrivals_per_s=rate))["at_work"] for rate in (0.1, 0.5, 1.0)]
    values = [result.value for result in found]
    assert values == sorted(values) and values[0] < values[-1]
    assert "unstable" in plan.make(setup(arrivals_per_s=500.0))["at_work"].note


def test_energy_is_from_the_rated_power_and_says_so():
    made = plan.make(setup())
    assert "TDP" in made["joules"].note
    assert made["joules"].value == pytest.approx(700 / made["rate"].value)
    assert plan.make(setup(gpu="tpu-v5e"))["joules"].value is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": 0}, "tp"),
        ({"batch": 2.5}, "batch"),
        ({"context": 100, "output": 100}, "no prompt"),
        ({"pp": 40}, "40 pipeline stages for 32 layers"),
        ({"shared_prefix": 9000}, "shared prefix"),
        ({"accept": 1.0}, "accept"),
        ({"usd_per_gpu_hour": float("nan")}, "usd_per_gpu_hour"),
    ],
)
def test_nonsense_is_named(change, words):
    with pytest.raises(PlannerError, match=words):
        setup(**change)


def test_side_by_side_says_what_differs_and_why():
    a, b = setup("llama-2-7b"), setup("llama-3-8b", kv="fp8")
    assert compare.inputs(a, b) == [("model", "Llama-2-7b-hf", "Llama-3-8B"), ("KV cache", "bf16", "fp8")]
    found = {d.name: d for d in compare.differences(plan.make(a), plan.make(b))}
    assert found["kv_per_sequence_per_gpu"].ratio == pytest.approx(1 / 8)
    assert found["concurrency"].better == "B" and "a sequence takes × 0.125" in found["concurrency"].why
    assert "mostly KV" in found["step"].why
    assert found["ttft"].better == "A"  # the larger model computes longer


def test_the_same_twice_has_no_difference():
    made = plan.make(setup())
    assert all(d.better == "" and not d.why and d.ratio == 1 for d in compare.differences(made, made))


def test_what_has_no_ratio_still_has_a_better_side():
    """A budget below zero, and what costs nothing: a factor between them would be nonsense."""
    small, large = plan.make(setup("llama-3-8b")), plan.make(setup("llama-3.1-405b").but(usd_per_gpu_hour=0.0))
    found = {d.name: d for d in compare.differences(small, large)}
    assert large["memory"].value < 0 and large["cost"].value == 0
    assert (found["memory"].ratio, found["memory"].better) == (None, "A")
    assert (found["cost"].ratio, found["cost"].better) == (None, "B")


def test_a_lever_in_use_is_not_offered_again():
    named = {lever.name: lever for lever in levers.rank(setup("qwen3-8b", weights="int4-g128", kv="fp8"))}
    assert not named["KV cache in fp8"].applies and not named["Weights in int4"].applies
    assert named["Twice the bandwidth"].throughput == pytest.approx(2)


def test_levers_of_what_does_not_fit_make_it_fit():
    named = {lever.name: lever for lever in levers.rank(setup("llama-3.1-70b"))}
    assert named["Weights in int4"].concurrency == float("inf")


def test_bands_widen_a_bound_and_name_their_rows():
    for mixture in (False, True):
        for batch in (1, 32):
            for tp in (1, 2, 3, 8, 64):
                band = estimates.decode_band(mixture, batch, tp)
                assert 1 < band.low < band.median < band.high and band.words


def test_measured_ceilings_have_a_band_of_their_own():
    """What is measured is reached: no data sheet's and no server's factor belongs on it."""
    part = accelerators.measured(
        "here", memory_bytes=32 << 30, read_bytes_per_s=25e9, flops_per_s={"float32": 130e9}, source="a test"
    )
    made = plan.make(setup("smollm2-135m").but(accelerator=part, batch=8, context=256, output=1))
    estimate = made["step_estimate"]
    by_turns = sum(term.value for term in made["step"].terms)  # two cores do not read and multiply at the same time
    assert made["step"].value <= estimate.low < by_turns < estimate.value < estimate.high < 1.7 * by_turns
    assert "KVScope's own engine" in estimate.note and "public" not in estimate.note
    assert made["ttft"].value <= made["ttft_estimate"].low < made["ttft_estimate"].high < 2.35 * made["ttft"].value
    assert made["rate"].high <= made["ceiling"].value


def test_formats_by_what_people_call_them():
    assert weight_format("AWQ").name == "int4-g128"
    assert weight_format("int4-g64 scales+zeros bf16").of("mlp") == 4.5
    assert kv_format("int4 group 64 fp16 scale+zero").bits == 4.5
    assert keeping(WEIGHTS["fp8"], {"attention": 16.0}, "attention left").of("attention") == 16
    with pytest.raises(PlannerError, match="known"):
        weight_format("float7")
