"""The strip's words."""

import pytest

from backend import events, fold
from backend.sources.status import Status
from pages.widgets import header


def heard(**model) -> fold.State:
    state = fold.State()
    info = events.ModelInfo(
        name="models/some-model", dtype="bfloat16", parameters=134_515_008, weight_bytes=2**28, **model
    )
    device = events.DeviceInfo(kind="cpu", name="Some CPU", threads=2)
    fold.apply(state, events.Hello(seq=1, epoch="e", model=info, device=device, block_size=16, num_blocks=8))
    return state


def test_nothing_is_claimed_of_an_engine_that_was_not_heard():
    assert header.facts(fold.State(), "GiB") is None


def test_the_facts_are_the_engines_own():
    facts = header.facts(heard(notes=["float32 would be slower here"]), "GiB")
    assert facts.model == "some-model"
    assert "134.5 M parameters" in facts.model_help
    assert "256 MiB" in facts.model_help
    assert facts.dtype_help == "float32 would be slower here"
    assert facts.device == "CPU"
    assert facts.device_help == "Some CPU, 2 threads"
    assert facts.evidence == "measured"


def test_random_weights_are_said():
    assert "random weights" in header.facts(heard(weights="random"), "GB").model_help


@pytest.mark.parametrize(
    ("phase", "in_flight", "words"),
    [
        ("ready", 0, "ready"),
        ("ready", 3, "busy"),
        ("starting", 0, "starting"),
        ("dead", 0, "not running"),
        ("refused", 0, "refused"),
    ],
)
def test_every_condition_has_words(phase, in_flight, words):
    assert header.condition(Status(phase=phase), in_flight)[0] == words
