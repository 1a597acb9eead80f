"""The model catalogue: counted exactly, whatever kind of layers a model has."""

import json

import pytest

from backend.planner import accelerators, catalogue, kvcache, weights
from backend.planner.errors import CatalogueError, UnknownName
from backend.planner.formats import kv_format, weight_format
from tests.planner.meta_models import numel

ROW = {"key": "mine", "name": "Mine", "source": "me", "verified": "yes"}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def test_enough_models_each_with_a_source():
    rows = catalogue.models()
    assert len(rows) >= 60
    assert all(row.source and row.verified in ("yes", "partly", "no") for row in rows.values())


@pytest.mark.parametrize("key", catalogue.models())
def test_parameters_equal_the_model_that_transformers_builds(key):
    pytest.importorskip("transformers")
    model = catalogue.models()[key]
    built = numel(model.config)
    if built is None:
        pytest.skip("the installed transformers does not know this model_type")
    assert model.architecture.parameters == built


@pytest.mark.parametrize(
    "model", [m for m in catalogue.models().values() if "index_total_size" in m.published], ids=lambda m: m.key
)
def test_bytes_equal_the_published_files(model):
    """Sizes from the index of the published safetensors files, to the byte."""
    form = weight_format("mxfp4" if model.config["model_type"] == "gpt_oss" else "bf16")
    stored = weights.checkpoint(
        model.architecture, form, head_twice=model.file_stores_tied_head, extra_bytes=model.file_extra_bytes
    ).value
    vision = 2 * 423_060_336 if model.key == "medgemma-27b-text" else 0  # its files hold the vision tower too
    assert stored + vision == model.published["index_total_size"]


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("Qwen3-0.6B", 114_688),  # head size 128, not hidden / heads
        ("DeepSeek-V3", 70_272),  # the latent once, with its rotary part
        ("falcon-180b-chat", 163_840),  # num_kv_heads, not num_key_value_heads
        ("Gemma-3-27b-it", 81_920),  # only 10 of 62 layers see everything
        ("Qwen3-Next-80B-A3B", 24_576),  # only 12 of 48 layers keep keys
        ("mamba-2.8b", 0),
    ],
)
def test_the_cache_grows_by_what_the_layers_keep(name, per_token):
    arch = catalogue.find(name).architecture
    assert kvcache.per_token(arch, kv_format("bf16")).value == per_token


def test_a_state_is_there_from_the_first_token_and_never_grows():
    arch = catalogue.find("mamba-2.8b").architecture
    model = kvcache.kv_model(arch, kv_format("bf16"))
    assert model.bytes(1) == model.bytes(1_000_000) == 64 * (5120 * 16 * 4 + 5120 * 3 * 2)


def test_found_by_what_people_say():
    assert catalogue.find("llama-3-8b").name == "Llama-3-8B"
    assert catalogue.find("LLAMA 3.1 70b").key == "llama-3.1-70b"
    with pytest.raises(UnknownName, match="llama"):
        catalogue.find("llama-9")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("{}", "list"),
        ("[1]", "object"),
        (json.dumps([{**ROW, "config": {}, "source": ""}]), "source"),
        (json.dumps([{**ROW, "config": {"model_type": "new"}}]), "new"),
        (json.dumps([{**ROW, "config": CONFIG, "colour": "red"}]), "colour"),
        (json.dumps([{**ROW, "config": CONFIG}] * 2), "twice"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_broken_file_of_ones_own_is_named(tmp_path, content, words):
    path = tmp_path / "models.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CatalogueError, match=words):
        catalogue.read(path)


def test_an_own_file_adds_a_model(tmp_path, monkeypatch):
    (tmp_path / "models.json").write_text(json.dumps([{**ROW, "config": CONFIG}]), encoding="utf-8")
    monkeypatch.setenv(accelerators.OWN_FOLDER, str(tmp_path))
    catalogue.models.cache_clear()
    try:
        assert catalogue.find("mine").architecture.parameters == 2 * (4 * 64**2 + 3 * 64 * 128 + 128) + 2 * 6400 + 64
    finally:
        monkeypatch.undo()
        catalogue.models.cache_clear()
