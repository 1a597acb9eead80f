"""The map and the tree against a brute-force replay of the same events."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from backend import events, prefix_tree
from backend.hub import Hub
from backend.sources.attach.kv_cells import Change
from backend.sources.attach.kv_decode import Cleared, Removed, Stored, decode
from backend.sources.attach.kv_tree import Residency, named
from tests.sources.attach.wire import CLEARED, ITEMS, payload, recorded, removed, stored


class Map:
    """What a viewer draws who hears only the changes."""

    def __init__(self) -> None:
        self.cells: dict[int, str] = {}
        self.most = 0

    def hear(self, change: Change) -> None:
        if change.cleared:
            self.cells.clear()
        for slot in change.removed:
            del self.cells[slot]
        for cell in change.stored:
            assert cell.slot not in self.cells
            self.cells[cell.slot] = cell.name
        self.most = max(self.most, len(self.cells))


def heard(residency: Residency, *events: dict, **batch) -> Change:
    return residency.apply(decode(payload(*events, **batch)))


def name(number: int) -> str:
    return f"{number:016x}"


def test_the_recording_of_a_real_engine():
    residency, drawn, truth = Residency(63), Map(), Counter()
    for body in recorded():
        batch = decode(body)
        drawn.hear(residency.apply(batch))
        for event in batch.events:
            truth.update(event.hashes) if isinstance(event, Stored) else truth.subtract(event.hashes)
        assert sorted(drawn.cells.values()) == sorted((+truth).elements())
    counts = residency.counts
    assert (counts.stored, counts.removed, counts.copies, counts.unknown_removed, counts.orphans) == (148, 104, 8, 0, 0)
    assert (drawn.most, len(drawn.cells)) == (60, 44)
    assert residency.media() == {"GPU": 44 * 32}


NAMES = st.integers(1, 12)
MEDIA, GROUPS = st.sampled_from(["GPU", "GPU", "CPU"]), st.integers(0, 1)
SAID = st.one_of(
    st.tuples(
        st.just("stored"), st.lists(NAMES, min_size=1, max_size=4, unique=True), st.none() | NAMES, MEDIA, GROUPS
    ),
    st.tuples(st.just("removed"), st.lists(NAMES, min_size=1, max_size=2), st.none(), MEDIA, GROUPS),
    st.tuples(st.just("cleared"), st.just([]), st.none(), MEDIA, GROUPS),
)
BATCHES = st.lists(st.tuples(st.lists(SAID, max_size=6), st.integers(0, 1)), max_size=12)


def event(said: tuple, size: int) -> dict:
    kind, names, parent, medium, group = said
    if kind == "cleared":
        return CLEARED
    more = {"medium": medium, "group_idx": group}
    return stored(*names, parent=parent, size=size, **more) if kind == "stored" else removed(*names, **more)


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.sampled_from([4, 16]), st.integers(0, 12))
def test_map_and_multiset_equal_a_replay_from_the_start(batches, size, resized_at):
    residency, drawn, truth = Residency(500), Map(), Counter()
    for number, (told, rank) in enumerate(batches):
        batch = decode(payload(*(event(said, size) for said in told), rank=rank))
        drawn.hear(residency.apply(batch))
        for said in batch.events:
            match said:
                case Stored():
                    truth.update((rank, said.group, said.medium, h) for h in said.hashes)
                case Removed():
                    for h in said.hashes:
                        truth -= Counter([(rank, said.group, said.medium, h)])
                case Cleared():
                    truth = Counter({key: n for key, n in truth.items() if key[0] != rank})
        if number == resized_at:
            residency.cells.resize(400)
            drawn.hear(residency.everything())
    for medium in ("GPU", "CPU"):
        expected = Counter({(r, g, h): n for (r, g, m, h), n in truth.items() if m == medium})
        assert residency.resident(medium) == expected
    assert sorted(drawn.cells) == [cell.slot for cell in residency.cells.placed()]
    on_gpu = residency.resident()
    if size == 16:  # a cell a copy
        assert sorted(drawn.cells.values()) == sorted(map(named, on_gpu.elements()))
    else:  # up to four blocks of a chain in a cell, copies in none
        held = Counter(key for cell in residency.cells.placed() for key in cell.members)
        assert held == Counter(on_gpu.keys())
        assert all(len(cell.members) <= 4 for cell in residency.cells.placed())


def odd(kind: str, names: list, parent: object, size: int, more: dict) -> dict:
    """An event in the right shape with nothing right in it."""
    tokens = list(range(size * len(names)))
    event = {"type": kind, "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
    return event | more


ODD_NAMES = st.integers(-3, 3) | st.binary(max_size=2) | st.text(max_size=2)
ODD_MORE = st.dictionaries(st.sampled_from(["medium", "group_idx", "extra_keys", "session_id"]), ITEMS, max_size=2)
KINDS = st.sampled_from(["BlockStored", "BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"])
ODD = (
    st.builds(odd, KINDS, st.lists(ODD_NAMES, max_size=4), st.none() | ODD_NAMES, st.integers(0, 40), ODD_MORE) | ITEMS
)


def test_a_session_that_reports_again_brings_no_copy():
    residency = Residency(10)
    heard(residency, stored(1, 2, size=16))
    change = heard(residency, stored(1, 2, 3, size=16, session_id="a"))
    assert [cell.name for cell in change.stored] == [name(3)]
    assert (residency.counts.reports, sum(residency.resident().values())) == (2, 3)


def test_two_copies_have_two_cells_and_two_ends():
    residency, drawn = Residency(10), Map()
    for event in (stored(1, size=16), stored(1, size=16), removed(1)):
        drawn.hear(heard(residency, event))
    assert (drawn.most, list(drawn.cells.values())) == (2, [name(1)])
    drawn.hear(heard(residency, removed(1)))
    assert not drawn.cells and not len(residency)


def test_the_engine_that_counts_copies_itself_is_believed():
    residency = Residency(10)
    heard(residency, stored(1, size=16), stored(1, size=16), stored(1, size=16))
    heard(residency, removed(1, remaining_copy_counts=[1]))
    assert residency.resident() == {(0, 0, name(1)): 1}
    heard(residency, removed(1, remaining_copy_counts=[0]))
    assert not residency.resident()


def test_copies_whose_end_is_not_told_go_when_there_is_no_room():
    residency, drawn = Residency(4), Map()
    for event in (stored(1, 2, size=16), stored(1, 2, size=16), stored(3, 4, size=16)):
        drawn.hear(heard(residency, event))
    assert sorted(drawn.cells.values()) == [name(n) for n in (1, 2, 3, 4)]
    assert residency.counts.stale == 2


def test_what_came_and_went_in_one_step_is_not_told():
    residency = Residency(10)
    assert not heard(residency, stored(1, size=16), removed(1))
    heard(residency, stored(1, size=16))
    change = heard(residency, removed(1), stored(2, size=16))  # the cell has another tenant
    assert (change.removed, [cell.slot for cell in change.stored]) == ([0], [0])
    assert not heard(residency, removed(99)) and residency.counts.unknown_removed == 1


def test_emptying_is_no_eviction():
    residency = Residency(10)
    heard(residency, stored(1, 2, size=16))
    change = heard(residency, CLEARED, stored(3, size=16))
    assert change.cleared and not change.removed and [cell.name for cell in change.stored] == [name(3)]


def test_cells_keep_their_place_and_the_lowest_is_given_first():
    residency = Residency(5)
    heard(residency, stored(1, 2, 3, size=16))
    heard(residency, removed(1, 2))
    assert [cell.slot for cell in heard(residency, stored(4, size=16)).stored] == [0]
    assert [(cell.slot, cell.name) for cell in residency.everything().stored] == [(0, name(4)), (2, name(3))]


def test_blocks_beyond_the_map_wait_for_room():
    residency = Residency(0)
    heard(residency, stored(1, 2, 3, size=16))
    assert not residency.everything().stored
    residency.cells.resize(2)
    assert [cell.name for cell in residency.everything().stored] == [name(1), name(2)]
    change = heard(residency, removed(1))
    assert [(cell.slot, cell.name) for cell in change.stored] == [(0, name(3))]


def test_the_rank_of_the_endpoint_counts_where_the_batch_names_none():
    residency = Residency(10)
    for rank in (0, 1):
        residency.apply(decode(payload(stored(1, size=16), rank=None)), rank)
    assert sorted(cell.name for cell in residency.cells.placed()) == [name(1), f"{name(1)}@1.0"]
    residency.apply(decode(payload(CLEARED, rank=1)))
    assert residency.resident() == {(0, 0, name(1)): 1}


def test_pages_of_one_token_are_drawn_sixteen_a_cell():
    residency, tokens = Residency(100, keep_tokens=True), list(range(100, 140))
    change = heard(residency, stored(*range(1, 41), size=1, tokens=tokens))
    assert [(len(cell.members), cell.position) for cell in change.stored] == [(16, 0), (16, 16), (8, 32)]
    assert [cell.parent for cell in change.stored] == ["", name(1), name(17)]
    # A branch in the middle of a cell begins one of its own; the trunk goes on in its cell.
    branch = heard(residency, stored(51, 52, parent=36, size=1, tokens=[7, 8]))
    assert [(len(cell.members), cell.position, cell.parent) for cell in branch.stored] == [(2, 36, name(33))]
    grown = heard(residency, stored(41, parent=40, size=1, tokens=[140]))
    assert not grown and [residency.take_tokens(cell) for cell in grown.grown] == [[*range(132, 141)]]
    assert residency.table_of(tokens) == [0, 1, 2]
    assert residency.table_of([*tokens[:36], 7, 8]) == [0, 1, 2, 3]
    assert heard(residency, removed(*range(33, 42))).removed == [2]


def test_a_table_is_found_by_walking_the_tokens():
    residency, prompt = Residency(100), [*range(48)]
    heard(residency, stored(1, 2, size=16, tokens=prompt[:32]), stored(3, size=16, parent=2, tokens=prompt[32:]))
    other = [5] * 16
    heard(residency, stored(4, size=16, parent=1, tokens=other))
    assert residency.table_of(prompt) == [0, 1, 2]
    assert residency.table_of([*prompt, 9, 9]) == [0, 1, 2]  # the last block is not full: nobody tells where it is
    assert residency.table_of([*prompt[:16], *other]) == [0, 3]
    assert residency.table_of([8, *prompt]) == residency.table_of([]) == []
    heard(residency, removed(2))
    assert residency.table_of(prompt) == [0]


def test_a_salted_block_is_not_taken_for_a_plain_one():
    residency, tokens = Residency(10), [*range(16)]
    heard(residency, stored(1, size=16, tokens=tokens, extra_keys=[["tenant"]]))
    assert residency.table_of(tokens) == []


def test_memory_has_an_end():
    residency = Residency(10, max_nodes=100)
    for first in range(0, 1000, 50):
        heard(residency, stored(*range(first + 1, first + 51), size=16))
    assert len(residency) == 100 and residency.counts.forgotten == 900


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(ODD, max_size=5), max_size=6))
def test_no_stream_of_events_stops_the_hub(batches):
    """Parents that are their own children, blocks of odd sizes, names without sense: all the way to the pictures."""
    hub, residency, seq = Hub(), Residency(6, keep_tokens=True), 1
    model, device = events.ModelInfo(name="m"), events.DeviceInfo()
    hub.publish(events.Hello(seq=1, epoch="e", model=model, device=device, block_size=16, num_blocks=6))
    for said in batches:
        change = residency.apply(decode(payload(*said)))
        cells = [cell.slot for cell in change.stored]
        meanings = [(cell.slot, cell.name, cell.parent, 0, cell.position) for cell in change.stored]
        texts = [str(residency.take_tokens(cell)) for cell in change.stored]
        hub.publish(events.Resident(seq=seq + 1, stored=cells, removed=change.removed, cleared=change.cleared))
        hub.publish(events.Sealed(seq=seq + 2, blocks=meanings, texts=texts))
        seq += 2
    assert hub.read(lambda state: sum(state.blocks.sealed)) == len(residency.cells.placed())
    assert prefix_tree.picture(hub._texts, hub._state)["blocks"] <= 6
    assert all(hub.block(block) for block in range(6))
    residency.table_of([1, 2, 3] * 20)
