"""Fixtures that several parts of the suite share."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.models import find


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled model's local folder; fetched and converted once, then kept in the user's cache."""
    return find.path("smollm2-135m")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The browser's tests last: Playwright keeps an event loop running in the main thread from its first test on, and
    no test that starts a loop of its own can run behind it."""
    items.sort(key=lambda item: "browser" in item.path.parts)
