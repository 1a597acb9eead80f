"""Our KV events, heard by the adapter for vLLM's: what it draws is what the pool caches, whatever happened before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import msgspec
import pytest
import zmq
from typer.testing import CliRunner

from backend import cli, events
from backend.server.kv_publish import KvPublisher, Ledger, hash64
from backend.sources.attach.kv_events import KvEvents
from backend.sources.attach.kv_sources import Endpoint, of_vllm
from tests.server.conftest import DEADLINE_S, Served, eventually, serving
from tests.server.scripted import Bird

ANY = "tcp://127.0.0.1:*"


@contextmanager
def listening(*endpoints: Endpoint, blocks: int = 128) -> Iterator[KvEvents]:
    kv = KvEvents(endpoints, num_blocks=blocks)
    kv.start(lambda event: None)
    try:
        yield kv
    finally:
        kv.close()


@pytest.fixture
def served() -> Iterator[Served]:
    """12 blocks of 4 tokens: two requests are too many."""
    with serving(Bird(num_blocks=12), kv=KvPublisher(ANY, ANY)) as served:
        yield served.wait_ready()


def cached(served: Served) -> dict[str, int]:
    """What the pool's look-ups would find, by the hashes that are told."""

    def read(engine) -> dict[str, int]:
        return {f"{hash64(content.hex()):016x}": 1 for content in engine.pool.hash_of if content is not None}

    return served.bird.loop.post(read).result(DEADLINE_S)


def agrees(kv: KvEvents, served: Served) -> None:
    eventually(lambda: kv.resident() == cached(served), "the adapter's set is the pool's")


async def crowd(url: str, texts: list[str]) -> None:
    """All at once, so that they are preempted."""
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
        asked = [http.post("/v1/completions", json={"prompt": text, "max_tokens": 14}) for text in texts]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


def test_the_adapter_sees_what_the_pool_caches(served):
    sources = httpx.get(f"{served.url}/kv_event_sources").json()
    (endpoint,) = of_vllm(sources, served.url)
    assert endpoint.topic == "kv-events" and endpoint.replay
    with listening(endpoint) as kv, httpx.Client(base_url=served.url, timeout=DEADLINE_S) as http:
        prefix = "the same beginning "
        for end in ("one", "two", "one"):
            http.post("/v1/completions", json={"prompt": prefix + end, "max_tokens": 3})
        agrees(kv, served)
        assert kv.table_of(list((prefix + "one").encode())) and kv.counts.copies == 0
        asyncio.run(crowd(served.url, [f"user {n} says {chr(97 + n) * 9}" for n in range(6)]))
        agrees(kv, served)
        engine = served.bird.loop.engine
        assert engine.pool.evictions > 0 and served.host.hub.read(lambda state: state.totals.preemptions) > 0
        assert kv.state == "live" and kv.counts.unknown_removed == kv.counts.orphans == 0
        with listening(endpoint) as late:  # from the replay alone
            agrees(late, served)
            assert late.state == "live"
        assert http.post("/engine/reset").status_code == 200
        agrees(kv, served)
        assert kv.resident() == {} and kv.counts.cleared == 1
        http.post("/v1/completions", json={"prompt": prefix, "max_tokens": 3})
        http.patch("/engine/config", json={"num_blocks": 16})  # another pool: it begins empty
        agrees(kv, served)
        http.post("/v1/completions", json={"prompt": prefix, "max_tokens": 3})
        agrees(kv, served)
        assert len(kv.resident()) > 3


def test_nothing_is_published_unless_asked_for(parrot, http):
    assert http.get("/kv_event_sources").json() == []
    assert parrot.host.kv is None


