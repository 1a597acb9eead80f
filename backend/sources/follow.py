"""Feeds a hub from an engine's event stream, over HTTP.

In a thread of its own with the standard library's client: at 50 steps a second, an asynchronous client's layers cost
several times what the fold of a step does.
"""

from __future__ import annotations

import http.client
import logging
import socket
import threading
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit

import msgspec

from backend import fold
from backend.hub import Hub
from backend.sources.status import Status

log = logging.getLogger("kvscope.sources")

CONNECT_S = 3.0
SILENCE_S = 20.0  # without a byte: ask again, from where we are; an idle engine is silent too
RETRY_S = (0.25, 0.5, 1.0, 2.0, 4.0)  # pauses between attempts, the last one repeated
JOIN_S = 5.0
READ_BYTES = 1 << 18
MAX_ANSWER = 1 << 16  # bytes read of a refusal
MAX_LINE = 256 << 20  # bytes; a snapshot of a million blocks has less

LOADING = "loading"  # how the engine's reason begins while it is on its way


def authorization(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def reason(status: int, body: bytes) -> str:
    """What an answer that is no success says."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"HTTP {status} {http.client.responses.get(status, '')}".strip()


class Follower:
    """Reconnects for ever, goes on where it was, starts over with a new epoch or when something was lost.

    `get_url` is asked at each attempt, as an engine that is restarted has another port; None: there is none now.
    """

    def __init__(self, hub: Hub, get_url: Callable[[], str | None], key: str | None = None):
        self.hub = hub
        self.status = Status(phase="starting", message="connecting to the engine")
        self._get_url, self._headers = get_url, authorization(key)
        self._url: str | None = None  # of the last attempt
        self._lost = False  # events were lost: what we have cannot be gone on with
        self._kicked, self._closed = threading.Event(), False
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="kvscope-follower", daemon=True)
        self._thread.start()

    def kick(self) -> None:
        """The address may have changed: look now. From any thread."""
        if self._get_url() != self._url:
            self._cut()
        self._kicked.set()

    def close(self) -> None:
        """Returns when nothing is read any more. Harmless when closed already."""
        self._closed = True
        self._cut()
        self._kicked.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _cut(self) -> None:
        """Makes the reader see the end of its stream."""
        reading = self._socket
        if reading is not None:
            try:
                reading.shutdown(socket.SHUT_RDWR)
            except (OSError, ValueError):
                pass  # it ended by itself just now

    def _run(self) -> None:
        failures = 0
        while not self._closed:
            self._kicked.clear()
            before = self._position()
            try:
                self.status = self._attempt()
            except Exception as error:  # a mistake of ours must not end the picture for good
                log.exception("following the engine failed")
                self.status = Status(phase="dead", message=f"internal error: {type(error).__name__}: {error}")
            heard = self._position() != before
            failures = 0 if heard or self.status.phase in ("ready", "starting") else failures + 1
            self._kicked.wait(RETRY_S[min(failures, len(RETRY_S) - 1)])

    def _position(self) -> tuple[str, int]:
        return self.hub.read(lambda state: (state.epoch, state.seq))

    def _attempt(self) -> Status:
        """One connection, from its beginning to its end; how things stand then."""
        url = self._get_url()
        if url != self._url:
            self._url, self.status = url, Status(phase="starting", message="connecting to the engine")
        if url is None:
            return Status(phase="starting", message="waiting for the engine's process")
        try:
            return self._follow(url)
        except (OSError, http.client.HTTPException) as error:
            if url != self._get_url():
                return self.status
            return Status(phase="dead", message=f"cannot reach the engine at {url}: {error or type(error).__name__}")
        except fold.NewerSchema as error:
            return Status(phase="refused", message=str(error))
        except (msgspec.DecodeError, ValueError) as error:
            return Status(phase="refused", message=f"{url} does not send KVScope's events: {error}")

    def _follow(self, url: str) -> Status:
        address = urlsplit(url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname, address.port, timeout=CONNECT_S)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._closed:
                return self.status
            connection.request(
                "GET", f"{address.path}/engine/events?{urlencode(self._from_here())}", headers=self._headers
            )
            self._socket.settimeout(SILENCE_S)
            try:
                response = connection.getresponse()
            except TimeoutError:
                if self.status.phase == "starting":  # its port is open before its code is loaded
                    return self.status
                return Status(phase="dead", message=f"the engine at {url} takes connections and does not answer")
            if response.status != 200:
                return _refusal(response.status, response.read(MAX_ANSWER))
            try:
                self._hear(response)
            except TimeoutError:
                return self.status  # silence proves nothing, the next attempt does
            return Status(phase="dead", message="the engine closed its event stream")
        finally:
            self._socket = None
            connection.close()

    def _from_here(self) -> dict[str, str | int]:
        """What to ask for: all after the last event, or a snapshot when nothing was heard or something was lost."""
        epoch, seq = self._position()
        lost, self._lost = self._lost, False
        return {"follow": 1} if lost or not epoch else {"follow": 1, "since": seq, "epoch": epoch}

    def _hear(self, response: http.client.HTTPResponse) -> None:
        """Until the stream ends, or has a hole: then the next attempt asks for a snapshot."""
        rest, ready = b"", Status(phase="ready")
        gaps = self.hub.gaps
        while chunk := response.read1(READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE:
                raise ValueError(f"a line of more than {MAX_LINE} bytes")
            if not lines:
                continue
            self.hub.ingest(*lines)
            self.status = ready
            if self.hub.gaps > gaps:
                self._lost = True
                return


def _refusal(status: int, body: bytes) -> Status:
    why = reason(status, body)
    if status == 503:
        return Status(phase="starting" if why.startswith(LOADING) else "refused", message=why)
    if status in (401, 403):
        return Status(phase="refused", message=f"the engine does not let us in: {why}")
    return Status(phase="refused", message=f"no KVScope engine answers there: {why}")
