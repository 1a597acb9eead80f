"""What every request passes before the application sees it: who asks, from where, and how much they send."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend.server.errors import ApiError

MAX_BODY_BYTES = 8 * 2**20
DRAIN_BYTES = 4 * MAX_BODY_BYTES  # read (and dropped) of a body that is too big, so that the client hears why
DRAIN_S = 5.0
log = logging.getLogger("kvscope.server")

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_NOT_PLAIN = re.compile(r"[^\x21-\x7e]")


class Guard:
    """Pure ASGI, so that nothing is buffered on the way out.

    `loopback`: the server is bound to this machine only; then the Host header must say so too, or a web page could
    reach the server through a name that it controls (DNS rebinding). Browsers name the page they act for in Origin:
    any other page than our own is refused, whatever the bind.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, loopback: bool, max_body_bytes: int = MAX_BODY_BYTES):
        self.app = app
        self.loopback = loopback
        self.max_body_bytes = max_body_bytes
        self._key = api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _NOT_PLAIN.sub("", headers.get("x-request-id", ""))[:128] or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check(scope, headers)
            await self.app(scope, self._bounded(receive), send_with_id)
        except ApiError as error:
            if error.status == 413:
                await _drain(receive)
            await error.response()(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise  # the server breaks the connection: the client must not take half an answer for a whole one
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            internal = ApiError(500, "internal error; the server's log has the details", code="internal_error")
            await internal.response()(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if self.loopback and _hostname(host) not in LOOPBACK:
            raise ApiError(
                403, f"this server answers on this machine only; Host '{host[:100]}' is not it", code="bad_host"
            )
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != host.lower():
            raise ApiError(403, "requests from web pages of another origin are refused", code="bad_origin")
        if self._key and scope["path"] != "/health":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
                raise ApiError(
                    401,
                    "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """A body without a length is counted as it comes."""
        left = self.max_body_bytes

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                if left < 0:
                    await _drain(receive, message)
                    raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _hostname(host: str) -> str | None:
    """Without the port and the brackets of IPv6."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def _drain(receive: Receive, message: Message | None = None) -> None:
    """Reads on for a while: a client that is still sending would otherwise see a broken connection and no answer."""
    left = DRAIN_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while left > 0 and (message is None or message.get("more_body")):
                message = await receive()
                left -= len(message.get("body", b""))
