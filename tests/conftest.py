"""Fixtures that several parts of the suite share."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.models import find


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled model's local folder; fetched and converted once, then kept in the user's cache."""
    return find.path("smollm2-135m")
