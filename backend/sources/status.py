"""How a source is doing, in words for the screen."""

from __future__ import annotations

from typing import Literal

import msgspec

Phase = Literal["starting", "ready", "refused", "dead", "stopped"]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """starting: not there yet, `lines` show how far it is. ready. refused: it will not serve, `message` says why.
    dead: it was there, or should be, and is not. stopped: on purpose."""

    phase: Phase
    message: str = ""
    lines: tuple[str, ...] = ()  # last lines of the engine's log
    exit_code: int | None = None  # of the engine's process, when it has ended
