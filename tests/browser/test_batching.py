"""The batching page: each experiment at a small size, on a real engine server whose model is a list of words."""

from __future__ import annotations

import re

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.pages import no_traceback

OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
LONG_MS = 60_000


def choose(page: Page, name: str) -> None:
    page.get_by_role("radio", name=name, exact=True).click()


def run(page: Page) -> None:
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()


def ended(page: Page) -> None:
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible(timeout=LONG_MS)
    expect(page.get_by_text(re.compile(r"Took \d+ s"))).to_be_visible()
    no_traceback(page)


def charts(page: Page, count: int) -> None:
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    expect(page.get_by_test_id("stPlotlyChart")).to_have_count(count)


def test_the_batch_sweep_is_run_stopped_and_run_again(stub, open_page):
    page = open_page(f"{stub}/batching")
    page.get_by_test_id("stCheckbox").filter(has_text="Bound").locator("label").first.click()
    pills = page.get_by_test_id("stButtonGroup")
    for batch in ("4", "16", "32"):
        pills.filter(has_text="Batch sizes").get_by_role("button", name=batch, exact=True).click()
    pills.filter(has_text="Context").get_by_role("button", name="256", exact=True).click()
    steps = page.get_by_label("Steps a point")
    steps.fill("400")
    steps.press("Enter")
    run(page)
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_text("Stopped", exact=True)).to_be_visible(timeout=LONG_MS)
    steps.fill("4")
    steps.press("Enter")
    run(page)
    ended(page)
    charts(page, 2)
    expect(page.get_by_test_id("stMetric").filter(has_text="A step at batch 8 costs")).to_contain_text("measured")
    assert page.evaluate(OVERFLOW) == 0
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    assert [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in found.response["violations"]] == []


def test_lengths_of_ones_own_fill_the_strips_and_a_broken_file_is_explained(stub, open_page):
    page = open_page(f"{stub}/batching")
    choose(page, "Static or continuous")
    choose(page, "my own")
    file = page.locator("input[type=file]")
    file.set_input_files({"name": "lengths.txt", "mimeType": "text/plain", "buffer": b"5\n7\nNaN\n"})
    expect(page.get_by_text("line 3: 'NaN' is no number of tokens")).to_be_visible()
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_disabled()
    file.set_input_files({"name": "lengths.txt", "mimeType": "text/plain", "buffer": b"1\n9\n" * 12})
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()
    run(page)
    ended(page)
    charts(page, 1)
    expect(page.get_by_test_id("stMetric").filter(has_text="Predicted").first).to_contain_text("1.79 ×")


def test_a_long_prompt_and_a_race(stub, open_page):
    page = open_page(f"{stub}/batching", theme="dark")
    choose(page, "Chunked prefill")
    run(page)
    ended(page)
    expect(page.get_by_test_id("stMetric").filter(has_text="The spike is cut by")).to_be_visible()
    choose(page, "Race")
    run(page)
    ended(page)
    lanes = page.locator(".race .lane")
    expect(lanes).to_have_count(2)
    expect(lanes.nth(0).locator("strong")).to_have_text("7,770")
    expect(lanes.nth(1).locator("strong")).to_have_text("159")
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    assert [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in found.response["violations"]] == []
