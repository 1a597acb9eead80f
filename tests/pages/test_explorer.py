"""The explorer's script and figures, without a browser."""

import json
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from backend.planner import catalogue, levers, machine, plan, sweep
from backend.planner.machine import Measured
from pages.widgets import explorer_board, explorer_charts, explorer_curves, service, theme
from tests.planner.test_plan import setup
from tests.planner.test_sweep import CEILINGS

SHELL = Path(__file__).parents[2] / "pages" / "shell.py"
COLOURS = theme.tokens()["light"]


@pytest.fixture(scope="module")
def explorer():
    """The page, with no engine to be reached: it needs none."""
    with pytest.MonkeyPatch.context() as patch:
        service.close()
        patch.setenv("KVSCOPE_ENGINE_URL", "http://127.0.0.1:9")
        page = AppTest.from_file(SHELL, default_timeout=60).run()
        page.switch_page("explorer.py").run()
        yield page
        service.close()


def text(page) -> str:
    return "\n".join(element.value for element in [*page.markdown, *page.caption])


def labels(page) -> list[str]:
    popovers = [block.proto.popover for block in blocks(page.main) if hasattr(block.proto, "popover")]
    return [popover.label.replace("\\", "") for popover in popovers if popover.label]


def blocks(root):
    for child in root.children.values():
        if hasattr(child, "children"):
            yield child
            yield from blocks(child)


def test_two_configurations_their_answers_and_the_difference(explorer):
    assert not explorer.exception
    found = labels(explorer)
    assert "55 sequences" in found and "60 sequences" in found
    assert any("tok/s" in label for label in found)
    assert "is better" in text(explorer) and "mostly KV" in text(explorer)
    assert len(explorer.get("plotly_chart")) == 7


def test_every_figure_has_its_working_with_the_values_filled_in(explorer):
    words = text(explorer).replace("\\", "")
    assert "= max(weights + KV, arithmetic)" in words
    assert "B / 3.35e+12 B/s" in words  # the H100's bandwidth
    assert "8,192 tokens" in words or "8192" in words
    assert "data sheet:" in words


def test_another_accelerator_gives_another_answer(explorer):
    explorer.selectbox(key="a_gpu").set_value("h200-sxm-141gb").run()
    assert not explorer.exception and "55 sequences" not in labels(explorer)
    explorer.selectbox(key="a_gpu").set_value("h100-sxm-80gb").run()
    assert "55 sequences" in labels(explorer)


def test_sweep_this(explorer):
    explorer.button(key="sweep_context").click().run()
    assert explorer.session_state.sweep == "context"
    explorer.button(key="sweep_batch").click().run()
    assert explorer.session_state.sweep == "batch" and not explorer.exception


def test_a_model_by_hand_and_a_config_that_is_not_known(explorer):
    explorer.selectbox(key="b_model").set_value("by-hand").run()
    assert not explorer.exception and not [e for e in explorer.error if "B" in (e.title if hasattr(e, "title") else "")]
    before = labels(explorer)
    explorer.number_input(key="b_kv_heads").set_value(32).run()
    assert labels(explorer) != before
    explorer.number_input(key="b_kv_heads").set_value(5).run()
    assert any("32 query heads are no multiple of 5" in error.value.replace("\\", "") for error in explorer.error)
    explorer.number_input(key="b_kv_heads").set_value(8).run()
    for broken, words in (
        ("{", "no JSON"),
        ("[]", "holds one object"),
        (json.dumps({"model_type": "llama9"}), "llama"),
        (json.dumps(catalogue.find("qwen3-8b").config | {"index_topk": 5}), "index_topk"),
    ):
        explorer.text_area(key="b_config").set_value(broken).run()
        assert not explorer.exception
        assert any(words in error.value.replace("\\", "") for error in explorer.error), words
    explorer.text_area(key="b_config").set_value(json.dumps(catalogue.find("qwen3-8b").config)).run()
    assert "config.json" in text(explorer).replace("\\", "")
    explorer.text_area(key="b_config").set_value("").run()
    explorer.selectbox(key="b_model").set_value("llama-3.1-8b").run()


