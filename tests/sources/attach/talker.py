"""A server that says what a test tells it to, over HTTP or HTTPS."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

from backend.sources.background import Background


class Said(NamedTuple):
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = {}
    delay_s: float = 0.0
    stream: Callable[[dict], AsyncIterator[bytes]] | None = None  # instead of `body`; gets the question's JSON


def told(value: object, **more) -> Said:
    return Said(json.dumps(value).encode(), headers={"content-type": "application/json"}, **more)


def packed(body: bytes) -> Said:
    return Said(gzip.compress(body), headers={"content-encoding": "gzip"})


class Talker:
    """`answers` by path, all else is 404. `asked`: (method, path, headers, body) of each question."""

    def __init__(self, answers: dict[str, Said] | None = None, *, host: str = "127.0.0.1", port: int = 0, tls=None):
        self.answers = answers or {}
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.drops = ""  # a connection, without a word of it: "after" an answer, or at the "next" question
        self.choose: Callable[[str, bytes], Said | None] = lambda path, body: None  # before `answers`
        self.gone = 0  # askers that left before they had their answer
        self._host, self._given, self._tls = host, port, tls
        self.port = 0

    def __enter__(self) -> Talker:
        self._background = Background("talker")
        self._background.run(self._start()).result(5)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Harmless when stopped already."""
        if self._background.loop.is_closed():
            return
        self._background.run(self._stop()).result(5)
        self._background.close()

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    def keys(self) -> set[str]:
        return {headers.get("authorization", "") for _, _, headers, _ in self.asked}

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self._host, self._given, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for served in itertools.count():
                if served and self.drops == "after":
                    break
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                if served and self.drops == "next":
                    break
                method, path, _ = head[0].split(" ", 2)
                headers = {k.lower(): v for k, _, v in (row.partition(": ") for row in head[1:] if row)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.asked.append((method, path, headers, body))
                said = self.choose(path, body) or self.answers.get(path, Said(b"not found", 404))
                await self._answer(writer, said, body)
        except (
            asyncio.IncompleteReadError,
            asyncio.CancelledError,
            ConnectionError,
            ArithmeticError,
            ValueError,
            ssl.SSLError,
        ):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, said: Said, body: bytes) -> None:
        await asyncio.sleep(said.delay_s)
        headers = "".join(f"{name}: {value}\r\n" for name, value in said.headers.items())
        if said.stream is None:
            writer.write(f"HTTP/1.1 {said.status} x\r\n{headers}content-length: {len(said.body)}\r\n\r\n".encode())
            writer.write(said.body)
            await writer.drain()
            return
        writer.write(f"HTTP/1.1 {said.status} x\r\n{headers}transfer-encoding: chunked\r\n\r\n".encode())
        try:
            async for part in said.stream(json.loads(body)):
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
                if writer.is_closing():
                    raise ConnectionResetError
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            self.gone += 1
            raise


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """(a server's context, the file that a client must trust) for 127.0.0.1."""
    key, pem = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(pem)],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key)
    return context, pem
