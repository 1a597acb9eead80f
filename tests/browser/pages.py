"""What a person finds on the pages, by role and name."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

READY = re.compile(r"\bready$")  # the engine's badge, when it has nothing to do
PATIENCE_S = 90.0  # costs nothing where all is well; two cores are shared with engines and other workers


def until(check: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits for a condition that no locator can express."""
    end = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < end, f"not within {patience_s:.0f} s: {what}"
        time.sleep(0.05)


def picture(page: Page, name: str) -> Locator:
    """A canvas by the name that it begins its description with."""
    return page.get_by_role("img", name=re.compile(f"^{name}:"))


def count(locator: Locator, name: str) -> int:
    return int(locator.get_attribute(f"data-{name}") or 0)


def number(page: Page, name: str) -> Locator:
    """Value of one of the big numbers."""
    return page.locator(f"[data-number='{name}'] .value")


def settled(page: Page) -> None:
    """The page has drawn what came of the last click. Faster than a person's, the next one could be drawn over."""
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning", timeout=90_000)


def click(what: Locator) -> None:
    """As a person does, who sees first that the page has drawn what came of the click before."""
    settled(what.page)
    what.click()


def opened(expander: Locator, content: Locator) -> None:
    """Opens it, and again should a page that was still being drawn have closed it."""
    click(expander.locator("summary"))
    try:
        expect(content).to_be_visible(timeout=20_000)
    except AssertionError:
        if expander.get_attribute("open") is None:
            click(expander.locator("summary"))
    expect(content).to_be_visible()


def user_choice(page: Page, choice: str) -> Locator:
    return page.get_by_role("radiogroup", name="Users").get_by_role("radio", name=choice, exact=True)


def users(page: Page, choice: str) -> None:
    """Again, should a page that was still being drawn take the click back."""
    click(user_choice(page, choice))
    settled(page)
    if not user_choice(page, choice).is_checked():
        user_choice(page, choice).click()


def stop_all(page: Page) -> None:
    """Again, should a page that was still being drawn take the click back."""
    none = user_choice(page, "0")
    for _ in range(3):
        click(page.get_by_role("button", name="Stop all"))
        try:
            expect(none).to_be_checked(timeout=30_000)
            break
        except AssertionError:
            continue
    expect(none).to_be_checked()
    settled(page)


def toggle(page: Page, label: str) -> None:
    click(page.get_by_test_id("stCheckbox").filter(has_text=label).locator("label").first)


def ask(page: Page, text: str) -> None:
    box = page.get_by_test_id("stChatInputTextArea")
    expect(box).to_be_enabled()
    box.fill(text)
    box.press("Enter")


def quiet(page: Page) -> None:
    """No users, nothing in the engine, habits as at the start. Clicks only on what is otherwise."""
    settled(page)
    if not user_choice(page, "0").is_checked() or not page.get_by_text(READY).first.is_visible():
        users(page, "0")
        stop_all(page)
    for label, wanted in (("Break the prefix", False), ("Shared system prompt", True)):
        if page.get_by_role("switch", name=label).is_checked() != wanted:
            toggle(page, label)


def no_traceback(page: Page) -> None:
    expect(page.get_by_test_id("stException")).to_have_count(0)


def accessible(page: Page) -> None:
    """axe finds nothing. While a script runs, Streamlit fades what is stale, and what is faded lacks contrast: then it
    is looked at again."""
    for _ in range(4):
        settled(page)
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        if {v["id"] for v in found} != {"color-contrast"}:
            break
    assert [(v["id"], v["impact"], [n["target"] for n in v["nodes"]][:3]) for v in found] == []
