"""Whatever is asked: an answer, or one of the planner's own errors (`python -m tests.planner.test_fuzz N`: N times)."""

from __future__ import annotations

import math
import random
import sys

import pytest

from backend.planner import compare, levers, plan
from backend.planner.accelerators import find
from backend.planner.config import parse
from backend.planner.errors import PlannerError
from backend.planner.formats import KV, WEIGHTS
from backend.planner.shape import ModelShape
from tests.planner.setups import random_config, random_setup


def ask(number: int, seed: int) -> dict[str, int]:
    """Counts of answers and refusals. Anything but a PlannerError comes through."""
    dice, seen = random.Random(seed), {"planned": 0, "refused": 0, "parsed": 0, "unsupported": 0}
    last = None
    for index in range(number):
        try:
            made = plan.make(random_setup(dice))
        except PlannerError as error:
            seen["refused"] += bool(str(error))
        else:
            seen["planned"] += 1
            for name, result in made.results.items():
                assert result.value is None or math.isfinite(result.value), name
                assert result.value is not None or result.note, name
                result.as_dict()
            if index % 20 == 0:
                levers.rank(made.setup)
                compare.differences(last or made, made)
            last = made
        config = random_config(dice)
        try:
            arch = parse(config)
        except PlannerError as error:
            seen["unsupported"] += bool(str(error))
            continue
        seen["parsed"] += 1
        assert arch.parameters > 0
        try:
            ModelShape.from_config(config, 2)
            setup = plan.Setup(
                name="?", arch=arch, accelerator=find("h100-sxm"), weights=WEIGHTS["bf16"], kv=KV["bf16"], context=300
            )
            plan.make(setup)
        except PlannerError:
            continue  # counted, but nothing to plan with
    return seen


def test_nothing_but_an_answer_or_the_planners_own_error():
    seen = ask(400, seed=7)
    assert min(seen.values()) > 50, seen


def test_a_file_of_five_megabytes_is_refused_without_being_believed():
    huge = {f"key_{number}_kv": "x" * 40 for number in range(80_000)}
    for config in (huge, huge | {"model_type": "llama"}, {"model_type": "x" * 5_000_000}):
        with pytest.raises(PlannerError) as raised:
            parse(config)
        assert len(str(raised.value)) < 3_000


if __name__ == "__main__":
    print(ask(int(sys.argv[1]), seed=1))
