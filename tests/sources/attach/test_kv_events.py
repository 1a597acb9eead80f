"""KV events over real sockets: joined at any time, with gaps, through restarts, and folded into the state of a hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from backend import events
from backend.hub import Hub
from backend.sources.attach.kv_events import KvEvents
from tests.sources.attach.wire import CLEARED, Publisher, payload, recorded, removed, stored
from tests.waiting import eventually


class Watched:
    """KvEvents whose events go into a hub, numbered as a source numbers them."""

    def __init__(self, *publishers: Publisher, blocks: int = 63, **options):
        self.hub, self.seq = Hub(), 0
        self.blocks, self.heard = blocks, []
        self.hello()
        endpoints = [publisher.endpoint(rank=i) for i, publisher in enumerate(publishers)]
        self.kv = KvEvents(endpoints, num_blocks=blocks, **options)
        self.kv.start(self.publish)

    def hello(self) -> None:
        model, device = events.ModelInfo(name="m"), events.DeviceInfo()
        self.publish(
            events.Hello(epoch=f"e{self.seq}", model=model, device=device, block_size=16, num_blocks=self.blocks)
        )

    def publish(self, event: events.Event) -> None:
        self.seq += 1
        event.seq = self.seq
        self.heard.append(event)
        self.hub.publish(event)

    def until(self, batches: int) -> None:
        eventually(lambda: self.kv.counts.batches >= batches, f"{batches} batches are heard")

    def drawn(self) -> list[str]:
        """Hashes of the cells that a viewer sees, as the hub tells them on demand."""
        sealed = self.hub.read(lambda state: [i for i, full in enumerate(state.blocks.sealed) if full])
        return sorted(self.hub.block(i)["hash"] for i in sealed)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def publisher(stack: ExitStack, **options) -> Publisher:
    made = Publisher(**options)
    stack.callback(made.close)
    return made


def watch(stack: ExitStack, *publishers: Publisher, **options) -> Watched:
    watched = Watched(*publishers, **options)
    stack.callback(watched.kv.close)
    return watched


def name(number: int) -> str:
    return f"{number:016x}"


def connected(watched: Watched) -> None:
    """A SUB socket hears nothing that was said before it was connected."""
    eventually(lambda: watched.kv.state != "off", "connected")


def heard_live(watched: Watched, made: Publisher, first: bytes) -> None:
    """Sends `first` until it arrives: without a replay nothing else tells that the subscription has."""
    connected(watched)

    def sent() -> bool:
        if not watched.kv.counts.batches:
            made.pub.send_multipart([b"kv-events", (0).to_bytes(8, "big"), first])
        return watched.kv.counts.batches > 0

    eventually(sent)
    made.sent, made.next = [(0, first)], 1


@pytest.mark.parametrize("topic_in_replay", [True, False])
def test_a_late_joiner_and_a_gap_are_filled_from_the_replay(stack, topic_in_replay):
    made = publisher(stack, topic_in_replay=topic_in_replay)
    bodies = recorded()
    for body in bodies[:10]:
        made.send(body)
    watched = watch(stack, made)
    watched.until(10)
    assert watched.kv.state == "live"
    for number, body in enumerate(bodies[10:], 10):
        made.send(body, lose=number in (12, 13, 17))
    watched.until(23)
    assert watched.kv.state == "live" and len(watched.drawn()) == 44
    assert watched.drawn() == sorted(watched.kv.resident())
    assert watched.hub.read(lambda state: state.totals.evictions) > 0
    assert set(made.asked) >= {0, 12, 17}


def test_without_a_replay_it_says_since_when(stack):
    made = publisher(stack, replay=False)
    watched = watch(stack, made)
    connected(watched)
    assert watched.kv.state == "partial" and "does not replay" in watched.kv.words
    body = payload(stored(1, 2, size=16))
    eventually(lambda: made.send(body, seq=max(50, made.next)) or watched.kv.counts.batches, "heard something")
    assert watched.kv.state == "partial" and "partial since" in watched.kv.words
    made.send(payload(CLEARED, stored(3, size=16)), seq=made.next)
    eventually(lambda: watched.drawn() == [name(3)])
    assert watched.kv.state == "live"  # an emptied cache is known whole


def test_a_gap_that_nobody_can_fill_is_shown(stack):
    made = publisher(stack, replay=False)
    watched = watch(stack, made)
    heard_live(watched, made, payload(stored(1, size=16)))
    assert watched.kv.state == "live"
    made.send(payload(stored(2, size=16)), seq=4)
    watched.until(2)
    assert watched.kv.state == "gap" and "3 batches" in watched.kv.words
    assert watched.drawn() == [name(1), name(2)]


def test_a_replay_that_never_answers_holds_up_no_live_events(stack):
    made, silent = publisher(stack, replay=False), Publisher()
    silent.close()
    made.replay_url = silent.replay_url
    watched = watch(stack, made)
    eventually(lambda: made.send(payload(stored(1, size=16)), seq=made.next + 5) or watched.kv.counts.batches >= 8)
    assert watched.kv.state == "gap" and "does not replay" in watched.kv.words
    assert watched.drawn() == [name(1)] * len(watched.drawn())


def test_an_engine_that_keeps_only_its_newest_batches(stack):
    made = publisher(stack, keep=2)
    for number in range(5):
        made.send(payload(stored(number + 1, size=16), t=number))
    watched = watch(stack, made)
    watched.until(2)
    assert watched.drawn() == [name(4), name(5)]
    eventually(lambda: "keeps only its newest" in watched.kv.words)
    assert watched.kv.state == "partial"


def test_a_publisher_that_begins_anew_empties_the_map(stack):
    made = publisher(stack, replay=False)
    watched = watch(stack, made)
    heard_live(watched, made, payload(stored(1, size=16), t=5.0))
    made.send(payload(stored(2, 3, size=16), t=6.0))
    watched.until(2)
    made.send(payload(stored(9, size=16), t=7.0), seq=0)
    watched.until(3)
    assert watched.drawn() == [name(9)] and watched.kv.state == "live"
    assert any(isinstance(event, events.Resident) and event.cleared for event in watched.heard)


def test_a_restarted_engine_is_noticed_before_it_says_anything(stack):
    first = Publisher()
    first.send(payload(stored(1, 2, 3, size=16), t=5.0))
    watched = watch(stack, first)
    watched.until(1)
    first.close()
    eventually(lambda: watched.kv.state == "gap" and "no connection" in watched.kv.words)
    assert len(watched.drawn()) == 3  # what was there stays, and is said to be that
    publisher(stack, after=first)
    eventually(lambda: watched.kv.state == "live")
    assert watched.drawn() == []


def test_two_ranks_with_the_same_prompt_are_two_sets_of_blocks(stack):
    both = [publisher(stack), publisher(stack)]
    for made in both:
        made.send(payload(stored(1, 2, size=16), rank=None))
    watched = watch(stack, *both)
    watched.until(2)
    assert watched.drawn() == [name(1), f"{name(1)}@1.0", name(2), f"{name(2)}@1.0"]
    both[1].send(payload(CLEARED, rank=None))
    watched.until(3)
    assert watched.drawn() == [name(1), name(2)]


def test_bytes_that_are_no_events_are_counted_and_survived(stack):
    made = publisher(stack)
    made.send(payload(stored(1, size=16)))
    made.send(b"\xc1 no msgpack at all")
    made.send(payload(stored(2, size=16), {"type": "BlockStored"}))
    watched = watch(stack, made)
    watched.until(2)
    connected(watched)
    made.pub.send_multipart([b"kv-events", b"short", b"x"])
    made.send(payload(stored(3, size=16)))
    watched.until(3)
    assert watched.drawn() == [name(1), name(2), name(3)]
    assert watched.kv.counts.malformed >= 2 and "could not be understood" in watched.kv.words
    assert watched.kv.state == "gap"  # what was in the broken one is lost


def test_blocks_get_their_text_from_the_engine(stack):
    made = publisher(stack)
    made.send(payload(stored(1, 2, size=16, tokens=[*range(65, 97)])))
    watched = watch(stack, made, detokenize=lambda ids: "".join(map(chr, ids)))
    eventually(lambda: watched.hub.block(1)["text"] == "".join(map(chr, range(81, 97))), "the text is there")
    assert watched.hub.block(1)["chain"] == [name(1), name(2)]
    assert watched.kv.table_of([*range(65, 97), 1]) == [0, 1]


def test_ids_stand_where_nobody_can_read_them(stack):
    def broken(ids: list[int]) -> str:
        raise OSError("404")

    made = publisher(stack)
    made.send(payload(*(stored(n, size=16, tokens=[n] * 16) for n in range(1, 7))))
    for options in ({}, {"detokenize": broken}):
        watched = watch(stack, made, **options)
        eventually(lambda watched=watched: watched.hub.block(5)["text"] == " ".join(["6"] * 16), "token ids")


def test_a_hub_that_begins_anew_is_told_everything_again(stack):
    made = publisher(stack)
    made.send(payload(stored(1, 2, size=16)))
    watched = watch(stack, made, blocks=0)
    watched.until(1)
    assert watched.drawn() == []
    watched.blocks = 10
    watched.hello()
    watched.kv.resize(10)
    assert watched.drawn() == [name(1), name(2)]
    watched.hello()
    watched.kv.announce()
    assert watched.drawn() == [name(1), name(2)]
    made.send(payload(removed(1)))
    watched.until(2)
    assert watched.drawn() == [name(2)]


def test_what_is_not_there_is_said(stack):
    watched = watch(stack)
    assert (watched.kv.state, watched.kv.words) == ("off", "this engine publishes no KV events")
    lonely = Publisher()
    lonely.close()
    watched = watch(stack, lonely)
    eventually(lambda: lonely.url in watched.kv.words)
    assert watched.kv.state == "off"
    watched.kv.close()
    watched.kv.close()
    assert watched.kv.words == "no longer listening"
