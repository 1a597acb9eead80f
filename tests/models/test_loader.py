"""From a folder to a model that may serve: what is taken as it is, what is noted, what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from backend.models import loader
from backend.models.errors import ModelError
from backend.models.loader import load
from backend.models.plain import PlainTokenizer
from tests.models.tiny import LLAMA, VOCAB, save_config, save_model

HI = [{"role": "user", "content": "hello"}]


def take(folder, **options):
    return load(str(folder), say=lambda line: None, device="cpu", dtype="float32", **options)


def rewrite(folder, change) -> None:
    """Apply `change` to the tensors of a saved model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# --- real weights ---


def test_a_model_is_loaded_as_it_was_saved(tmp_path):
    saved = save_model(tmp_path)
    loaded = take(tmp_path)
    assert loaded.weights == "real"
    assert loaded.config._attn_implementation == "eager"
    assert not loaded.model.training
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, saved(ids).logits)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello")) == "hello"
    assert loaded.max_model_len == 256


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tmp_path, tied):
    save_model(tmp_path, tie_word_embeddings=tied)
    info = take(tmp_path).info()
    embedding = VOCAB * 64
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96 + 2 * 64  # q, k and v, o, mlp, norms
    assert info.parameters == embedding * (1 if tied else 2) + 2 * layer + 64
    assert info.weight_bytes == info.parameters * 4
    # A step multiplies by the head, whole; an embedding of its own is only looked up.
    assert info.step_weight_bytes == (info.parameters - (0 if tied else embedding)) * 4


def test_info_says_what_the_tensors_say(tmp_path):
    save_model(tmp_path)
    info = take(tmp_path).info()
    assert (info.layers, info.hidden, info.heads, info.kv_heads, info.head_dim) == (2, 64, 4, 2, 16)
    assert (info.vocab, info.family, info.dtype) == (VOCAB, "llama", "float32")
    assert info.kv_bytes_per_token == 2 * 2 * (16 + 16) * 4
    assert info.chat_template


def test_position_tables_are_looked_up_not_read(tmp_path):
    save_model(tmp_path, model_type="gpt2")
    info = take(tmp_path).info()
    assert info.weight_bytes - info.step_weight_bytes == 256 * 64 * 4


def test_a_bfloat16_model_may_run_in_another_dtype(tmp_path):
    save_model(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load(str(tmp_path), say=lambda line: None, device="cpu", dtype="bf16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.info().kv_bytes_per_token == 2 * 2 * (16 + 16) * 2
    assert take(tmp_path).model.dtype == torch.float32


def test_stop_ids_of_the_generation_config_count(tmp_path):
    save_model(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [0, 5]}))
    assert take(tmp_path).stop_ids == {0, 5, 2}  # 2: config and tokenizer


def test_a_chat_ends_where_the_assistant_speaks(tmp_path):
    save_model(tmp_path)
    loaded = take(tmp_path)
    assert loaded.chat_template
    text = loaded.tokenizer.decode(loaded.encode_chat(HI))
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_refuses_is_quoted(tmp_path):
    save_model(tmp_path)
    with pytest.raises(ModelError, match="unknown role"):
        take(tmp_path).encode_chat([{"role": "wizard", "content": "x"}])


def test_without_a_chat_template_completions_still_work(tmp_path):
    save_model(tmp_path, template=None)
    loaded = take(tmp_path)
    assert not loaded.chat_template and not loaded.info().chat_template
    assert loaded.tokenizer.encode("hello")
    with pytest.raises(ModelError, match=r"no chat template.*/v1/completions"):
        loaded.encode_chat(HI)


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    save_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 weights.*first model\.layers\.1\.mlp\.up_proj\.weight"):
        take(tmp_path)


def test_an_untied_model_without_its_head_is_not_made_up(tmp_path):
    save_model(tmp_path, tie_word_embeddings=False)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        take(tmp_path)


def test_a_tied_head_that_came_apart_is_noticed():
    class Parts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)

        def get_input_embeddings(self):
            return self.embedding

        def get_output_embeddings(self):
            return self.head

    with pytest.raises(ModelError, match="tie_word_embeddings"):
        loader._check_tied(Parts(), AutoConfig.for_model("llama", tie_word_embeddings=True), "apart")


def test_weights_of_another_shape_are_refused(tmp_path):
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        take(tmp_path)


def test_a_damaged_file_is_refused(tmp_path):
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="damaged"):
        take(tmp_path)


def test_a_model_without_tokenizer_is_refused(tmp_path):
    save_model(tmp_path, words=False)
    with pytest.raises(ModelError, match="no tokenizer"):
        take(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    save_model(tmp_path, vocab_size=64)
    with pytest.raises(ModelError, match="not of the same model"):
        take(tmp_path)


def test_code_in_a_repository_is_not_run(tmp_path):
    save_model(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "frobnicator", "auto_map": {"AutoConfig": "own.Config"}})
    )
    with pytest.raises(ModelError, match="never run"):
        take(tmp_path)


