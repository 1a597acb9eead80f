"""Where events come from. Pages see a `Source` and cannot tell one kind from another.

KVSCOPE_ENGINE_URL        an engine of ours that runs elsewhere; without it, one is started here
KVSCOPE_ATTACH_URL        a foreign engine (vLLM, SGLang …) to attach to instead
KVSCOPE_ENGINE_KEY_FILE   file with the key that either wants
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import httpx
import msgspec

from backend import key_file
from backend.hub import Hub
from backend.sources.background import Background
from backend.sources.embedded import COMMAND, EmbeddedEngine, Option
from backend.sources.follow import Follower
from backend.sources.remote import EngineClient
from backend.sources.status import Status

if TYPE_CHECKING:
    from backend.sources.attach.source import AttachedSource

__all__ = ["Source", "SourceError", "Status", "open_source"]


class SourceError(Exception):
    """The source cannot be opened as it was named; plain words."""


class Source:
    """An engine, wherever it runs: `hub` has its events, `client` controls it, `status` says how it is doing."""

    def __init__(
        self, hub: Hub, background: Background, *, url: str | None, engine: EmbeddedEngine | None, key: str | None
    ):
        self.hub, self.background, self.engine = hub, background, engine
        get_url = (lambda: engine.url) if engine else (lambda: url)
        self.client = EngineClient(get_url, background, key)
        self._follower = Follower(hub, get_url, key)
        if engine:
            engine.changed = self._follower.kick

    @property
    def kind(self) -> str:
        return "embedded" if self.engine else "remote"

    @property
    def can_restart(self) -> bool:
        return self.engine is not None

    @property
    def status(self) -> Status:
        link = self._follower.status
        process = self.engine.status if self.engine else None
        if process is not None and process.phase != "ready":
            return process
        fault = self.hub.read(lambda state: state.fault if state.fatal else "")
        if link.phase == "ready" and fault:
            link = Status(phase="dead", message=fault)
        return msgspec.structs.replace(link, lines=process.lines) if process else link

    def restart(self, options: Mapping[str, Option] | None = None) -> None:
        """A new engine process, with other options if given. Raises SourceError for an engine that is not ours."""
        if self.engine is None:
            raise SourceError("this engine runs elsewhere: restart it where it runs")
        self.engine.restart(options)

    def close(self) -> None:
        """Ends everything, the engine's process too. Harmless when closed already."""
        self._follower.close()
        self.background.close()
        self.client.close()
        if self.engine is not None:
            self.engine.stop()


def open_source(
    options: Mapping[str, Option] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    command: Sequence[str] = COMMAND,
) -> Source | AttachedSource:
    """The source that the environment names. `options`: flags for an engine that is started here.

    Raises SourceError for an address or a key that cannot be used; OSError when no process can be started.
    """
    foreign = environ.get("KVSCOPE_ATTACH_URL", "").strip()
    if foreign:
        return _attach(foreign, environ.get("KVSCOPE_ENGINE_KEY_FILE", ""))
    url = environ.get("KVSCOPE_ENGINE_URL", "").strip().rstrip("/")
    if url:
        if not _is_address(url):
            raise SourceError(f"KVSCOPE_ENGINE_URL must be like http://host:port, not '{url[:60]}'")
        key = _key(environ.get("KVSCOPE_ENGINE_KEY_FILE", ""))
        return Source(Hub(), Background(), url=url, engine=None, key=key)
    source = Source(Hub(), Background(), url=None, engine=EmbeddedEngine(options, command=command), key=None)
    try:
        source.engine.start()
    except OSError:
        source.close()
        raise
    return source


def _attach(url: str, key_path: str) -> AttachedSource:
    from backend.sources.attach.address import base_url
    from backend.sources.attach.source import AttachedSource  # late: who attaches to nothing needs none of it
    from backend.sources.attach.target import TargetConfig, Unreachable

    try:
        base_url(url)
    except Unreachable as error:
        raise SourceError(f"KVSCOPE_ATTACH_URL: {error}") from None
    _key(key_path)
    return AttachedSource(TargetConfig(url=url, key_file=key_path))


def _is_address(url: str) -> bool:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return address.scheme in ("http", "https") and bool(address.host)


def _key(path: str) -> str | None:
    try:
        return key_file.read(path, f"KVSCOPE_ENGINE_KEY_FILE {path}") if path else None
    except key_file.BadKey as error:
        raise SourceError(str(error)) from None
