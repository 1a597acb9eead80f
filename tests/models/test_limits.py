"""Stop ids from every place that names them, and the longest sequence."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from backend.models.limits import DEFAULT_MODEL_LEN, max_model_len, stop_ids


def naming(eos):
    return SimpleNamespace(eos_token_id=eos)


def test_stop_ids_are_the_union_of_all_places():
    assert stop_ids(100, naming([2, 7]), naming(3), naming(2)) == {2, 3, 7}


@pytest.mark.parametrize("nothing", [None, [], True])
def test_a_place_that_names_none_adds_none(nothing):
    assert stop_ids(100, naming(nothing), SimpleNamespace(), None) == frozenset()


def test_ids_outside_the_vocabulary_never_stop_anything():
    assert stop_ids(100, naming([-1, 99, 100])) == {99}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (AutoConfig.for_model("llama", max_position_embeddings=8192), 8192),
        (AutoConfig.for_model("gpt2", n_positions=1024), 1024),
        (AutoConfig.for_model("opt", max_position_embeddings=2048), 2048),
    ],
)
def test_the_length_is_the_number_of_positions(config, length):
    assert max_model_len(config) == (length, "")


def test_without_a_limit_one_is_assumed_and_said():
    length, note = max_model_len(SimpleNamespace())
    assert length == DEFAULT_MODEL_LEN
    assert "assumed" in note


def test_longrope_is_held_to_its_original_length():
    config = AutoConfig.for_model(
        "phi3", hidden_size=64, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0,
        max_position_embeddings=131072, original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    )  # fmt: skip
    length, note = max_model_len(config)
    assert length == 4096
    assert "longrope" in note and "4096" in note


def test_dynamic_rope_is_held_to_its_length():
    config = AutoConfig.for_model(
        "llama", max_position_embeddings=2048, rope_scaling={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    )
    length, note = max_model_len(config)
    assert length == 2048
    assert "dynamic" in note


def test_rope_that_does_not_depend_on_the_batch_keeps_the_whole_length():
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = AutoConfig.for_model("llama", max_position_embeddings=131072, rope_scaling=scaling)
    assert max_model_len(config) == (131072, "")


def test_settings_of_each_layer_type_are_looked_at():
    config = SimpleNamespace(
        max_position_embeddings=32768,
        rope_parameters={
            "sliding_attention": {"rope_type": "default"},
            "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 4096},
        },
    )
    assert max_model_len(config)[0] == 4096
