from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """An empty model cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvscope" / "models"
