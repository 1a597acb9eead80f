"""Makes the pictures of docs/ from the real thing: the bundled model, 32 users, every page, light and dark.

python -m tests.browser.screenshots [folder [width height [address]]]

With the address of a server that runs already, it attaches to it and takes the same pages as attached-….png.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.conftest import FLAGS, NAMES
from tests.browser.pages import ask, count, picture, until, users
from tests.browser.processes import ROOT, dashboard, free_port

PATIENCE_S = 180


def main(folder: Path, width: int = 1280, height: int = 800) -> None:
    folder.mkdir(exist_ok=True)
    port = free_port()
    with tempfile.TemporaryDirectory() as logs, dashboard(port, Path(logs) / "ui.log"), sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, NAMES)), None)
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        pages: dict[str, Page] = {}
        for theme in ("light", "dark"):
            size = {"width": width, "height": height}
            context = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=2)
            pages[theme] = context.new_page()
            pages[theme].goto(f"http://127.0.0.1:{port}")
        first = pages["light"]
        expect(first.get_by_text(re.compile(r"\bready$"))).to_be_visible(timeout=PATIENCE_S * 1000)
        users(first, "32")
        gantt = picture(first, "Requests over time")
        until(lambda: count(gantt, "live") > 16, "users at work", PATIENCE_S)
        ask(first, "Why does a language model keep keys and values of the tokens it has read?")
        until(
            lambda: len(first.locator("article[data-request] .answer").first.inner_text()) > 160,
            "a long answer",
            PATIENCE_S,
        )
        for theme, page in pages.items():
            _take(page, folder / f"cockpit-{theme}.png")
        for theme, page in pages.items():
            page.get_by_role("link", name="KV blocks").click()
            until(lambda page=page: count(picture(page, "Block pool"), "saved") > 0, "the pool", PATIENCE_S)
            if theme == "dark":  # once with a request followed: its blocks stand out, its table says what is in them
                page.get_by_role("option").first.click()
                cell = page.get_by_role("region", name="Block table").locator("td.tokens").first
                until(lambda cell=cell: len(cell.inner_text()) > 10, "the block table", PATIENCE_S)
            _take(page, folder / f"blocks-{theme}.png")
        for theme, page in pages.items():
            for link in ("Phases", "Hardware"):
                page.get_by_role("link", name=link).click()
                page.wait_for_timeout(8000)  # some seconds of what moves
                _take(page, folder / f"{link.lower()}-{theme}.png")
        users(first, "0")
        for theme, page in pages.items():
            for link in ("Batching", "Load", "Explorer"):
                page.get_by_role("link", name=link).click()
                page.wait_for_timeout(4000)
                page.screenshot(path=folder / f"{link.lower()}-{theme}.png", scale="css")
        browser.close()


def attached(folder: Path, width: int, height: int, address: str) -> None:
    """Pages of a dashboard that is attached to the server at `address`, and a fleet of it and one that is not there."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as logs,
        dashboard(port, Path(logs) / "ui.log", KVSCOPE_ATTACH_URL=address),
        sync_playwright() as playwright,
    ):
        path = next(filter(None, map(shutil.which, NAMES)), None)
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        for theme in ("light", "dark"):
            size = {"width": width, "height": height}
            page = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=2).new_page()
            page.goto(f"http://127.0.0.1:{port}")
            expect(page.get_by_text(re.compile("ATTACHED")).first).to_be_visible(timeout=PATIENCE_S * 1000)
            users(page, "8")
            until(lambda page=page: count(picture(page, "Requests over time"), "live") > 4, "users", PATIENCE_S)
            page.wait_for_timeout(10_000)  # some seconds of what moves
            for link in ("Cockpit", "KV blocks", "Phases", "Batching", "Load", "Hardware"):
                page.get_by_role("link", name=link).click()
                page.wait_for_timeout(5000)
                _shoot(page, folder / f"attached-{link.lower().replace('kv ', '')}-{theme}.png")
            page.get_by_role("link", name="Fleet").click()
            expect(page.get_by_text("Servers", exact=True)).to_be_visible(timeout=PATIENCE_S * 1000)
            if theme == "light":
                lines = f"{address} name=first\nhttp://127.0.0.1:9 name=gone"
                page.get_by_role("textbox", name="Servers, one a line").fill(lines)
                page.get_by_role("button", name="Watch", exact=True).click()
            page.get_by_role("button", name=re.compile("^first: live")).click(timeout=PATIENCE_S * 1000)
            page.wait_for_timeout(3000)
            _shoot(page, folder / f"fleet-{theme}.png")
            page.get_by_role("link", name="Cockpit").click()
            users(page, "0")
        browser.close()


def _shoot(page: Page, path: Path) -> None:
    page.mouse.move(2, 400)
    page.screenshot(path=path, scale="css")
    print(path)


def _take(page: Page, path: Path) -> None:
    page.mouse.move(2, 400)
    until(
        lambda: page.locator("[data-number] .value").first.inner_text() not in ("No data", "No traffic"),
        "numbers",
        PATIENCE_S,
    )
    _shoot(page, path)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    if len(sys.argv) > 4:
        attached(folder, *map(int, sys.argv[2:4]), sys.argv[4])
    else:
        main(folder, *map(int, sys.argv[2:4]))
