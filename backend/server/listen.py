"""The listening socket: bound before anything heavy is imported."""

from __future__ import annotations

import ipaddress
import socket

BACKLOG = 2048


def is_loopback(host: str) -> bool:
    """Whether a bind to `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback_endpoint(endpoint: str) -> bool:
    """The same for a ZeroMQ address: tcp://host:port, or ipc:///path."""
    if endpoint.startswith("ipc://"):
        return True
    return is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]"))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: who connects from now on waits until the server runs. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    bound.set_inheritable(False)
    return bound
