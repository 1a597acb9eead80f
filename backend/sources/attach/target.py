"""Which server to attach to, and with what."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

import msgspec

MIN_INTERVAL_S = 0.2  # a scrape of a busy vLLM takes tens of milliseconds


class Unreachable(Exception):
    """The server cannot be attached to, or not be scraped now. Plain words without secrets."""


class Secret:
    """A text that no repr and no encoder shows: msgspec refuses to write it, and to read one from a file."""

    __slots__ = ("_text",)

    def __init__(self, text: str):
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self):
        raise TypeError("a secret is not written anywhere")


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    url: str  # http://host:port; a path prefix and /v1 may follow
    name: str = ""  # for the screen; "": the URL's host and port
    key_file: str = ""  # file with a bearer key, or with a whole header's value ("Basic …")
    key: Secret | None = None  # the same, typed in a dialog: stays in memory
    ca_file: str = ""  # PEM of the authority that signed the server's certificate
    insecure_tls: bool = False  # take any certificate
    metrics_path: str = ""  # "/metrics", "/prometheus/metrics" …; "": tried in turn
    interval_s: float = 1.0
    kv_events: str = "auto"  # auto | off | tcp://host:port or ipc:///path of the publisher

    @property
    def label(self) -> str:
        return self.name or urlsplit(self.url if "://" in self.url else f"http://{self.url}").netloc.rpartition("@")[2]
