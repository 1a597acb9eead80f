"""Asking a server that is not ours: bounded in time and bytes, and each way it can fail in plain words.

The key is read from its file for each client, travels in the header only, and only to the host that was named: names
are resolved here, checked, and the address that was checked is the one that is connected to.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from backend import key_file
from backend.sources.attach.address import base_url, join, resolve
from backend.sources.attach.exposition import MAX_BYTES
from backend.sources.attach.target import TargetConfig, Unreachable

CONNECT_S = 2.0
ANSWER_S = 4.0  # the whole of one question, so that two of them in turn still answer a person soon
RESOLVED_S = 30.0
MAX_REDIRECTS = 3
SILENT = "without sending a response"  # h11's words for a connection that ended before an answer began


@dataclass(slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_page(self) -> bool:
        """A web page, whatever was asked for."""
        start = self.body[:512].lstrip().lower()
        kind = self.headers.get("content-type", "")
        return start.startswith((b"<!doctype", b"<html", b"<head")) or "text/html" in kind


class Dropped(Unreachable):
    """No answer came, or none in HTTP. A server may close a connection that was kept just as it is used again."""


class Web:
    """One server. Every method raises Unreachable; use it within one event loop."""

    def __init__(self, config: TargetConfig):
        self.config = config
        self.base = base_url(config.url)
        self._parts = urlsplit(self.base)
        self._key = _key(config)
        self._clients: tuple[httpx.AsyncClient, ...] = ()
        self._addresses: list[str] = []
        self._resolved_at = -RESOLVED_S

    @property
    def where(self) -> str:
        return self._parts.netloc

    @property
    def headers(self) -> dict[str, str]:
        """What lets us in. Not for the screen."""
        return {"authorization": self._key} if self._key else {}

    async def get(self, path: str, *, limit: int = MAX_BYTES) -> Answer:
        """`path` is joined to the base, an absolute URL of the same server is taken as it is."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._get(path, limit)
        except TimeoutError:
            raise Unreachable(
                f"{self.where} takes connections but does not answer GET {urlsplit(path).path} within {ANSWER_S:.0f} s"
            ) from None

    async def post(self, path: str, body: Any, *, timeout_s: float = ANSWER_S) -> Answer:
        try:
            async with asyncio.timeout(timeout_s), self.stream("POST", path, body) as response:
                content = await _content(response, MAX_BYTES, self.where)
                return Answer(response.status_code, response.headers, content)
        except TimeoutError:
            raise Unreachable(f"{self.where} does not answer POST {path} within {timeout_s:.0f} s") from None

    @asynccontextmanager
    async def stream(self, method: str, path: str, body: Any = None) -> AsyncIterator[httpx.Response]:
        """An answer whose body is still to come, for as long as it takes. No redirect is followed.

        It has a connection of its own: a kept one may be dropped just as it is used (llama.cpp's server does), and what
        was asked for must not be asked for twice.
        """
        _, fresh = self._open()
        async with self._send(fresh, method, join(self.base, path), body) as response:
            yield response

    async def close(self) -> None:
        clients, self._clients = self._clients, ()
        for client in clients:
            await client.aclose()

    async def _get(self, path: str, limit: int) -> Answer:
        url = path if path.startswith(("http://", "https://")) else join(self.base, path)
        for _ in range(MAX_REDIRECTS + 1):
            async with self._ask(url) as response:
                if response.status_code not in (301, 302, 303, 307, 308):
                    return Answer(response.status_code, response.headers, await _content(response, limit, self.where))
                target = response.headers.get("location", "")
            onward = httpx.URL(url).join(target)
            if (onward.scheme, onward.host, _port(onward)) != (self._parts.scheme, self._parts.hostname, self._port):
                raise Unreachable(
                    f"{self.where} sends us on to {onward.scheme}://{onward.netloc.decode()[:80]}, another server: "
                    "if you trust it, attach to that address"
                )
            url = str(onward)
        raise Unreachable(f"{self.where} sends us on in a circle")

    @property
    def _port(self) -> int:
        return self._parts.port or (443 if self._parts.scheme == "https" else 80)

    @asynccontextmanager
    async def _ask(self, url: str) -> AsyncIterator[httpx.Response]:
        """GET on a connection that was kept; where it turns out to have been dropped meanwhile, on a new one."""
        kept, fresh = self._open()
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(self._send(kept, "GET", url))
            except Dropped:
                response = await stack.enter_async_context(self._send(fresh, "GET", url))
            yield response

    @asynccontextmanager
    async def _send(
        self, client: httpx.AsyncClient, method: str, url: str, body: Any = None
    ) -> AsyncIterator[httpx.Response]:
        parts = urlsplit(url)
        for last, address in await self._known_addresses():
            literal = f"[{address}]" if ":" in address else address
            request = client.build_request(
                method,
                parts._replace(netloc=f"{literal}:{self._port}").geturl(),
                headers={**self.headers, "host": parts.netloc},
                json=body,
                extensions={"sni_hostname": self._parts.hostname},
            )
            try:
                response = await client.send(request, stream=True)
                break
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if last:
                    self._resolved_at = -RESOLVED_S
                    raise Unreachable(self._unconnected(error)) from None
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                raise Dropped(self._garbled(error)) from None
            except httpx.HTTPError as error:
                raise Unreachable(self._garbled(error)) from None
        try:
            yield response
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.where} broke off its answer: {_word(error)}") from None
        finally:
            await response.aclose()

    def _open(self) -> tuple[httpx.AsyncClient, ...]:
        """A client that keeps its connections, and one that opens one for each question."""
        if not self._clients:
            verify = _trust(self.config) if self._parts.scheme == "https" else False
            self._clients = tuple(
                httpx.AsyncClient(
                    verify=verify,
                    trust_env=False,  # a proxy would see the key
                    headers={} if kept else {"connection": "close"},
                    timeout=httpx.Timeout(None, connect=CONNECT_S),
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=10.0),
                )
                for kept in (16, 0)
            )
        return self._clients

    async def _known_addresses(self) -> list[tuple[bool, str]]:
        """(it is the last, address), checked."""
        if time.monotonic() - self._resolved_at >= RESOLVED_S:
            self._addresses = await resolve(self._parts.hostname, self._port)
            self._resolved_at = time.monotonic()
        return [(i == len(self._addresses), address) for i, address in enumerate(self._addresses, 1)]

    def _unconnected(self, error: httpx.HTTPError) -> str:
        where, cause = self.where, _root(error)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {where} is not trusted ({cause.verify_message}): name the file of the authority "
                "that signed it, or accept any certificate if this is a test"
            )
        if isinstance(cause, ssl.SSLWantReadError):
            return (
                f"{where} does not speak TLS (no answer within {CONNECT_S:.0f} s): is it http:// instead of https://?"
            )
        if isinstance(cause, ssl.SSLError):
            return f"{where} does not speak TLS ({_word(cause)}): is it http:// instead of https://?"
        if isinstance(cause, ConnectionRefusedError):
            return f"nothing listens at {where} (connection refused): does the server run, is the port right?"
        if isinstance(error, httpx.ConnectTimeout) or isinstance(cause, TimeoutError):
            return f"{where} does not answer within {CONNECT_S:.0f} s: is the address right, is a firewall between?"
        if "refused" in str(error).lower() or "all connection attempts failed" in str(error).lower():
            return f"nothing listens at {where} (connection refused): does the server run, is the port right?"
        return f"cannot connect to {where}: {_word(cause)}"

    def _garbled(self, error: httpx.HTTPError) -> str:
        if isinstance(error, httpx.ReadError | httpx.WriteError) or SILENT in str(error):
            perhaps = "has it ended, or does it want https://?" if self._parts.scheme == "http" else "has it ended?"
            return f"{self.where} closed the connection without an answer: {perhaps}"
        hint = ": does it want https://?" if self._parts.scheme == "http" else ""
        return f"{self.where} does not answer as an HTTP server does ({_word(error)}){hint}"


