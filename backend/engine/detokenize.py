"""Text from tokens as they come: never half a character, never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Callable

REPLACEMENT = "\ufffd"
MAX_PENDING = 16  # tokens held for an unfinished character; no character is longer, so what is left is broken


class IncrementalDecoder:
    """Text of a growing token list. The deltas joined, `flush` included, are the decoded whole.

    Decoding token by token breaks characters that span tokens and loses the spaces that tokenizers put between
    words, so each new text is the difference of two decodings that start at the same earlier token.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]):
        self._decode = decode
        self._start_from(prompt[-8:])

    def add(self, token: int) -> str:
        self._ids.append(token)
        now = self._decode(self._ids)
        if now.endswith(REPLACEMENT) and len(self._ids) - self._read < MAX_PENDING:
            return ""
        return self._say(now)

    def flush(self) -> str:
        """What an unfinished character left behind, shown as it decodes."""
        return self._say(self._decode(self._ids))

    def _say(self, now: str) -> str:
        text = now[len(self._before) :]
        self._start_from(self._ids[self._read :] or self._ids[-1:])
        return text

    def _start_from(self, ids: list[int]) -> None:
        """All of them have been said; most often it is one."""
        self._ids, self._read, self._before = ids, len(ids), self._decode(ids)


class StopStrings:
    """Holds back text that may be the start of a stop string; the earliest match wins."""

    def __init__(self, stops: list[str], include: bool = False):
        self._stops = [s for s in stops if s]
        self._include = include
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that was met or None)."""
        if not self._stops:
            return text, None
        self._held += text
        matches = [(self._held.find(s), s) for s in self._stops if s in self._held]
        if matches:
            at, stop = min(matches)
            shown, self._held = self._held[: at + len(stop) if self._include else at], ""
            return shown, stop
        keep = max((n for s in self._stops for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None

    def pass_by(self, text: str) -> str:
        """Text that is shown unsearched: no stop string counts before min_tokens are said."""
        return self.flush() + text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text
