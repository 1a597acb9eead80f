"""Experiments from a command line: their settings, and what is left of one that breaks off."""

import pandas as pd
import pytest

from backend.experiments import ExperimentError, Partial, Progress, Result, sweep, waves
from backend.experiments.cli import parse
from backend.experiments.follow import follow


def test_settings_are_read_by_their_types():
    assert parse(sweep.Settings, ["batches=1,8", "measure_roof=false"]) == sweep.Settings((1, 8), measure_roof=False)
    assert parse(waves.Settings, ["kind=uniform", "scale=4", "lengths="]) == waves.Settings("uniform", scale=4.0)


@pytest.mark.parametrize(
    "given, words", [("nothing=1", "no setting"), ("batches", "no setting"), ("steps=x", "steps: 'x'")]
)
def test_what_is_no_setting_is_named(given, words):
    with pytest.raises(ExperimentError, match=words):
        parse(sweep.Settings, [given])


def breaks_off(kept: bool, error: BaseException):
    yield Progress(0, 2)
    if kept:
        yield Partial(Result("half", pd.DataFrame({"batch": [1]})))
    raise error


@pytest.mark.parametrize("error", [ExperimentError("the engine is gone"), KeyboardInterrupt()])
def test_what_was_measured_is_told_when_the_rest_fails(capsys, error):
    result = follow(breaks_off(True, error))
    assert not result.complete and result.as_dict()["tables"] == {"half": [{"batch": 1}]}
    assert ("the engine is gone" in capsys.readouterr().err) == isinstance(error, ExperimentError)
    with pytest.raises(ExperimentError):
        follow(breaks_off(False, error))
