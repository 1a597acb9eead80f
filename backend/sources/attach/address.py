"""Addresses of servers: how they are written, and which of them may be asked at all."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from urllib.parse import urlsplit

from backend.sources.attach.target import Unreachable

ALLOW = "KVSCOPE_ATTACH_ALLOW"  # hosts, addresses or networks, with commas: when set, nothing else may be attached to
# Where clouds keep their machines' credentials. The link-local ones are refused as such.
METADATA = {"metadata.google.internal", "metadata", "100.100.100.200", "fd00:ec2::254", "192.0.0.192"}


def base_url(text: str) -> str:
    """Where a server's paths begin: without a trailing slash and without /v1. Raises Unreachable."""
    text = text.strip()
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or any(c.isspace() for c in url) or port == 0:
        raise Unreachable(f"'{_shown(text)}' is no address: write it like http://host:8000")
    if parts.username is not None or parts.password is not None:
        raise Unreachable("a name or a key does not belong into the address: put it into a key file")
    path = parts.path.rstrip("/")
    path = path.removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def join(base: str, path: str) -> str:
    """A path below the base, whose own prefix stays."""
    return f"{base.rstrip('/')}/{path.lstrip('/')}"


async def resolve(host: str, port: int) -> list[str]:
    """Addresses of a server that may be attached to. Raises Unreachable."""
    if host.lower().rstrip(".") in METADATA and not os.environ.get(ALLOW):
        raise Unreachable(_forbidden(host))
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise Unreachable(f"there is no host of the name {host[:80]}: is it spelled right?") from None
    addresses = list(dict.fromkeys(item[4][0] for item in found))[:4]
    for address in addresses:
        if not allowed(host, address):
            raise Unreachable(_forbidden(host))
    return addresses


def allowed(host: str, address: str) -> bool:
    """Whether this server may be asked at all."""
    bare = ipaddress.ip_address(address.partition("%")[0])
    bare = getattr(bare, "ipv4_mapped", None) or bare
    rule = os.environ.get(ALLOW, "").strip()
    if not rule:
        return not bare.is_link_local and not bare.is_multicast and str(bare) not in METADATA
    for entry in filter(None, (part.strip() for part in rule.split(","))):
        if entry.lower() == host.lower():
            return True
        try:
            if bare in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:
            continue
    return False


def _forbidden(host: str) -> str:
    if os.environ.get(ALLOW):
        return f"{host[:80]} may not be attached to: {ALLOW} does not list it"
    return f"{host[:80]} is an address where machines keep credentials: {ALLOW} must list it if this is meant"


def _shown(text: str) -> str:
    """An address for a message, without what may be a password in it."""
    return text.rpartition("@")[2][:60]
