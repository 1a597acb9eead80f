"""The client's own HTTP: any answer, cut anywhere, comes out whole; what is none is said."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.workload.http11 import Broken, Http, Reply

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Heard:
    def __init__(self) -> None:
        self.code, self.headers, self.body = 0, {}, b""
        self.reply = Reply(self.head, self.data)

    def head(self, code: int, headers: dict[str, str]) -> None:
        self.code, self.headers = code, headers

    def data(self, data: bytes) -> None:
        self.body += data


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    how=st.sampled_from(["chunked", "length", "close"]),
    early=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_an_answer_cut_anywhere_comes_out_whole(pieces, how, early, cuts):
    body = b"".join(pieces)
    message = b"HTTP/1.1 100 Continue\r\n\r\n" if early else b""
    message += b"HTTP/1.1 200 OK\r\nX-Name: a:b\r\n"
    if how == "chunked":
        message += b"transfer-encoding: Chunked\r\n\r\n"
        message += b"".join(b"%X;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        message += b"0\r\nTrailer: x\r\n\r\n"
    elif how == "length":
        message += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    else:
        message += b"\r\n" + body
    heard = Heard()
    places = sorted({0, len(message), *(min(cut, len(message)) for cut in cuts)})
    for begin, end in pairwise(places):
        heard.reply.feed(message[begin:end])
    if how == "close":
        assert not heard.reply.complete
        heard.reply.end()
    assert heard.reply.complete and heard.reply.reusable == (how != "close")
    assert heard.code == 200 and heard.headers["x-name"] == "a:b" and heard.body == body


@pytest.mark.parametrize(
    "message",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"x" * 70_000,
        CHUNKED + b"zz\r\n",
        CHUNKED + b"f" * 2000,
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_said(message):
    with pytest.raises(Broken):
        Heard().reply.feed(message)


@pytest.mark.parametrize("message", [b"", b"HTTP/1.1 200 OK\r\n", CHUNKED + b"5\r\nab"])
def test_an_end_before_the_end_is_said(message):
    heard = Heard()
    heard.reply.feed(message)
    with pytest.raises(Broken, match="before the answer was complete"):
        heard.reply.end()


def test_a_connection_that_the_server_wants_closed_is_not_used_again():
    heard = Heard()
    heard.reply.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 0\r\n\r\n")
    assert heard.reply.complete and not heard.reply.reusable


async def test_a_kept_connection_that_the_server_has_closed_is_made_anew():
    served = 0

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps the connection, as it says, until somebody asks on it again."""
        nonlocal served
        await reader.readuntil(b"\r\n\r\n")
        served += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    async with server:
        http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base", {"x-name": "a"})
        for _ in range(3):
            heard = Heard()
            await http.ask("GET", "/x", b"", heard.head, heard.data)
            assert heard.body == b"ok"
        http.close()
    assert served == 3
