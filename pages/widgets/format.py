"""Numbers as words, the same way as `assets/live/views/draw.js` writes them."""

from __future__ import annotations

import re

NO_TRAFFIC = "No traffic"
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB")


def figures(value: float) -> str:
    """Three figures: 3.21, 32.1, 321, 3,210."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def size(count: float, units: str = "GiB") -> str:
    """Bytes in binary ("GiB") or decimal ("GB") units, the unit with the number."""
    base, names = (1000, _DECIMAL) if units == "GB" else (1024, _BINARY)
    step = 0
    while count >= base and step < len(names) - 1:
        count /= base
        step += 1
    return f"{count:,.0f} {names[0]}" if step == 0 else f"{figures(count)} {names[step]}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def seconds(value: float | None) -> str:
    """Milliseconds below one second; words where nothing was measured."""
    if value is None:
        return NO_TRAFFIC
    if value < 1:
        return f"{value * 1e3:.1f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def duration(value: float, decimals: int = 0) -> str:
    """Seconds, from one and a half minutes on minutes: how long something takes, not how fast it was."""
    return f"{value:.0f} s" if value < 90 else f"{value / 60:.{decimals}f} min"


def plain(text: str) -> str:
    """`text` as Markdown that shows exactly these characters: data is never markup, and never a link."""
    return _escaped(text, _MARKDOWN)


def badge(text: str) -> str:
    """The same for `st.badge`, which makes brackets harmless by itself: an IPv6 address has some."""
    return _escaped(text, _MARKDOWN - {"[", "]"})


def _escaped(text: str, marks: frozenset[str]) -> str:
    escaped = "".join(f"\\{c}" if c in marks else c for c in " ".join(text.split()))
    return _LINK.sub(lambda match: match[0] + JOINER, escaped)  # no address is recognised any more


JOINER = "\u2060"  # invisible
_MARKDOWN = frozenset(r"\`*_{}[]()<>#+-!|~$:&")
_LINK = re.compile(r"\\:/|www|@", re.IGNORECASE)
