"""What well-known clients send, byte for byte in shape (tests/data/clients), and what they need back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CLIENTS = sorted((Path(__file__).parent.parent / "data" / "clients").glob("*.jsonl"))


def requests(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", CLIENTS, ids=lambda path: path.stem)
def test_every_request_is_served(http, path):
    assert requests(path)
    for sent in requests(path):
        headers = sent["headers"] | {"Host": "127.0.0.1"}
        answer = http.request(sent["method"], sent["path"], headers=headers, json=sent["body"])
        assert answer.status_code == 200, answer.text
        assert "x-kvscope-ignored" not in answer.headers
        if wanted := headers.get("X-Request-ID"):
            assert answer.headers["x-request-id"] == wanted
        if (sent["body"] or {}).get("stream"):
            check_stream(sent["body"], answer.text)


def check_stream(body: dict, text: str) -> None:
    """Benchmarks count tokens by the usage chunk, which must be the last before [DONE] and have no choices."""
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == body.get("max_tokens", body.get("max_completion_tokens"))
    if body["stream_options"].get("continuous_usage_stats"):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[1] == 1
    else:
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_health_is_200_with_an_empty_body(http):
    answer = http.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")


def test_metrics_answer_head(http):
    answer = http.head("/metrics")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/plain")
