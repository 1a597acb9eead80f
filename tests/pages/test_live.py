"""Where the browser finds the WebSocket, and what of its questions is believed."""

import pytest

from pages.widgets import live, service


@pytest.mark.parametrize(
    ("page", "path", "expected"),
    [
        ("http://127.0.0.1:8501/", "", "ws://127.0.0.1:8501/api/live"),
        ("http://127.0.0.1:8501/blocks", "blocks", "ws://127.0.0.1:8501/api/live"),
        ("http://127.0.0.1:8501/blocks?units=GB", "blocks", "ws://127.0.0.1:8501/api/live"),
        ("https://hub.example/user/a/proxy/8501/blocks", "blocks", "wss://hub.example/user/a/proxy/8501/api/live"),
        ("https://hub.example/blocks/", "", "wss://hub.example/blocks/api/live"),
    ],
)
def test_the_socket_is_next_to_the_page(page, path, expected):
    assert live.address(page, path) == f"{expected}?token={service.TOKEN}"


def test_only_numbers_of_requests_are_believed():
    assert live._numbers([1, 2, "3", True, -1, None, 2**60]) == [1, 2]
    assert live._numbers("12") == []
    assert live._numbers(list(range(1000))) == list(range(live.MAX_WATCHED))
    assert live._number("7") is None
    assert live._number(7) == 7
