"""Fixtures that several parts of the suite share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backend.models import find

# Triton decides when it is imported, which torch may do at any time: its kernels are tested on any CPU. On a GPU the
# engine then computes without them, and says so.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled model's local folder; fetched and converted once, then kept in the user's cache."""
    return find.path("smollm2-135m")


BROWSER = "tests/browser/"
# Pieces of like length. What is in one shares a Chromium and its dashboards.
PIECES = (
    ("test_pictures.py",),
    ("test_batching.py", "test_load.py"),
    ("test_explorer.py", "test_hardware.py", "test_story.py"),
)
# On the wall clock, with real sockets, threads and processes, beside workers that want the same two cores.
ROOMS = "server/ sources/ workload/ telemetry/ experiments/ bench/ test_readme.py test_interrupt.py"
CLOCKED = tuple(f"tests/{room}" for room in ROOMS.split())
LONG = (BROWSER, "tests/test_readme.py", "tests/engine/test_bundled_model.py", "tests/bench/")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Beside others (`-n 3`) what takes longest begins first, so that no worker is left with it at the end; alone, the
    browser's tests come last. What was tried again stands in the summary."""
    for item in items:
        if item.nodeid.startswith(CLOCKED):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((i for i, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG)))
    else:
        items.sort(key=lambda item: item.nodeid.startswith(BROWSER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Each worker takes whole files, so that what a module sets up is set up once; of the browser's, several."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if not file.startswith(BROWSER):
                return file
            number = next((i for i, files in enumerate(PIECES) if file[len(BROWSER) :] in files), len(PIECES))
            return f"{BROWSER}{number}"

    return ByFile(config, log)
