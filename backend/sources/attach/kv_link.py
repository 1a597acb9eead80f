"""The sockets of one KV event publisher: what it says live (SUB), what it said before (DEALER to its replay socket).

Used by one thread. Nothing here waits for long: a replay that goes quiet is given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from backend.sources.attach.kv_decode import END, Malformed, frames
from backend.sources.attach.kv_order import Order
from backend.sources.attach.kv_sources import Endpoint

MUTE_S = 30.0  # after a question that nobody answered, holes are not asked about: live events would wait for it
QUIET_S = 2.0  # a replay without a frame for so long has ended
WHOLE_S = 30.0  # and one that goes on for ever, too
HIGH_WATER = 100_000  # live batches that may wait here while a replay is read
MAX_MESSAGE = 64 << 20  # bytes; a larger one ends the connection
MAX_REPLAYED = 256 << 20  # bytes of one replay
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Link:
    """Raises zmq.ZMQError when the address cannot be used at all."""

    def __init__(self, context: zmq.Context, endpoint: Endpoint):
        self.endpoint, self.order = endpoint, Order()
        self.up = False  # the socket has a connection
        self.connected = False  # and all that was said before it has been asked for
        self.answered: bool | None = None  # by the replay socket, last time it was asked
        self._mute_until = 0.0
        self._context = context
        self.live = context.socket(zmq.SUB)
        self.live.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self.live.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self.live.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        self.live.setsockopt(zmq.LINGER, 0)
        self.live.setsockopt(zmq.IPV6, _numeric_v6(endpoint.url))
        self.live.subscribe(endpoint.topic.encode())
        self.monitor = self.live.get_monitor_socket(WATCHED)
        try:
            self.live.bind(endpoint.url) if endpoint.bind else self.live.connect(endpoint.url)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self.live.getsockopt_string(zmq.LAST_ENDPOINT) if self.endpoint.bind else self.endpoint.url

    @property
    def mute(self) -> bool:
        """A question to its replay was not answered lately."""
        return time.monotonic() < self._mute_until

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.live.disable_monitor()
        self.monitor.close(0)
        self.live.close(0)

    def turned(self) -> bool:
        """Reads what became of the connection. True when one was just made."""
        made = False
        while self.monitor.poll(0):
            self.up = recv_monitor_message(self.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.connected = self.connected and self.up
            made = made or self.up
        return made and self.up

    def receive(self) -> tuple[int, bytes] | None:
        """The next live message, or None. Raises Malformed."""
        try:
            parts = self.live.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frames(parts)

    def replay(self, begin: int, stop: Callable[[], bool]) -> list[tuple[int, bytes]] | None:
        """Batches from number `begin` on that the publisher still has, in order; None when it does not answer.

        A socket of its own each time, so that no late answer is taken for another question's. REQ would not do: there
        are many answers to one question.
        """
        if not self.endpoint.replay:
            return None
        found: list[tuple[int, bytes]] = []
        size, deadline = 0, time.monotonic() + WHOLE_S
        socket = self._context.socket(zmq.DEALER)
        try:
            for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, MAX_MESSAGE)):
                socket.setsockopt(option, value)
            socket.setsockopt(zmq.IPV6, _numeric_v6(self.endpoint.replay))
            socket.connect(self.endpoint.replay)
            socket.send_multipart([b"", begin.to_bytes(8, "big")])
            quiet = time.monotonic() + QUIET_S
            while not stop() and time.monotonic() < min(deadline, quiet) and size < MAX_REPLAYED:
                if not socket.poll(100):
                    continue
                quiet = time.monotonic() + QUIET_S
                try:
                    seq, payload = frames(socket.recv_multipart())
                except Malformed:
                    continue
                if seq == END:
                    self.answered = True
                    return sorted(found)
                size += len(payload)
                found.append((seq, payload))
        except zmq.ZMQError:
            pass  # an address that cannot be used: as if it did not answer
        finally:
            socket.close(0)
        self.answered = bool(found)
        self._mute_until = 0.0 if found else time.monotonic() + MUTE_S
        return sorted(found) if found else None


def _numeric_v6(address: str) -> bool:
    """With ZeroMQ's IPv6 switched on, a name is looked up as IPv6 first, and most publishers listen on IPv4 only."""
    return "[" in address
