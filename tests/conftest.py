"""Fixtures that several parts of the suite share."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.models import find


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled model's local folder; fetched and converted once, then kept in the user's cache."""
    return find.path("smollm2-135m")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers (`-n 2`), each takes whole files, so that what a module sets up is set up once, and one of
    them takes all of the browser's tests, which share a Chromium and two dashboards. Those take longest and begin
    first; without workers they come last."""
    parallel = config.getoption("numprocesses", None) is not None or hasattr(config, "workerinput")
    items.sort(key=lambda item: ("browser" in item.path.parts) != parallel)
    for item in items:
        item.add_marker(pytest.mark.xdist_group("browser" if "browser" in item.path.parts else str(item.path)))
