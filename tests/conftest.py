"""Fixtures that several parts of the suite share."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.models import find


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled model's local folder; fetched and converted once, then kept in the user's cache."""
    return find.path("smollm2-135m")


BROWSER = "tests/browser/"
PICTURES = BROWSER + "test_pictures.py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The browser's tests take longest: beside others (`-n 3`) they begin first, else they come last."""
    parallel = hasattr(config, "workerinput")
    items.sort(key=lambda item: item.nodeid.startswith(BROWSER) != parallel)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Each worker takes whole files, so that what a module sets up is set up once. The browser's tests, which share a
    Chromium and two dashboards, are two pieces of like length."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return BROWSER if nodeid.startswith(BROWSER) and file != PICTURES else file

    return ByFile(config, log)
