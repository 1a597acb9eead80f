"""Fixtures of the browser tests: one Chromium, one dashboard on a stub engine, one on the real engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

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
]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/browser/" in item.nodeid and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's Chromium when there is one, else Playwright's own. It ends with the tests of this folder: as long as
    Playwright runs, so does its event loop in the main thread, and no test elsewhere could start one of its own."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@dataclass
class Watched:
    """What must not happen on a page."""

    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)  # requests that would leave the machine


@dataclass
class Opener:
    browser: Browser
    contexts: list[BrowserContext] = field(default_factory=list)
    watched: Watched = field(default_factory=Watched)

    def __call__(
        self, url: str, *, theme: str = "light", width: int = 1280, height: int = 800, reduced: bool = True
    ) -> Page:
        context = self.browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,
            reduced_motion="reduce" if reduced else "no-preference",
        )
        context.set_default_timeout(PATIENCE_MS)
        self.contexts.append(context)
        context.route("**/*", self._route)
        page = context.new_page()
        page.on("pageerror", lambda error: self.watched.errors.append(str(error)))
        page.on("console", self._console)
        page.goto(url)
        # What Streamlit's own tests wait for: connected, and the script has finished.
        page.locator("[data-testid='stApp'][data-test-connection-state='CONNECTED']").wait_for(state="attached")
        page.locator("[data-testid='stApp'][data-test-script-state='notRunning']").wait_for(state="attached")
        return page

    def close(self) -> None:
        """Before what a page is connected to ends, which it would rightly complain about."""
        while self.contexts:
            self.contexts.pop().close()

    def _route(self, route) -> None:
        if "://127.0.0.1:" in route.request.url or route.request.url.startswith(("data:", "blob:")):
            route.continue_()
        else:
            self.watched.strangers.append(route.request.url)
            route.abort()

    def _console(self, message) -> None:
        # Streamlit looks for its server below a page's own path first, and finds it one level up.
        probing = "404" in message.text and "_stcore" in (message.location or {}).get("url", "")
        if message.type == "error" and not probing:
            self.watched.errors.append(f"{message.text} ({(message.location or {}).get('url', '')})")


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Opens pages; afterwards none of them may have had an error or asked another machine."""
    opener = Opener(browser)
    yield opener
    opener.close()
    assert opener.watched.errors == []
    assert opener.watched.strangers == []


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
