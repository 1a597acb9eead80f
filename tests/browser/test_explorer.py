"""The explorer as a person uses it: two configurations, a link that is one, curves, the map, a model by hand."""

from __future__ import annotations

import re
from urllib.parse import parse_qs

from playwright.sync_api import Page, expect

from tests.browser.pages import PATIENCE_S, accessible, click, no_traceback, until

FADED = """[...document.querySelectorAll("[data-testid=stElementContainer]")]
    .filter(element => getComputedStyle(element).opacity < 1).length"""
MS = 1e3 * PATIENCE_S  # seven charts take their time on a busy machine


def choose(page: Page, label: str, text: str, key: str) -> None:
    """An option of a select box, by typing; `key`: its name in the address, which follows the choice."""
    box = page.get_by_role("combobox", name=label, exact=True)
    click(box)
    box.fill(text)
    click(page.get_by_role("option", name=text, exact=True))
    until(lambda: asked(page).get(key) == [text], f"{label} in the address")
    page.locator("[data-testid='stApp'][data-test-script-state='notRunning']").wait_for(state="attached")


def asked(page: Page) -> dict[str, list[str]]:
    """The address as the browser has it now."""
    return parse_qs(page.evaluate("location.search")[1:])


def answer(page: Page, which: str, measure: str):
    return page.locator(f".st-key-work-{which}-{measure}").get_by_role("button").first


def chart(page: Page, name: str):
    return page.locator(f".st-key-chart_{name} .js-plotly-plot").last  # the old one stays until the new one stands


def test_a_link_is_a_configuration(stub, open_page):
    page = open_page(f"{stub}/explorer")
    expect(answer(page, "A", "concurrency")).to_contain_text("55 sequences", timeout=MS)
    assert asked(page) == {}, "only what differs from the default belongs into the address"
    choose(page, "Accelerator A", "NVIDIA H200 SXM 141 GB", "a_gpu")
    expect(answer(page, "A", "concurrency")).not_to_contain_text("55 sequences", timeout=MS)
    click(page.get_by_role("button", name="Sweep context"))
    until(lambda: set(asked(page)) == {"a_gpu", "sweep"}, "the choice and the swept knob in the address, nothing else")
    numbers = [answer(page, which, "concurrency").inner_text().splitlines()[0] for which in "AB"]

    link = page.evaluate("location.href")
    open_page.close()
    other = open_page(link)
    for which, number in zip("AB", numbers, strict=True):
        expect(answer(other, which, "concurrency")).to_contain_text(number, timeout=MS)
    expect(other.get_by_role("radio", name="context", exact=True)).to_be_checked(timeout=MS)
    expect(chart(other, "rates")).to_contain_text("Context (tokens)", timeout=MS)
    no_traceback(other)


def test_the_difference_is_explained_and_every_figure_opens_its_working(stub, open_page):
    page = open_page(f"{stub}/explorer")
    expect(page.get_by_text("mostly KV").first).to_be_visible(timeout=MS)
    click(answer(page, "A", "step"))
    working = page.get_by_test_id("stPopoverBody")
    expect(working).to_contain_text("max(weights + KV, arithmetic)", timeout=MS)
    expect(working).to_contain_text("B/s", timeout=MS)
    expect(working).to_contain_text("data sheet", timeout=MS)
    page.keyboard.press("Escape")
    for name in ("memory", "step", "rates", "room", "levers", "prices", "map"):
        expect(chart(page, name)).to_have_count(1, timeout=MS)
    click(page.get_by_role("radiogroup", name="Units").get_by_role("radio", name="GB", exact=True))
    expect(answer(page, "A", "weights_per_gpu")).to_contain_text("16.1 GB", timeout=MS)
    expect(chart(page, "memory")).to_contain_text("GB of one GPU", timeout=MS)
    click(page.get_by_role("radiogroup", name="Units").get_by_role("radio", name="GiB", exact=True))
    until(lambda: page.evaluate(FADED) == 0, "nothing to be faded while the script runs")
    accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    no_traceback(page)


def test_the_map_and_a_model_by_hand(stub, open_page):
    page = open_page(f"{stub}/explorer?map=Sequences+at+once")
    expect(chart(page, "map")).to_contain_text("Llama-3.1-70B", timeout=MS)
    expect(page.get_by_role("radio", name="Sequences at once", exact=True).last).to_be_checked(timeout=MS)
    choose(page, "Model A", "by hand, or from a config.json", "a_model")
    before = answer(page, "A", "concurrency").inner_text().splitlines()[0]
    click(page.get_by_role("button", name="Dimensions of A"))
    heads = page.get_by_role("spinbutton", name="KV heads")
    heads.fill("32")
    heads.press("Enter")
    until(lambda: asked(page).get("a_kv_heads") == ["32"], "the dimension in the address")
    page.keyboard.press("Escape")
    expect(answer(page, "A", "concurrency")).not_to_contain_text(before, timeout=MS)
    expect(answer(page, "A", "kv_per_sequence_per_gpu")).to_contain_text("4.00 GiB", timeout=MS)
    click(page.get_by_role("button", name="Dimensions of A"))
    page.get_by_role("textbox", name=re.compile("config.json")).fill('{"model_type": "llama9"}')
    page.get_by_role("textbox", name=re.compile("config.json")).press("Control+Enter")
    expect(page.get_by_text("A: this model cannot be counted")).to_be_visible(timeout=MS)
    no_traceback(page)