def test_the_wire_is_vllms():
    """Decoded by hand: names, types and frames, not our own reader's idea of them."""
    publisher = KvPublisher(ANY, ANY)
    publisher.start(lambda number, begin, end: (list(range(begin, end)), b"tenant" if number == 2 else b""))
    context = zmq.Context()
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        live.subscribe(b"kv-")
        live.connect(publisher.endpoint)
        replay.connect(publisher.replay)
        big = "ff" * 8 + "00" * 7 + "07"
        for event in (
            events.Hello(
                epoch="e", model=events.ModelInfo(name="m"), device=events.DeviceInfo(), block_size=2, num_blocks=4
            ),
            events.Step(step=1, ops=[["admit", 1], ["alloc", 1, 0, 1]], sealed=[0, 1]),
            events.Sealed(blocks=[(0, big, "", 1, 0), (1, "02", big, 1, 2)]),
            events.Step(step=2, ops=[["alloc", 2, 1, 2]], sealed=[1]),
            events.Sealed(blocks=[(1, "03", "", 2, 0)]),
            events.Step(step=3, ops=[["alloc", 2, 3]]),  # nothing was cached there
            events.Cleared(),
        ):
            publisher.take(event)
        found = {}

        def asked() -> bool:
            replay.send_multipart([b"", (0).to_bytes(8, "big")])
            while replay.poll(2000):
                empty, topic, number, body = replay.recv_multipart()
                if number == b"\xff" * 8:
                    assert (empty, topic, body) == (b"", b"", b"")
                    break
                assert (empty, topic) == (b"", b"kv-events")
                found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(body)
            return len(found) == 3

        eventually(asked)
        assert sorted(found) == [0, 1, 2]
        assert all(isinstance(t, float) and rank == 0 for t, _, rank in found.values())
        more = {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
                "kv_cache_spec_kind": "full_attention"}  # fmt: skip
        assert found[0][1] == [
            {"type": "BlockStored", "block_hashes": [7, 2], "parent_block_hash": None, "token_ids": [0, 1, 2, 3],
             "extra_keys": [None, None]} | more,
        ]  # fmt: skip
        assert found[1][1] == [
            {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "group_idx": 0},
            {"type": "BlockStored", "block_hashes": [3], "parent_block_hash": None, "token_ids": [0, 1],
             "extra_keys": [["tenant"]]} | more,
        ]  # fmt: skip
        assert found[2][1] == [{"type": "AllBlocksCleared"}]
    finally:
        live.close(0)
        replay.close(0)
        context.term()
        publisher.close()


def test_copying_on_write_gives_a_cached_block_away():
    ledger = Ledger()
    ledger.told(events.Sealed(blocks=[(5, "0a", "", 1, 0)]), [([1], b"")])
    (removed,) = ledger.told(events.Step(step=1, ops=[["copy", 1, 2, 5]]), [])
    assert removed.block_hashes == [10]
    assert ledger.told(events.Step(step=2, ops=[["copy", 1, 5, 2], ["swap_in", 1, 5]]), []) == []


@pytest.mark.parametrize(
    "where", [["--kv-events", "tcp://*:5557"], ["--kv-events", ANY, "--kv-events-replay", "tcp://0.0.0.0:1"]]
)
def test_only_this_machine_listens_unless_told(where):
    done = CliRunner().invoke(cli.app, ["serve", "--port", "0", *where])
    assert done.exit_code == 2 and "--expose-kv-events" in done.stderr


def test_an_address_that_is_taken_is_named():
    taken = KvPublisher(ANY)
    try:
        done = CliRunner().invoke(cli.app, ["serve", "--port", "0", "--kv-events", taken.endpoint])
        assert done.exit_code == 1 and taken.endpoint in done.stderr
    finally:
        taken.close()


def test_serve_publishes_where_it_was_told(monkeypatch):
    def run(listening, wanted, *, kv, **options) -> None:
        listening.close()
        told.extend([kv.endpoint, kv.replay])
        kv.close()

    told: list[str] = []
    monkeypatch.setattr("backend.server.serve.run", run)
    done = CliRunner().invoke(cli.app, ["serve", "--port", "0", "--kv-events", ANY, "--kv-events-replay", ANY])
    assert done.exit_code == 0, done.output
    assert all(address.startswith("tcp://127.0.0.1:") for address in told) and len(set(told)) == 2
