"""Attention variants of real families at a tiny size: the self-check passes, the answers are the model's own."""

import pytest
import torch

from backend.engine.request import SamplingParams
from backend.engine.self_check import self_check
from backend.models.errors import ModelError
from tests.engine.stub import ids, run
from tests.engine.tiny import LLAMA, assert_same, load_tiny, prompts, reference, tiny_engine

BASE = {k: v for k, v in LLAMA.items() if k not in ("model_type", "head_dim")} | {
    "hidden_size": 64,
    "num_attention_heads": 4,
}
FAMILIES = {
    "llama": LLAMA,
    "qwen2": BASE | {"model_type": "qwen2"},
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 16},
    "mistral, sliding window": BASE | {"model_type": "mistral", "sliding_window": 8},
    "gemma2, soft cap and alternating windows": BASE
    | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0},
    "gemma3": BASE | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8},
    "phi3": BASE | {"model_type": "phi3", "pad_token_id": 0},
    "olmo2": BASE | {"model_type": "olmo2"},
    "gpt_neox, untied": {
        "model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": None,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 512,
        "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    },
    "mixtral, experts": BASE
    | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss, sinks": BASE
    | {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
       "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_is_served_as_it_is(name):
    loaded = load_tiny(FAMILIES[name])
    text = loaded.model.config.get_text_config()
    kv_bytes = self_check(loaded)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert kv_bytes == 2 * text.num_hidden_layers * heads * head_dim * 4
    texts = prompts(4, 40, 512)
    if name.startswith("gpt_oss"):
        return  # its generate() has no eager-free path for sinks at this size; the self-check compared the logits
    want = [reference(loaded, t, 8) for t in texts]
    engine = tiny_engine(loaded, chunk_size=16, token_budget=64, block_size=4)
    requests = [engine.submit(t, SamplingParams(max_tokens=8, temperature=0.0), id="x")[0] for t in texts]
    said = run(engine)
    for request, expected in zip(requests, want, strict=True):
        assert_same(ids(said[request.number]), expected, name)


def test_a_model_that_paged_attention_gets_wrong_is_refused():
    loaded = load_tiny()
    # A model whose layers scale the scores in a way that the attention interface never hears of.
    layer = loaded.model.model.layers[1].self_attn
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: (
        (out := plain(*args, **kwargs))[0] * (1.0 if kwargs.get("attention_mask") is not None else 1.1), *out[1:]
    )  # fmt: skip
    with pytest.raises(ModelError, match="does not reproduce this model"):
        self_check(loaded)


def test_a_paged_model_called_outside_a_step_raises_instead_of_seeing_the_future():
    loaded = load_tiny()
    tiny_engine(loaded)
    with pytest.raises(RuntimeError, match="outside an engine step"):
        loaded.model(input_ids=torch.tensor([[1, 2, 3]]))
