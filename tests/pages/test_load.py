"""The load page's script, without a browser and without an engine."""

from pathlib import Path

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from pages.widgets import load_charts, service
from pages.widgets.theme import tokens

SHELL = Path(__file__).parents[2] / "pages" / "shell.py"


@pytest.fixture
def page(monkeypatch):
    service.close()
    monkeypatch.setenv("KVSCOPE_ENGINE_URL", "http://127.0.0.1:9")  # nobody listens on the discard port
    yield AppTest.from_file(SHELL).run(timeout=30).switch_page("load.py").run(timeout=30)
    service.close()


def test_bad_input_is_said_and_cannot_be_run(page):
    assert not page.exception
    for rates, words in (("1, two", "are no numbers"), ("0", "requests/s cannot be sent"), ("", "0 rates")):
        page.text_input(key="load_rates").set_value(rates).run()
        assert any(words in caption.value.replace("\\", "") for caption in page.caption)
        assert page.button(key="load_start").disabled
    page.text_input(key="load_rates").set_value("1, 2").run()
    assert not page.button(key="load_start").disabled and not page.exception


def test_the_exercise_follows_its_boxes(page):
    page.number_input(key="little_tpot").set_value(50.0).run()
    words = " ".join(markdown.value for markdown in page.markdown)
    assert "0.80 requests/s" in words and "800 tok/s" in words


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_run_without_an_answer_can_be_drawn(theme):
    table = pd.DataFrame(
        [
            {
                "source": "this client",
                "offered_rate_per_s": 1.0,
                "achieved_rate_per_s": 0.0,
                "ok": 0,
                "verdict": "failing",
            }
        ]
    ).assign(ttft_p50_s=None, ttft_p95_s=None, ttft_p99_s=None)
    figure = load_charts.latency(table, "ttft", None, 1.0, tokens()[theme])
    assert [trace.name for trace in figure.data] == ["p50", "p95", "p99"]
