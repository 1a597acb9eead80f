"""The batching page: each experiment at a small size, on a real engine server whose model is a list of words."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.browser.pages import accessible, click, no_traceback, settled

OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
LONG_MS = 120_000

TOOK = re.compile(r"Took \d+ s")


def choose(page: Page, name: str) -> None:
    click(page.get_by_role("radio", name=name, exact=True))
    expect(page.get_by_role("radio", name=name, exact=True)).to_be_checked()
    settled(page)


def run(page: Page, *, brief: bool = False) -> None:
    """`brief`: it may have ended before the page has drawn that it runs."""
    click(page.get_by_role("button", name="Run", exact=True))
    stop = page.get_by_role("button", name="Stop", exact=True)
    expect(stop.or_(page.get_by_text(TOOK)) if brief else stop).to_be_visible()


def ended(page: Page) -> None:
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible(timeout=LONG_MS)
    expect(page.get_by_text(TOOK)).to_be_visible()
    no_traceback(page)


def charts(page: Page, count: int) -> None:
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    expect(page.get_by_test_id("stPlotlyChart")).to_have_count(count)


def test_the_batch_sweep_is_run_stopped_and_run_again(stub, open_page):
    page = open_page(f"{stub}/batching")
    click(page.get_by_test_id("stCheckbox").filter(has_text="Bound").locator("label").first)
    pills = page.get_by_test_id("stButtonGroup")
    for batch in ("4", "16", "32"):
        click(pills.filter(has_text="Batch sizes").get_by_role("button", name=batch, exact=True))
    click(pills.filter(has_text="Context").get_by_role("button", name="256", exact=True))
    steps = page.get_by_label("Steps a point")
    steps.fill("400")
    steps.press("Enter")
    run(page)
    expect(page.get_by_role("progressbar")).to_be_visible()
    click(page.get_by_role("button", name="Stop", exact=True))
    expect(page.get_by_text("Stopped", exact=True)).to_be_visible(timeout=LONG_MS)
    steps.fill("4")
    steps.press("Enter")
    run(page, brief=True)
    expect(page.get_by_text("Stopped", exact=True)).to_have_count(0)
    ended(page)
    charts(page, 2)
    expect(page.get_by_test_id("stMetric").filter(has_text="A step at batch 8 costs")).to_contain_text(
        "measured; the text: 1.65 ×"
    )
    assert page.evaluate(OVERFLOW) == 0
    accessible(page)


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
    run(page, brief=True)
    ended(page)
    expect(page.get_by_test_id("stMetric").filter(has_text="The spike is cut by")).to_be_visible()
    charts(page, 2)  # the spikes, and what the newcomer pays
    choose(page, "Race")
    run(page, brief=True)
    ended(page)
    lanes = page.locator(".race .lane")
    expect(lanes).to_have_count(2)
    expect(lanes.nth(0).locator("strong")).to_have_text("7,770")
    expect(lanes.nth(1).locator("strong")).to_have_text("159")
    accessible(page)
