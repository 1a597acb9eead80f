"""The one token file (`assets/tokens.json`) for Python: what the browser modules get, and charts that Python draws."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parents[2] / "assets"


@cache
def tokens() -> dict[str, dict[str, Any]]:
    """{"light": {name: colour}, "dark": {…}}."""
    return json.loads((ASSETS / "tokens.json").read_text(encoding="utf-8"))