def test_what_does_not_fit_is_said(explorer):
    explorer.selectbox(key="a_model").set_value("llama-3.1-405b").run()
    assert "does not fit" in labels(explorer) and not explorer.exception
    assert "one of them does not fit" in text(explorer)
    explorer.selectbox(key="a_model").set_value("llama-3.1-8b").run()


def test_an_answer_longer_than_the_context_is_explained(explorer):
    explorer.select_slider(key="output").set_value(16384).run()
    assert not explorer.exception
    assert any("no prompt is left" in error.value for error in explorer.error)
    explorer.select_slider(key="output").set_value(256).run()


def test_this_machine_is_an_accelerator_and_its_steps_are_dots(explorer, monkeypatch):
    part = machine.from_ceilings(CEILINGS, 2**34)
    dots = [Measured(1, 0.02, 300, 40), Measured(8, 0.05, 300, 40)]
    monkeypatch.setattr("pages.widgets.explorer.this_machine", lambda: (part, "smollm2-135m", dots))
    explorer.run()
    explorer.selectbox(key="a_gpu").set_value("this-machine").run()
    explorer.selectbox(key="a_model").set_value("smollm2-135m").run()
    assert not explorer.exception
    assert "measured on this machine" in str(explorer.get("plotly_chart")[2].proto)
    assert "computed in fp32" in text(explorer)
    explorer.selectbox(key="a_model").set_value("qwen3-8b").run()  # another model: these steps are not its
    assert "measured on this machine" not in str(explorer.get("plotly_chart")[2].proto)
    explorer.selectbox(key="a_model").set_value("llama-3.1-8b").run()
    explorer.selectbox(key="a_gpu").set_value("h100-sxm-80gb").run()


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3.1-405b", "mamba-2.8b"])
def test_the_memory_bar_is_the_memory(model):
    made = plan.make(setup(model))
    parts = made.memory_parts()
    assert min(parts.values()) >= 0
    assert sum(parts.values()) - parts["missing"] == pytest.approx(made.setup.accelerator.memory_bytes)
    assert (parts["missing"] > 0) == (not made.fits)
    bars = explorer_charts.memory({"A": made}, COLOURS, "GB")["data"]
    assert sum(bar["x"][0] for bar in bars) == pytest.approx(sum(parts.values()) / 1e9)


def test_bands_lie_below_ceilings_and_dots_are_what_was_measured():
    sweeps = {"A": sweep.sweep(setup(), "batch")}
    dots = [Measured(4, 0.01, 300, 20)]
    traces = {t["name"]: t for t in explorer_curves.rates(sweeps, "batch", 32, COLOURS, dots)["data"]}
    ceiling, band = traces["A: ceiling (bound)"], traces["A: a server (8 in 10)"]
    assert all(high < top for high, top in zip(band["y"], ceiling["y"], strict=False))
    assert traces["measured on this machine"]["y"] == [400]
    other = explorer_curves.rates({"A": sweep.sweep(setup(), "context")}, "context", 8192, COLOURS, dots)
    assert "measured on this machine" not in [t["name"] for t in other["data"]]


def test_tables_say_what_the_charts_show():
    plans = {"A": plan.make(setup()), "B": plan.make(setup(gpu="l40s"))}
    step = explorer_charts.step_table(plans)
    assert step["at least (ms, bound)"][0] == pytest.approx(1e3 * plans["A"]["step"].value, abs=1e-3)
    ranked = levers.rank(plans["A"].setup)
    assert list(explorer_board.board_table(ranked)["lever"]) == [lever.name for lever in ranked]
    prices = explorer_charts.prices_table(plans)
    assert prices["B ($/M, estimate)"][0] == pytest.approx(plans["B"]["cost"].value, abs=1e-4)
    assert len(explorer_charts.memory_table(plans, "GiB")) == 7
