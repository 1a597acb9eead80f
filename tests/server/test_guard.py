"""Who may ask, from where, and how much."""

from __future__ import annotations

import socket

import httpx
import pytest

from tests.server.conftest import serving
from tests.server.scripted import Bird

KEY = "a-key-of-some-length"
BODY = {"prompt": "ab", "max_tokens": 1}


@pytest.fixture(scope="module")
def locked():
    with serving(Bird(), api_key=KEY, loopback=False) as served:
        yield served.wait_ready()


def test_with_a_key_everything_but_health_needs_it(locked):
    with httpx.Client(base_url=locked.url) as http:
        assert http.get("/health").status_code == 200
        for given in (
            {},
            {"Authorization": KEY},
            {"Authorization": "Bearer nearly"},
            {"Authorization": f"Basic {KEY}"},
        ):
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/completions"),
                ("GET", "/metrics"),
                ("GET", "/engine/state"),
            ):
                answer = http.request(method, path, headers=given)
                assert answer.status_code == 401, (given, path)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": f"bearer {KEY}"}  # the scheme's case does not matter
        assert http.post("/v1/completions", json=BODY, headers=right).status_code == 200
        assert http.get("/metrics", headers=right).status_code == 200


def test_bound_to_the_world_any_host_name_is_served(locked):
    headers = {"Authorization": f"Bearer {KEY}", "Host": "gpu-box.example"}
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
def test_on_loopback_our_own_names_are_served(http, host):
    assert http.get("/health", headers={"Host": f"{host}:{http.base_url.port}"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[", ""]
)
def test_on_loopback_other_names_are_refused(http, host):
    answer = http.get("/v1/models", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "bad_host")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost", "", "http://["]
)
def test_pages_of_another_origin_are_refused(http, origin):
    answer = http.post("/v1/completions", json=BODY, headers={"Origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "bad_origin")


def test_our_own_pages_are_served(http):
    origin = f"http://127.0.0.1:{http.base_url.port}"
    assert http.post("/v1/completions", json=BODY, headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/engine/config"])
def test_a_body_of_ten_megabytes_is_413(http, path):
    big = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    method = "PATCH" if path == "/engine/config" else "POST"
    for content in (big, iter([big[:5_000_000], big[5_000_000:]])):  # with a length, and without (chunked)
        answer = http.request(method, path, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert http.post("/v1/completions", json=BODY).status_code == 200


def test_a_strange_request_id_cannot_break_the_answer(parrot):
    with socket.create_connection(("127.0.0.1", parrot.port), timeout=20) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\xffb\tc d" + b"e" * 500 + b"\r\n\r\n"
        )
        head = connection.recv(4096)
    assert head.startswith(b"HTTP/1.1 200")
    assert b"x-request-id: abcde" in head.lower()
    assert b"e" * 200 not in head


def test_garbage_instead_of_http(parrot, http):
    with socket.create_connection(("127.0.0.1", parrot.port), timeout=20) as connection:
        connection.sendall(b"\x16\x03\x01garbage\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert http.get("/health").status_code == 200
