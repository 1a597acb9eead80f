"""Which architectures are let in, and what the others are told."""

import pytest
import torch
from transformers import AutoConfig

from backend.models.errors import ModelError
from backend.models.gate import gate, text_part
from backend.models.probe import probe
from backend.models.randomised import build

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "sliding_window": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
}  # fmt: skip

ADMITTED = [
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "olmo3",
    "granite", "cohere2", "gpt2", "gpt_neox", "gpt_bigcode", "gpt_oss", "opt", "stablelm", "starcoder2", "smollm3",
    "glm4", "nemotron", "qwen3_moe",
]  # fmt: skip


def tiny_config(family: str, **changes):
    return AutoConfig.for_model(family, **{**SIZES, **changes})


@pytest.mark.parametrize("family", ADMITTED)
def test_decoders_pass_and_their_attention_is_seen_as_it_is(family):
    config = tiny_config(family)
    gate(config)
    gate(config.to_dict())  # a raw config.json, before anything is fetched
    model = build(config, torch.float32, torch.device("cpu")).eval()
    shapes = probe(model, family)
    assert len(shapes) == 2
    assert model.config._attn_implementation == "eager"
    assert {s.heads for s in shapes} == {4}
    one_head_for_all, own_heads = family == "gpt_bigcode", family in ("gpt2", "gpt_neox", "opt")
    assert {s.kv_heads for s in shapes} == {1 if one_head_for_all else 4 if own_heads else 2}
    assert {(s.key_dim, s.value_dim) for s in shapes} == {(8, 8)}


def test_latent_attention_has_wider_keys_than_values():
    config = tiny_config(
        "deepseek_v3", num_key_value_heads=4, head_dim=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    gate(config)
    shapes = probe(build(config, torch.float32, torch.device("cpu")).eval(), "latent")
    assert {(s.kv_heads, s.key_dim, s.value_dim) for s in shapes} == {(4, 12, 6)}


REFUSED = {
    "mamba": "recurrent state",
    "rwkv": "recurrent state",
    "recurrent_gemma": "recurrent state",
    "lfm2": "convolution",
    "llama4_text": "chunked attention",
    "deepseek_v32": "indexer",
    "bloom": "own code",
    "falcon": "own code",
    "mpt": "own code",
    "gpt_neo": "own code",
    "bert": "encoder",
    "modernbert": "encoder",
    "xlm-roberta": "encoder",
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "whisper": "encoder-decoder",
    "llava": "vision_config",
    "gemma3": "text-only checkpoint",
    "vit": "do not generate text",
}


@pytest.mark.parametrize("family", REFUSED)
def test_others_are_refused_by_name_and_with_the_reason(family):
    with pytest.raises(ModelError, match=REFUSED[family]) as refusal:
        gate(AutoConfig.for_model(family))
    assert str(refusal.value).startswith(family)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "state-space layers"),
        ({"layer_types": ["full_attention", "conv"]}, "convolution layers"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked attention"),
        ({"layer_types": ["something_new", "full_attention"]}, "'something_new' layers"),
        ({"layers_block_type": ["recurrent", "attention"]}, "'recurrent' layers"),
        ({"mamba_d_state": 16}, "recurrent state"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantized \(awq\)"),
    ],
)
def test_a_family_that_nobody_has_heard_of_is_judged_by_its_settings(change, reason):
    with pytest.raises(ModelError, match=reason):
        gate({"model_type": "llama", **change})


def test_layers_of_supported_kinds_pass_whatever_their_order():
    gate({"model_type": "llama", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64})


@pytest.mark.parametrize("settings", [{}, {"model_type": None}])
def test_a_config_without_a_family_is_refused(settings):
    with pytest.raises(ModelError, match="model_type"):
        gate(settings)


def test_a_family_that_transformers_does_not_know_is_refused():
    with pytest.raises(ModelError, match="frobnicator"):
        gate({"model_type": "frobnicator"})


def test_the_text_part_of_a_multimodal_model_passes_alone():
    whole = AutoConfig.for_model("gemma3")
    part = text_part(whole)
    assert part.model_type == "gemma3_text"
    gate(part)
    plain = AutoConfig.for_model("llama")
    assert text_part(plain) is plain


def test_a_model_that_ignores_its_attention_setting_is_noticed():
    """Behind the gate's list: bloom, were it not named there, keeps its own attention and is caught by the probe."""
    config = AutoConfig.for_model("bloom", vocab_size=96, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ModelError, match="own code"):
        probe(build(config, torch.float32, torch.device("cpu")).eval(), "tiny")


def test_a_model_that_attends_twice_a_layer_is_noticed():
    config = tiny_config("diffllama")
    with pytest.raises(ModelError, match="once a layer"):
        probe(build(config, torch.float32, torch.device("cpu")).eval(), "tiny")


@pytest.mark.parametrize(
    ("window", "length", "fine"), [(8, 128, False), (8, 8, True), (256, 128, True), (None, 128, True)]
)
def test_a_window_that_only_the_mask_knows_is_noticed_before_a_text_outgrows_it(window, length, fine):
    """phimoe tells its mask of the window, but not its attention: right up to the window, then silently wrong."""
    model = build(tiny_config("phimoe", sliding_window=window), torch.float32, torch.device("cpu")).eval()
    if fine:
        assert len(probe(model, "tiny", length)) == 2
    else:
        with pytest.raises(ModelError, match="wrong on long texts"):
            probe(model, "tiny", length)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt_oss", "cohere2"])
def test_a_window_that_attention_is_told_of_is_fine(family):
    probe(build(tiny_config(family), torch.float32, torch.device("cpu")).eval(), "tiny", 128)


def test_a_model_that_sees_the_future_is_noticed():
    config = AutoConfig.for_model(
        "bert", vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    with pytest.raises(ModelError, match="hides or shows other tokens"):
        probe(build(config, torch.float32, torch.device("cpu")).eval(), "tiny", 128)


def test_a_model_that_says_nan_is_noticed():
    model = build(tiny_config("llama"), torch.float32, torch.device("cpu")).eval()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        probe(model, "tiny")
    assert model.config._attn_implementation == "eager"
