"""Counting from config.json: exact against transformers' own models, closed to what it does not know."""

import pytest

from backend.planner import catalogue
from backend.planner.families import FAMILIES
from backend.planner.shape import AttentionLayer, ModelShape, UnsupportedArchitecture

TINY = {
    "hidden_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS = [(family, {}) for family in sorted(FAMILIES)] + [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 20}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "mlp_bias": True}),
    ("gemma2", {"sliding_window": 8, "head_dim": 16}),
    ("gemma3_text", {"sliding_window": 8, "head_dim": 16}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {"sliding_window": 8}),
    ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3}),
    ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else ",".join(v))
def test_counts_equal_the_model_that_transformers_builds(family, changes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **(TINY | changes))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config.to_dict(), 4)

    parameters = {id(p): p for p in model.parameters()}.values()
    assert shape.parameters == sum(p.numel() for p in parameters)
    norms_and_biases = sum(p.numel() for p in parameters if p.dim() == 1)
    tables = model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shape.gathered_parameters == (0 if tied else tables)
    assert shape.matmul_parameters == shape.parameters - norms_and_biases - (0 if tied else tables)
    assert shape.head_parameters == model.get_output_embeddings().weight.numel()
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    if family != "phi3":  # its layers read the configuration themselves
        assert list(shape.windows) == windows or (windows == [None] * 7 and len(set(shape.windows)) == 1)


def test_real_configurations_agree_with_the_class_defaults():
    """A key left out of config.json takes the default of the transformers class, not a guess of ours."""
    transformers = pytest.importorskip("transformers")
    required = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}
    for family in FAMILIES:
        full = transformers.AutoConfig.for_model(family).to_dict()
        sparse = {k: v for k, v in full.items() if k in required | {"model_type", "moe_intermediate_size"}}
        assert ModelShape.from_config(sparse, 2) == ModelShape.from_config(full, 2), family


def test_experts_count_once_stored_and_by_use_when_read():
    shape = ModelShape.from_config(catalogue.find("Mixtral-8x7B-v0.1").config, 2)
    assert shape.active_matmul_parameters == 12_748_853_248 - 32 * (2 * 4096) - 4096  # published count has the norms
    assert shape.weight_bytes(1) < shape.weight_bytes(8) < shape.weight_bytes(10_000)
    assert shape.weight_bytes(10_000) == shape.stored_weight_bytes - shape.gathered_parameters * 2


def test_a_window_bounds_what_a_sequence_keeps_but_not_what_a_slot_takes():
    shape = ModelShape.from_config(catalogue.find("Gemma-3-1b-it").config, 2)
    assert (shape.windows.count(512), shape.windows.count(None)) == (22, 4)
    assert shape.kv_bytes(512) == 512 * shape.kv_bytes_per_token
    assert shape.kv_bytes(513) - shape.kv_bytes(512) == 4 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 50}, "head_dim"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"num_experts": 8}, "num_experts"),
        ({"layer_types": ["full_attention"] * 6 + ["linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma3", "text_config": {}}, "unknown"),
        ({"num_key_value_heads": None}, "num_key_value_heads is null"),
        ({"model_type": None}, "model_type"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_refusal_names_the_key(changes, word):
    with pytest.raises(UnsupportedArchitecture, match=word):
        ModelShape.from_config({"model_type": "llama"} | TINY | changes, 2)


def test_every_reason_is_listed():
    with pytest.raises(UnsupportedArchitecture) as raised:
        ModelShape.from_config({"model_type": "llama", "kv_lora_rank": 1, "ssm_state": 2}, 2)
    assert len(raised.value.reasons) == 7  # five counts are missing, two keys are strange


def test_a_shape_that_contradicts_itself_is_refused():
    layer = AttentionLayer(2, 1, 8, 8)
    counts = dict(hidden=16, vocab=10, parameters=100, gathered_parameters=0, dtype_bytes=2, kv_dtype_bytes=2)
    with pytest.raises(ValueError, match="head_parameters"):
        ModelShape.from_measured(attention=[layer], matmul_parameters=10, head_parameters=11, **counts)
    with pytest.raises(ValueError, match="layer"):
        ModelShape.from_measured(attention=[], matmul_parameters=10, head_parameters=1, **counts)