def test_what_cannot_fit_is_refused_with_numbers(tmp_path, monkeypatch):
    save_model(tmp_path)
    monkeypatch.setattr(loader.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(ModelError, match=r"GiB for its weights in float32, and cpu has 0\.0 GiB free"):
        take(tmp_path)


# --- random weights ---


def test_random_weights_from_a_configuration_alone(tmp_path):
    file = save_config(tmp_path)
    loaded = take(file, weights="random")
    assert loaded.weights == "random" and loaded.info().weights == "random"
    assert isinstance(loaded.tokenizer, PlainTokenizer)
    assert any("random weights" in note for note in loaded.notes)
    assert any("no tokenizer" in note for note in loaded.notes)
    assert not loaded.chat_template
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([loaded.tokenizer.encode("hello")])).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.1  # something to choose from


def test_random_weights_are_the_same_every_time_and_as_the_family_draws_them(tmp_path):
    save_config(tmp_path)
    torch.manual_seed(1)
    first = take(tmp_path, weights="random").model
    torch.manual_seed(2)
    second = take(tmp_path, weights="random").model
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    up, down = first.model.layers[0].mlp.up_proj.weight, first.model.layers[1].mlp.up_proj.weight
    assert up.std().item() == pytest.approx(LLAMA["initializer_range"], rel=0.1)
    assert not torch.equal(up, down)
    assert torch.linalg.matrix_rank(up) == 64
    assert (first.model.norm.weight == 1).all()


def test_random_weights_leave_the_seed_of_others_alone(tmp_path):
    save_config(tmp_path)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    take(tmp_path, weights="random")
    assert torch.equal(torch.rand(1), expected)


def test_random_weights_use_the_tokenizer_that_is_there(tmp_path):
    save_model(tmp_path)
    loaded = take(tmp_path, weights="random")
    assert loaded.chat_template
    assert loaded.encode_chat(HI)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma3_text", "gpt_oss", "mixtral", "stablelm"])
def test_random_weights_of_other_families_speak_finite_numbers(tmp_path, family):
    sizes = {k: v for k, v in LLAMA.items() if k not in ("model_type", "pad_token_id")}
    extra = {"num_local_experts": 4, "ffn_dim": 96, "word_embed_proj_dim": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    save_config(tmp_path, **{**sizes, **extra, "model_type": family, "pad_token_id": 0})
    loaded = take(tmp_path, weights="random")
    with torch.inference_mode():
        logits = loaded.model(torch.arange(20)[None]).logits
    assert logits.isfinite().all() and logits.std() > 0


def test_the_text_part_of_a_multimodal_configuration_can_be_looked_at(tmp_path):
    text = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 16, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    loaded = take(tmp_path, weights="random")
    assert loaded.config.model_type == "gemma3_text"
    assert any("text part of gemma3" in note for note in loaded.notes)


def test_a_quantized_configuration_is_built_in_plain_numbers(tmp_path):
    save_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    loaded = take(tmp_path, weights="random")
    assert any("quantized" in note for note in loaded.notes)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_a_configuration_that_cannot_be_is_refused(tmp_path):
    save_config(tmp_path, num_attention_heads=3, num_key_value_heads=2)
    with pytest.raises(ModelError, match="not a multiple of the number of attention heads"):
        take(tmp_path, weights="random")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        take(tmp_path, weights="random")


# --- asking ---


def test_a_path_is_called_by_its_last_part_that_says_something(tmp_path, own_cache, monkeypatch):
    folder = tmp_path / "llama-8b"
    file = save_config(folder)
    other = save_config(tmp_path).rename(tmp_path / "qwen-4b.json")
    assert take(folder, weights="random").name == "llama-8b"
    assert take(file, weights="random").name == "llama-8b"
    assert take(other, weights="random").name == "qwen-4b"
    monkeypatch.chdir(folder)
    assert take(".", weights="random").name == "llama-8b"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "imaginary"}, "imaginary"),
        ({"dtype": "int3"}, "int3"),
        ({"device": "toaster"}, "toaster"),
        ({"device": "mps"}, "mps"),
        ({"device": "cuda:99"}, "sees . NVIDIA GPUs"),
    ],
)
def test_options_that_cannot_be_are_named(options, words):
    with pytest.raises(ModelError, match=words):
        load("smollm2-135m", say=lambda line: None, **options)


# --- the bundled model ---


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load("smollm2-135m", say=lambda line: None, device="cpu", dtype="float32")


def test_the_bundled_model_knows_the_capital_of_france(smollm2):
    ids = smollm2.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    out = smollm2.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert smollm2.tokenizer.decode(out, skip_special_tokens=True) == "The capital of France is Paris."
    assert out[-1] in smollm2.stop_ids


def test_the_bundled_model_is_what_its_card_says(smollm2):
    info = smollm2.info()
    assert (info.parameters, info.layers, info.heads, info.kv_heads, info.head_dim) == (134_515_008, 30, 9, 3, 64)
    assert info.step_weight_bytes == info.weight_bytes == 134_515_008 * 4
    assert info.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert info.max_model_len == 8192
    assert any("Q4_1.gguf" in note for note in info.notes)
