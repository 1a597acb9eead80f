from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sources.fake_engine import Serving
from tests.workload.talker import Talker


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Talker, str]]:
    """A server to be loaded, and its address."""
    talker = Talker()
    with Serving(talker) as url:
        yield talker, url
