"""Finding a catalogue row by what people call it."""

from __future__ import annotations

import difflib
import re
from typing import TypeVar

from backend.planner.errors import UnknownName

Row = TypeVar("Row")


def choose(wanted: str, rows: dict[str, Row], names: dict[str, list[str]], what: str) -> Row:
    """Exact key or name first, then the row whose names have all the words; of several, the one with the shortest key.

    `rows`: key -> row; `names`: key -> what else it is called. Upper and lower case and punctuation do not matter.
    Raises UnknownName with near ones.
    """
    by_text = {_plain(text): key for key in rows for text in (*names[key], key)}
    text = _plain(wanted)
    if text in by_text:
        return rows[by_text[text]]
    begins = sorted((key for key in rows if text and _plain(key).startswith(text)), key=len)
    if begins:
        return rows[begins[0]]
    words = set(_words(wanted))
    having = [key for key in rows if words and words <= set(_words(" ".join([key, *names[key]])))]
    if having:
        return rows[min(having, key=len)]
    near = difflib.get_close_matches(text, by_text, n=3, cutoff=0.4)
    hint = f"; near: {', '.join(dict.fromkeys(by_text[name] for name in near))}" if near else ""
    raise UnknownName(f"no {what} '{wanted[:80]}' in the catalogue{hint}")


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def _words(text: str) -> list[str]:
    """Runs of letters and runs of digits: "80GB H100" and "h100-sxm-80gb" have 80, gb, h and 100 in common."""
    return re.findall(r"[a-z]+|\d+(?:\.\d+)?", text.lower())
