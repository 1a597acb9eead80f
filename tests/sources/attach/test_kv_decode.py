"""Every layout of the wire, and bytes that are none."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.sources.attach.kv_decode import Batch, Cleared, Malformed, Removed, Stored, decode, frames
from tests.sources.attach.wire import CLEARED, END, ITEMS, pack, payload, recorded, removed, stored

ARRAYS = [
    ["BlockStored", [1, 2], 9, [5, 6, 7, 8], 2, None],  # the first layout
    ["BlockStored", [1, 2], 9, [5, 6, 7, 8], 2, None, "GPU"],
    ["BlockStored", [1, 2], 9, [5, 6, 7, 8], 2, None, "GPU", None, [None, None], 0, "full_attention", None, "new", {}],
]
MAPS = [
    stored(1, 2, parent=9, size=2, tokens=[5, 6, 7, 8]),
    stored(1, 2, parent=9, size=2, tokens=[5, 6, 7, 8], group_idx=0, session_id=None, locality="x", ownership=[1]),
]


@pytest.mark.parametrize("event", ARRAYS + MAPS)
@pytest.mark.parametrize(
    "batch",
    [
        lambda event: [3.5, [event]],
        lambda event: [3.5, [event], None],
        lambda event: [3.5, [event], 2],
        lambda event: {"ts": 3.5, "events": [event], "data_parallel_rank": 2},
        lambda event: {"ts": 3.5, "events": [event], "something": "new"},
    ],
)
def test_all_layouts_say_the_same(event, batch):
    said = batch(event)
    found = decode(pack(said))
    two, nine = f"{2:016x}", f"{9:016x}"
    assert found.events == [Stored(hashes=[f"{1:016x}", two], parent=nine, tokens=[5, 6, 7, 8], block_size=2)]
    assert found.t == 3.5 and not found.malformed
    assert found.rank == (2 if 2 in (said if isinstance(said, list) else said.values()) else None)


def test_removals_and_clears():
    events = [
        removed(7, medium="CPU_PINNED", group_idx=3),
        ["BlockRemoved", [8]],
        ["BlockRemoved", [8], "DISK", 1],
        CLEARED,
    ]
    found = decode(payload(*events, ["AllBlocksCleared"], removed(9, remaining_copy_counts=[1])))
    assert found.events == [
        Removed(hashes=[f"{7:016x}"], medium="CPU", group=3),
        Removed(hashes=[f"{8:016x}"]),
        Removed(hashes=[f"{8:016x}"], medium="DISK", group=1),
        Cleared(),
        Cleared(),
        Removed(hashes=[f"{9:016x}"], remaining=[1]),
    ]


def test_a_hash_is_the_same_signed_unsigned_and_in_bytes():
    low = (1 << 64) - 5
    names = [decode(payload(removed(h))).events[0].hashes for h in (low, -5, low.to_bytes(8, "big"))]
    assert names == [["fffffffffffffffb"]] * 3
    assert decode(payload(removed(b"\x01" * 32))).events[0].hashes == ["01" * 32]


def test_what_more_than_tokens_makes_a_hash_is_seen():
    kinds = [{}, {"extra_keys": [None]}, {"extra_keys": [["salt"]]}, {"lora_name": "a"}, {"lora_id": 3}]
    assert [decode(payload(stored(1, **more))).events[0].plain for more in kinds] == [True, True, False, False, False]


def test_one_bad_event_does_not_take_the_others():
    bad = [
        None,
        3,
        [],
        {},
        ["BlockStored"],
        stored(1, size=0),
        stored(b"", size=2, tokens=[1, 2]),
        stored(1.5, tokens=[1]),
        removed(None),
        ["BlockRemoved", 3],
    ]
    found = decode(payload(stored(1), *bad, {"type": "BlockMoved", "to": 3}, stored(2)))
    assert [event.hashes for event in found.events] == [[f"{1:016x}"], [f"{2:016x}"]]
    assert (found.malformed, found.unknown) == (len(bad), 1)


def test_tokens_that_do_not_fit_their_blocks_are_not_believed():
    for tokens in ([1, 2, 3], None, "abcd", [1, 2, 3, -4], [1, 2, 3, 1 << 40]):
        assert (
            decode(payload(stored(1, tokens=tokens) if tokens else stored(1) | {"token_ids": None})).events[0].tokens
            == []
        )
    assert decode(payload(stored(1, tokens=[[1, 2], [2, 3], [3, 4], [4, 5]]))).events[0].tokens == [1, 2, 3, 4]


@pytest.mark.parametrize("said", [None, 1, [], [1], [1, 2], {}, {"ts": 1}, ["x", []], {"ts": True, "events": []}])
def test_what_is_no_batch_is_refused(said):
    with pytest.raises(Malformed):
        decode(pack(said))


def test_frames_with_and_without_topic():
    seven = (7).to_bytes(8, "big")
    for parts in ([b"kv", seven, b"x"], [b"", seven, b"x"], [b"", b"kv-events", seven, b"x"], [seven, b"x"]):
        assert frames(parts) == (7, b"x")
    assert frames([b"", b"", END, b""]) == (2**64 - 1, b"")
    for parts in ([], [b"x"], [b"a", b"b"], [b"", b"\x00" * 7, b""]):
        with pytest.raises(Malformed):
            frames(parts)


@settings(max_examples=40, deadline=None)
@given(ITEMS.map(pack) | st.binary(max_size=200))
@example(b"\x91" * 100_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc7\x0c\xff" + b"\xff" * 12)
def test_no_bytes_raise_anything_else(body):
    try:
        assert isinstance(decode(body), Batch)
    except Malformed:
        pass


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 22), st.data())
def test_a_damaged_recording_raises_nothing_else(number, data):
    body = bytearray(recorded()[number])
    for place in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=5)):
        body[place] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(body[: data.draw(st.integers(0, len(body)))]))
    except Malformed:
        pass
