"""The servers of a fleet, as a person lists them, and the addresses behind a DNS name.

    # one a line; what follows the address is optional
    http://10.0.0.7:8000  name=left  key_file=/run/key  dcgm=http://10.0.0.7:9400/metrics
    https://gpu-box:8443/llm  ca_file=/etc/ca.pem
    dns+http://vllm-headless.serving.svc:8000  name=pod  dcgm=http://{host}:9400/metrics

`dns+`: every A and AAAA record of the name is a replica of its own (a Kubernetes headless service, Ray Serve's nodes),
and the name is asked again from time to time. `{host}` in dcgm is the replica's address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import shlex
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from backend.sources.attach.target import TargetConfig

MAX_ENDPOINTS = 512
RESOLVE_S = 5.0
SWITCHES = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
WORDS = ("name", "key_file", "ca_file", "metrics_path", "dcgm", "insecure_tls", "interval_s")


class FleetError(ValueError):
    """The list of servers cannot be used; says which line and why."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server, or with `dns` a name behind which there are any number of them."""

    config: TargetConfig
    dns: bool = False
    dcgm: str = ""  # address of a DCGM exporter on its host

    @property
    def host(self) -> str:
        return urlsplit(self.config.url).hostname or ""


def read(path: Path) -> list[Endpoint]:
    """Raises FleetError."""
    try:
        return parse(path.read_text(encoding="utf-8").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(
            f"the list of servers {path} cannot be read: {getattr(error, 'strerror', '') or error}"
        ) from None


def parse(lines: Iterable[str]) -> list[Endpoint]:
    """Raises FleetError, with the number of the line."""
    found: list[Endpoint] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
            if not words:
                continue
            endpoint = _endpoint(words)
            if endpoint.config.url in seen:
                raise FleetError(f"the same address as in line {seen[endpoint.config.url]}")
        except ValueError as error:  # FleetError is one
            raise FleetError(f"line {number}: {error}") from None
        seen[endpoint.config.url] = number
        found.append(endpoint)
        if len(found) > MAX_ENDPOINTS:
            raise FleetError(f"more than {MAX_ENDPOINTS} servers")
    if not found:
        raise FleetError("the list names no server: give one address a line, such as http://10.0.0.7:8000")
    return found


def _endpoint(words: list[str]) -> Endpoint:
    url, *options = words
    given = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or name not in WORDS:
            raise FleetError(f"'{option[:40]}' is no option; there are {', '.join(f'{word}=' for word in WORDS)}")
        if name in given:
            raise FleetError(f"{name}= is given twice")
        given[name] = value
    dns = url.startswith("dns+")
    url = url.removeprefix("dns+").rstrip("/")
    _check(url, "an address")
    dcgm = given.pop("dcgm", "")
    if dcgm:
        _check(dcgm.replace("{host}", "host"), "an address of a DCGM exporter")
    insecure = given.pop("insecure_tls", "no").lower()
    if insecure not in SWITCHES:
        raise FleetError(f"insecure_tls is yes or no, not '{insecure[:20]}'")
    try:
        interval_s = float(given.pop("interval_s", "1"))
    except ValueError:
        raise FleetError("interval_s is a number of seconds") from None
    config = TargetConfig(url=url, insecure_tls=SWITCHES[insecure], interval_s=interval_s, **given)
    return Endpoint(config=config, dns=dns, dcgm=dcgm)


def _check(url: str, what: str) -> None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise FleetError(f"'{url[:80]}' is not {what} such as http://host:port")
    if parts.username or parts.password:
        raise FleetError("an address with a password would end up on the screen: give a key_file")


async def resolve(endpoint: Endpoint) -> list[Endpoint]:
    """One for each address of the name, in a stable order. Raises OSError or TimeoutError when it cannot be told."""
    parts = urlsplit(endpoint.config.url)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(RESOLVE_S):
        answers = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    addresses = sorted({ipaddress.ip_address(answer[4][0].partition("%")[0]) for answer in answers}, key=_order)
    return [_at(endpoint, address) for address in addresses[:MAX_ENDPOINTS]]


def _order(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, int]:
    return address.version, int(address)


def _at(endpoint: Endpoint, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Endpoint:
    parts = urlsplit(endpoint.config.url)
    host = f"[{address}]" if address.version == 6 else str(address)
    url = parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host).geturl()
    name = f"{endpoint.config.name} {address}".strip()
    config = msgspec.structs.replace(endpoint.config, url=url, name=name)
    return Endpoint(config=config, dcgm=endpoint.dcgm.replace("{host}", host))