def _key(config: TargetConfig) -> str:
    """The value of the Authorization header, "" without a key."""
    try:
        if config.key is not None:
            text = key_file.checked(config.key.reveal().strip(), "the key")
        else:
            text = key_file.read(config.key_file, f"the key file {config.key_file}") if config.key_file else ""
    except key_file.BadKey as error:
        raise Unreachable(str(error)) from None
    if not text:
        return ""
    return text if text.split(" ")[0].lower() in ("bearer", "basic") else f"Bearer {text}"


def _trust(config: TargetConfig) -> ssl.SSLContext:
    if config.insecure_tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    try:
        return ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise Unreachable(f"the file of the authority, {config.ca_file}, cannot be used: {_word(error)}") from None


async def _content(response: httpx.Response, limit: int, where: str) -> bytes:
    parts, size = [], 0
    try:
        async for part in response.aiter_bytes():
            size += len(part)
            if size > limit:
                raise Unreachable(f"{where} answers with more than {limit / 2**20:.0f} MB")
            parts.append(part)
    except httpx.DecodingError as error:
        raise Unreachable(f"{where} sends what cannot be unpacked: {_word(error)}") from None
    return b"".join(parts)


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _root(error: BaseException) -> BaseException:
    seen = set()
    while (cause := error.__cause__ or error.__context__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        error = cause
    return error


def _word(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__)[:160]
