"""Tiny random models and what `transformers.generate` says with them: the measure of every engine path."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.runner import TorchRunner
from backend.engine.shape import model_shape

LLAMA = {
    "model_type": "llama", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
TIE = 1e-3  # where the reference's two best logits are closer than this, either token is right


def load_tiny(config: dict | None = None, seed: int = 0) -> SimpleNamespace:
    """A float32 model that looks like a `LoadedModel` to the engine."""
    config = AutoConfig.for_model(**(config or LLAMA))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    return SimpleNamespace(
        name="tiny", model=model, device=torch.device("cpu"), dtype=torch.float32, stop_ids=frozenset(), tokenizer=None
    )


TEXT = SimpleNamespace(decode=lambda ids: "".join(f"<{i}>" for i in ids), piece=lambda i: f"<{i}>")


def tiny_engine(
    loaded, events: list | None = None, native_attention: bool = False, triton_attention: bool = False, capture=None,
    **config,
) -> Engine:  # fmt: skip
    config = EngineConfig(**{"max_model_len": 512, "num_blocks": 512, **config})
    paths = {"native_attention": native_attention, "triton_attention": triton_attention, "capture": capture}
    runner = TorchRunner(loaded, **paths)
    return Engine(runner, TEXT, model_shape(loaded), config, (events if events is not None else []).append)


def prompts(count: int, longest: int, vocabulary: int, seed: int = 1, shared: int = 0) -> list[list[int]]:
    """Random prompts of mixed length; with `shared`, every other one starts with the same `shared` tokens."""
    rng = random.Random(seed)
    prefix = [rng.randrange(vocabulary) for _ in range(shared)]
    made = []
    for i in range(count):
        tail = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, longest))]
        made.append((prefix if shared and i % 2 else []) + tail)
    return made


@torch.inference_mode()
def reference(loaded, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """(`count` greedy tokens of transformers.generate, the gap between its two best logits at each)."""
    loaded.model.set_attn_implementation("eager")
    out = loaded.model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count, min_new_tokens=count, do_sample=False,
        output_logits=True, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    best = [step[0].float().topk(2).values for step in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), [float(a - b) for a, b in best]


def assert_same(got: list[int], want: tuple[list[int], list[float]], what: str) -> None:
    """Token for token, up to the first place where floats tie."""
    tokens, gaps = want
    assert len(got) <= len(tokens)
    for i, (a, b) in enumerate(zip(got, tokens, strict=False)):
        if a != b:
            assert gaps[i] <= TIE, f"{what}: token {i} is {a}, the reference says {b} (best logits {gaps[i]:.4f} apart)"
            return
