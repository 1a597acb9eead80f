"""Lists of servers: what they say, what is wrong with them, and the addresses behind a name."""

from __future__ import annotations

import asyncio
import socket

import pytest

from backend.sources.attach import endpoints
from backend.sources.attach.endpoints import FleetError, parse, read, resolve

LIST = """\
# the serving room
http://10.0.0.7:8000/  name="left one" key_file=/run/key   # old
https://gpu-box:8443/llm ca_file=/etc/ca.pem insecure_tls=no dcgm=http://gpu-box:9400/metrics

dns+http://vllm.serving.svc:8000 name=pod dcgm=http://{host}:9400/metrics interval_s=2
"""


def test_a_list_is_read_with_its_options():
    left, box, pods = parse(LIST.split("\n"))
    assert (left.config.url, left.config.name, left.config.key_file) == ("http://10.0.0.7:8000", "left one", "/run/key")
    assert (box.config.url, box.config.ca_file, box.config.insecure_tls) == (
        "https://gpu-box:8443/llm",
        "/etc/ca.pem",
        False,
    )
    assert box.dcgm == "http://gpu-box:9400/metrics" and not box.dns and box.host == "gpu-box"
    assert pods.dns and pods.config.interval_s == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("10.0.0.7:8000", "is not an address such as http://host:port"),
        ("ftp://a:1", "is not an address"),
        ("http://", "is not an address"),
        ("http://a:99999", "is not an address"),
        ("http://me:secret@a:1", "give a key_file"),
        ("http://a:1 key=abc", "'key=abc' is no option"),
        ("http://a:1 name=x name=y", "name= is given twice"),
        ("http://a:1 insecure_tls=maybe", "yes or no"),
        ("http://a:1 interval_s=soon", "number of seconds"),
        ("http://a:1 dcgm=9400", "address of a DCGM exporter"),
        ('http://a:1 name="x', "line 2: No closing quotation"),
        ("http://ok:1", "line 2: the same address as in line 1"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_and_without_secrets(line, message):
    with pytest.raises(FleetError, match=message) as raised:
        parse(["http://ok:1", line])
    assert "line 2: " in str(raised.value) and "secret" not in str(raised.value)


def test_empty_missing_and_endless_lists(tmp_path, monkeypatch):
    with pytest.raises(FleetError, match="names no server"):
        parse(["", "  # nothing"])
    with pytest.raises(FleetError, match="cannot be read: No such file"):
        read(tmp_path / "none")
    monkeypatch.setattr(endpoints, "MAX_ENDPOINTS", 2)
    with pytest.raises(FleetError, match="more than 2"):
        parse([f"http://a:{port}" for port in (1, 2, 3)])
    (tmp_path / "list").write_text("http://a:1 name=é\r\nhttp://b:2\r\n", encoding="utf-8")
    assert [endpoint.config.name for endpoint in read(tmp_path / "list")] == ["é", ""]


def test_a_name_is_as_many_replicas_as_it_has_addresses(monkeypatch):
    (endpoint,) = parse(["dns+http://pods:8000/llm name=pod dcgm=http://{host}:9400/metrics"])
    records = [("10.0.0.9", 8000), ("10.0.0.10", 8000), ("10.0.0.9", 8000), ("fd00::1", 8000, 0, 0)]

    async def answers(*_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", record) for record in records]

    async def resolved():
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answers)
        return await resolve(endpoint)

    found = asyncio.run(resolved())
    assert [one.config.url for one in found] == [
        "http://10.0.0.9:8000/llm",
        "http://10.0.0.10:8000/llm",
        "http://[fd00::1]:8000/llm",
    ]
    assert found[0].config.name == "pod 10.0.0.9" and not found[0].dns
    assert found[2].dcgm == "http://[fd00::1]:9400/metrics"
