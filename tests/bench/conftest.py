"""A tiny model on disk, with a tokenizer, as the benchmarks' own processes load it."""

from pathlib import Path

import pytest

from tests.interpreter import triton

__all__ = ["tiny_model", "triton"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=500,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(500)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder
