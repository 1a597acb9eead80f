"""The load page: a small sweep on a real engine server whose model is a list of words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.pages import accessible, click, no_traceback

PATIENCE_MS = 30_000
SAMPLES = Path(__file__).parents[1] / "data" / "load"


def fill(page: Page, label: str, value: str) -> None:
    box = page.get_by_label(label, exact=True)
    box.fill(value)
    box.press("Enter")


def test_a_sweep_is_run_stopped_and_shown(stub, open_page):
    page = open_page(f"{stub}/load")
    expect(page.get_by_text("1.60 requests/s")).to_be_visible()  # the exercise: 40 in flight, 1,000 tokens at 25 ms

    fill(page, "Rates (requests/s)", "4, -1")
    expect(page.get_by_text("-1 requests/s cannot be sent")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_disabled()

    fill(page, "Rates (requests/s)", "4, 8")
    fill(page, "Answer tokens", "4")
    fill(page, "Requests a rate", "10")
    expect(page.get_by_text("Sends 180 real requests")).to_be_visible(timeout=PATIENCE_MS)
    click(page.get_by_role("button", name="Run", exact=True))
    expect(page.get_by_text(re.compile(r"[1-9]\d* of 60 sent"))).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_test_id("stMetric")).to_have_count(
        4, timeout=PATIENCE_MS
    )  # what was measured so far is already there
    click(page.get_by_role("button", name="Stop", exact=True))
    expect(page.get_by_text("What was measured until then is below.")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_test_id("stPlotlyChart")).to_have_count(
        5, timeout=PATIENCE_MS
    )  # latency, CDF, goodput, queue, Little
    click(page.get_by_text("Table: the sweep"))
    expect(page.get_by_test_id("stDataFrame")).to_be_visible(timeout=PATIENCE_MS)
    with page.expect_download() as download:
        click(page.get_by_role("button", name="Requests as CSV"))
    assert Path(download.value.path()).read_text().startswith("offered_rate_per_s,number,state")

    # Other tools' results in the same picture.
    click(page.get_by_role("button", name="Import results"))
    page.locator("input[type=file]").set_input_files(
        [SAMPLES / name for name in ("vllm-bench-serve.json", "guidellm.json", "aiperf.json")]
    )
    expect(page.get_by_text("aiperf.json", exact=True)).to_be_visible(timeout=PATIENCE_MS)
    chart = page.get_by_test_id("stPlotlyChart").first
    for tool in ("vllm bench serve", "guidellm", "aiperf"):
        expect(chart.get_by_text(re.compile(f"^{tool}: "))).to_be_visible(timeout=PATIENCE_MS)
    no_traceback(page)


def test_what_cannot_be_loaded_is_explained(stub, open_page):
    page = open_page(f"{stub}/load")
    click(page.get_by_role("radio", name="Another server"))
    fill(page, "Address", "http://127.0.0.1:9")
    click(page.get_by_role("button", name="Run", exact=True))
    alert = page.get_by_role("alert").filter(has_text="It could not go on")
    expect(alert).to_contain_text("127.0.0.1:9", timeout=PATIENCE_MS)
    no_traceback(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility_rules_hold(stub, open_page, theme):
    page = open_page(f"{stub}/load", theme=theme)
    expect(page.get_by_text("1.60 requests/s")).to_be_visible()
    accessible(page)
