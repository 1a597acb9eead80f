"""The engine's switches, as the form sends them."""

import pytest

from pages.widgets.controls import _together


@pytest.mark.parametrize(
    ("changes", "wanted", "sent"),
    [
        ({"allocator": "reserve"}, {"prefix_cache": True}, {"allocator": "reserve", "prefix_cache": False}),
        ({"allocator": "first-fit"}, {"prefix_cache": False}, {"allocator": "first-fit"}),
        ({"allocator": "paged"}, {"prefix_cache": True}, {"allocator": "paged"}),
        ({"block_size": 8}, {"prefix_cache": True}, {"block_size": 8}),
    ],
)
def test_memory_in_one_piece_comes_without_the_prefix_cache(changes, wanted, sent):
    assert _together(changes, wanted) == sent
