"""Settings of experiments as they come from a command line."""

import pytest

from backend.experiments import ExperimentError, sweep, waves
from backend.experiments.cli import parse


def test_settings_are_read_by_their_types():
    assert parse(sweep.Settings, ["batches=1,8", "measure_roof=false"]) == sweep.Settings((1, 8), measure_roof=False)
    assert parse(waves.Settings, ["kind=uniform", "scale=4", "lengths="]) == waves.Settings("uniform", scale=4.0)


@pytest.mark.parametrize(
    "given, words", [("nothing=1", "no setting"), ("batches", "no setting"), ("steps=x", "steps: 'x'")]
)
def test_what_is_no_setting_is_named(given, words):
    with pytest.raises(ExperimentError, match=words):
        parse(sweep.Settings, [given])
