"""Fixtures of the browser tests: one Chromium, one dashboard on a stub engine, one on the real engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, WebSocket, expect, sync_playwright

from tests.browser.processes import dashboard, free_port, stub_engine

PATIENCE_MS = 60_000  # two cores are shared with engines and other workers
TEST_S = 400  # of one test
expect.set_options(timeout=PATIENCE_MS)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no other machine has a name
]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder have their time, and one more try: a click that Streamlit loses while it draws a page is
    clicked again by a person too. What was tried again stands in the summary."""
    for item in items:
        if "tests/browser/" not in item.nodeid:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))
        item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's Chromium when there is one, else Playwright's own. It ends with the tests of this folder: as long as
    Playwright runs, so does its event loop in the main thread, and no test elsewhere could start one of its own."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def tabs() -> list[Page]:
    """Those that no test looks at now: used again, for a new one would compile Streamlit's scripts anew, which takes
    three seconds of a core."""
    return []


@dataclass
class Opener:
    """Opens pages in tabs that are as good as new, and hears what must not happen on them."""

    browser: Browser
    tabs: list[Page]
    opened: list[Page] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)  # requests that would leave the machine

    def __call__(self, url: str, *, theme: str = "light", width: int = 1280, height: int = 800) -> Page:
        page = self.tabs.pop() if self.tabs else self._tab()
        self.opened.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        for what, heard in self._listeners().items():
            page.on(what, heard)
        page.goto(url)
        # What Streamlit's own tests wait for: connected, and the script has finished.
        page.locator("[data-testid='stApp'][data-test-connection-state='CONNECTED']").wait_for(state="attached")
        page.locator("[data-testid='stApp'][data-test-script-state='notRunning']").wait_for(state="attached")
        return page

    def close(self) -> None:
        """Before what a page is connected to ends, which it would rightly complain about."""
        while self.opened:
            page = self.opened.pop()
            for what, heard in self._listeners().items():
                page.remove_listener(what, heard)
            page.evaluate("localStorage.clear(), sessionStorage.clear()")
            page.goto("about:blank")
            page.context.clear_cookies()
            self.tabs.append(page)

    def _tab(self) -> Page:
        """In a context of its own, as one tab would hide the others of a window."""
        page = self.browser.new_context().new_page()
        page.set_default_timeout(PATIENCE_MS)
        return page

    def _listeners(self) -> dict[str, Callable]:
        return {"pageerror": self._error, "console": self._console, "request": self._asks, "websocket": self._asks}

    def _error(self, error: Error) -> None:
        self.errors.append(str(error))

    def _asks(self, asked: Request | WebSocket) -> None:
        if "://127.0.0.1:" not in asked.url and not asked.url.startswith(("data:", "blob:")):
            self.strangers.append(asked.url)

    def _console(self, message: ConsoleMessage) -> None:
        # Streamlit looks for its server below a page's own path first, and finds it one level up.
        probing = "404" in message.text and "_stcore" in (message.location or {}).get("url", "")
        if message.type == "error" and not probing:
            self.errors.append(f"{message.text} ({(message.location or {}).get('url', '')})")


@pytest.fixture
def open_page(browser: Browser, tabs: list[Page]) -> Iterator[Opener]:
    """Opens pages; afterwards none of them may have had an error or asked another machine."""
    opener = Opener(browser, tabs)
    yield opener
    opener.close()
    assert opener.errors == []
    assert opener.strangers == []


@pytest.fixture(scope="package")
def engine(tmp_path_factory) -> Iterator[str]:
    """Address of the stub engine."""
    port = free_port()
    with stub_engine(port, tmp_path_factory.mktemp("stub") / "engine.log", step_ms=20):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="package")
def stub(engine, tmp_path_factory) -> Iterator[str]:
    """Address of a dashboard on the stub engine."""
    port = free_port()
    with dashboard(port, tmp_path_factory.mktemp("stub") / "ui.log", KVSCOPE_ENGINE_URL=engine):
        yield f"http://127.0.0.1:{port}"


@dataclass
class RealDashboard:
    url: str
    pid: int  # of the page's server, whose child the engine is


@pytest.fixture(scope="package")
def real(tmp_path_factory) -> Iterator[RealDashboard]:
    """A dashboard that starts the real engine on the bundled model."""
    logs, ui = tmp_path_factory.mktemp("real"), free_port()
    with dashboard(ui, logs / "ui.log") as running:
        yield RealDashboard(f"http://127.0.0.1:{ui}", running.pid)
