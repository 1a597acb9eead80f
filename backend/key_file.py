"""A key in a file, read in one way by all who send one."""

from __future__ import annotations

from pathlib import Path


class BadKey(Exception):
    """The key cannot be read, or no header could carry it; plain words without the key."""


def read(path: str | Path, what: str) -> str:
    """The key in the file at `path`. `what` names the file in messages, as in "--api-key-file /run/key"."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise BadKey(f"{what} cannot be read: {why}") from None
    key = checked(text.strip(), what)
    if not key:
        raise BadKey(f"{what} is empty: it must hold one line of printable ASCII")
    return key


def checked(key: str, what: str) -> str:
    """`key`, which may be "". `what` names it in messages."""
    if key and not (key.isascii() and key.isprintable()):
        raise BadKey(f"{what} must be one line of printable ASCII")
    return key
