"""Just enough HTTP/1.1 for a load client: one request, and its answer in pieces at the moment they arrive.

httpx takes some 350 µs of CPU for each piece of a stream on a two-core machine; at a thousand tokens a second the
client would measure itself. Here a piece goes from the socket to `on_data` in one call. `target.find` talks to a server
with httpx first, so odd servers are met there.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

CONNECT_S = 5.0
REUSE_S = 2.0  # servers close idle connections after five seconds; we do not meet them doing so
MAX_HEAD = 1 << 16
MAX_SIZE_LINE = 1 << 10

OnHead = Callable[[int, dict[str, str]], None]
OnData = Callable[[bytes], None]


class Broken(Exception):
    """No connection, or it ended before the answer did, or what came is no HTTP; plain words."""


class Reply:
    """Takes bytes as they come. `complete` when the answer has ended; `reusable` when the connection may go on."""

    def __init__(self, on_head: OnHead, on_data: OnData):
        self._on_head, self._on_data = on_head, on_data
        self._rest = b""
        self._step = self._head
        self._left = 0
        self.began = self.complete = self.reusable = False

    def feed(self, data: bytes) -> None:
        """Raises Broken for what is no HTTP/1.1."""
        self.began = True
        self._rest += data
        while self._rest and not self.complete and self._step():
            pass

    def end(self) -> None:
        """The server has closed. Raises Broken when its answer was not complete."""
        if self._step == self._until_closed:
            self.complete = True
        if not self.complete:
            raise Broken("the server closed the connection before the answer was complete")

    # Each step takes what it can of `_rest`; False: more bytes are needed.

    def _head(self) -> bool:
        head, found, rest = self._rest.partition(b"\r\n\r\n")
        if not found:
            if len(self._rest) > MAX_HEAD:
                raise Broken("the server's answer has no end of its headers")
            return False
        self._rest = rest
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise Broken("the server does not speak HTTP/1.1")
        code = int(status[:3])
        if 100 <= code < 200:
            return True  # the real one follows
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.reusable = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        self._on_head(code, headers)
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._step = self._size
        elif "content-length" in headers or code in (204, 304):
            length = headers.get("content-length", "0")
            if not length.isdigit():
                raise Broken("the server's answer has a length that is no number")
            self._left = int(length)
            self._step = self._body
            self.complete = self._left == 0
        else:
            self.reusable = False
            self._step = self._until_closed
        return True

    def _until_closed(self) -> bool:
        data, self._rest = self._rest, b""
        self._on_data(data)
        return False

    def _body(self) -> bool:
        self._take()
        self.complete = self._left == 0
        return False

    def _size(self) -> bool:
        line, found, rest = self._rest.partition(b"\r\n")
        if not found:
            if len(self._rest) > MAX_SIZE_LINE:
                raise Broken("the server's answer is not chunked as it says")
            return False
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            raise Broken("the server's answer is not chunked as it says") from None
        self._rest = rest
        self._step = self._chunk if self._left else self._trailer
        return True

    def _chunk(self) -> bool:
        if self._left:
            self._take()
        if self._left or len(self._rest) < 2:
            return False
        self._rest = self._rest[2:]
        self._step = self._size
        return True

    def _trailer(self) -> bool:
        line, found, rest = self._rest.partition(b"\r\n")
        if not found:
            return False
        self._rest = rest
        self.complete = not line
        return True

    def _take(self) -> None:
        data, self._rest = self._rest[: self._left], self._rest[self._left :]
        self._left -= len(data)
        self._on_data(data)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reply: Reply | None = None
        self.ended: asyncio.Future[None] | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.reply is None:
            self.transport.abort()  # nobody asked
            return
        try:
            self.reply.feed(data)
            if self.reply.complete:
                self._settle(None)
        except Exception as error:  # whoever asked hears it
            self._settle(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self.reply is None:
            return
        try:
            if error is not None:
                raise Broken(f"the connection failed: {error}")
            self.reply.end()
            self._settle(None)
        except Broken as broken:
            self._settle(broken)

    def _settle(self, error: Exception | None) -> None:
        ended, self.ended = self.ended, None
        if ended is not None and not ended.done():
            ended.set_exception(error) if error else ended.set_result(None)


class Http:
    """Requests to one server; as many connections as there are requests at a time."""

    def __init__(self, url: str, headers: Mapping[str, str]):
        parts = urlsplit(url)
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        given = {"host": parts.netloc, "accept-encoding": "identity", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._idle: list[_Connection] = []

    async def ask(self, method: str, path: str, body: bytes, on_head: OnHead, on_data: OnData) -> None:
        """Returns when the answer is complete. Raises Broken, and what the callbacks raise.

        A connection that was kept may have been closed by the server meanwhile: then another one is made, once.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        message = head.encode("latin-1") + b"\r\n" + body
        reply = Reply(on_head, on_data)
        kept = self._reuse()
        if kept is not None:
            try:
                return await self._exchange(kept, message, reply)
            except Broken:
                if reply.began:
                    raise
        await self._exchange(await self._connect(), message, reply)

    async def _exchange(self, connection: _Connection, message: bytes, reply: Reply) -> None:
        connection.reply = reply
        connection.ended = ended = asyncio.get_running_loop().create_future()
        try:
            connection.transport.write(message)
            await ended
        finally:
            connection.reply = None
            if reply.complete and reply.reusable and not connection.transport.is_closing():
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.transport.abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().transport.abort()

    def _reuse(self) -> _Connection | None:
        oldest = time.monotonic() - REUSE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise Broken(f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise Broken(f"no connection: {error.strerror or error}") from None
        return connection
