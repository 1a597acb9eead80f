"""Tiny models on disk, as a person would have them: config, safetensors, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["he", "ll"]
VOCAB = len(SPECIAL) + len(BYTES) + len(WORDS)
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *BYTES, *WORDS])}
    rust = Tokenizer(BPE(vocab=vocab, merges=[("h", "e"), ("l", "l")]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>")  # no pad token, as many have none
    made.chat_template = template
    return made


def save_model(folder: Path, *, template: str | None = TEMPLATE, words: bool = True, **changes: Any) -> Any:
    """Write a random model of the family `model_type` to `folder` and return it."""
    config = AutoConfig.for_model(**{**LLAMA, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    if words:
        tokenizer(template).save_pretrained(folder)
    return model


def save_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({**LLAMA, **changes}))
    return file


def write_gguf(file: Path, model: Any, *, skip: str = "", pre: str = "smollm", quantize: bool = False) -> None:
    """The llama `model` as llama.cpp writes it: query and key rows permuted, big matrices in Q8_0 when asked."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    config = model.config
    writer = GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*SPECIAL, *BYTES, *WORDS])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(BYTES) + len(WORDS)))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = {
        "embed_tokens": "token_embd", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
        "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "norm": "output_norm",
    }  # fmt: skip
    for key, tensor in model.state_dict().items():
        parts = key.split(".")
        if parts[0] == "lm_head" or (skip and skip in key):
            continue
        layer = f"blk.{parts[2]}." if "layers" in parts else ""
        name = f"{layer}{names[parts[-2]]}.weight"
        data = tensor.numpy().astype(np.float32)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(parts[-2])
        if heads:
            rows, columns = data.shape
            data = data.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        if quantize and data.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
