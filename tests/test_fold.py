"""The fold against a scripted engine's truth, a recount after every event, and its twin in JavaScript."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backend import events, fold
from backend.fold import State, apply
from tests import event_files
from tests.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parent.parent


class Story:
    """Folds events that a test tells one by one; stamps them."""

    def __init__(self, *, blocks: int = 8, block_size: int = 4, **config):
        self.state = State()
        self.seq = self.steps = 0
        self.t = 0.0
        model = events.ModelInfo(name="m", kv_bytes_per_token=100)
        self.tell(
            events.Hello(
                epoch="e",
                model=model,
                device=events.DeviceInfo(),
                block_size=block_size,
                num_blocks=blocks,
                config=config,
            )
        )

    def tell(self, event: events.Event) -> State:
        self.seq += 1
        self.t += 1.0
        event.seq, event.t = self.seq, self.t
        apply(self.state, event)
        recount(self.state)
        return self.state

    def queued(self, request: int, prompt: int) -> None:
        self.tell(events.Queued(request=request, id=f"r{request}", prompt_tokens=prompt, max_tokens=9))

    def step(self, *ops: list, **fields) -> None:
        self.steps += 1
        self.tell(events.Step(step=self.steps, ops=list(ops), step_s=0.25, **fields))


def recount(state: State) -> None:
    """Every counter that the fold keeps as it goes, counted anew from the tables."""
    blocks, size = state.blocks, state.block_size
    live = [request for request in state.requests.values() if request.state != "finished"]
    holders = Counter((block, request.request) for request in live for block in request.table)
    told = Counter((block, owner) for block, owners in enumerate(blocks.owners) for owner in owners)
    assert holders == told
    used = [block for block, owners in enumerate(blocks.owners) if owners]
    cached = [b for b, owners in enumerate(blocks.owners) if not owners and blocks.sealed[b]]
    free = [b for b, owners in enumerate(blocks.owners) if not owners and not blocks.sealed[b]]
    assert all(blocks.fill[b] == 0 for b in free)
    assert all(blocks.fill[b] == size for b, sealed in enumerate(blocks.sealed) if sealed)
    assert all(0 <= fill <= size for fill in blocks.fill)
    pool = state.pool
    assert (pool.used_blocks, pool.cached_blocks, pool.free_blocks) == (len(used), len(cached), len(free))
    assert pool.filled_slots == sum(blocks.fill[b] for b in used)
    assert pool.wasted_slots == len(used) * size - pool.filled_slots
    assert pool.shared_saved_blocks == sum(len(blocks.owners[b]) - 1 for b in used)
    assert pool.held_tokens == sum(request.computed for request in live)
    assert state.running == [n for n in state.running if state.requests[n].state in ("prefill", "decode")]
    assert len(state.running) == sum(request.state in ("prefill", "decode") for request in live)
    assert state.in_flight == len(live)
    assert state.ended == [n for n in state.ended if state.requests[n].state == "finished"]
    assert len(state.requests) == len(live) + len(state.ended)


def fill_follows_from_tables(state: State) -> None:
    """Holds for whole streams: a held block has as many slots filled as its furthest holder computed tokens of it."""
    size = state.block_size
    expected = [size if sealed else 0 for sealed in state.blocks.sealed]
    for request in state.requests.values():
        for index, block in enumerate(request.table):
            expected[block] = max(expected[block], min(size, max(0, request.computed - index * size)))
    assert state.blocks.fill == expected


def agree(state: State, engine: ScriptedEngine) -> None:
    """The fold knows exactly what the engine knows."""
    assert {n for n, r in state.requests.items() if r.state != "finished"} == {job.number for job in engine.live}
    for job in engine.live:
        request = state.requests[job.number]
        assert (request.table, request.computed, request.output_tokens) == (job.table, job.computed, job.said)
        assert (request.state, request.preemptions) == (engine.state_of(job), job.preemptions)
        assert (request.recomputed_tokens, request.cached_tokens) == (job.recomputed, job.cached)
    assert [len(owners) for owners in state.blocks.owners] == engine.refs
    assert [bool(sealed) for sealed in state.blocks.sealed] == [digest is not None for digest in engine.hash_of]
    assert state.totals.steps == state.step == engine.steps
    assert state.totals.aborted == sum(reason == "abort" for reason in engine.done.values())
    assert state.gaps == 0


# one thing at a time


def test_a_request_lives_from_queued_to_finished():
    story = Story()
    story.queued(1, prompt=6)
    state = story.state
    assert (state.requests[1].state, state.in_flight, state.running) == ("queued", 1, [])

    story.step(["admit", 1], ["alloc", 1, 3], prefill=[(1, 4, 0)], sealed=[3], waiting=2)
    request = state.requests[1]
    assert (request.state, request.computed, request.output_tokens, request.ttft_s) == ("prefill", 4, 0, None)

    story.step(["alloc", 1, 5], prefill=[(1, 2, 4)])
    assert (request.state, request.computed, request.output_tokens) == ("decode", 6, 1)
    assert request.t_first == 4.0 and request.ttft_s == 2.0 and state.ttfts == [(4.0, 2.0)]

    story.step()
    assert (request.computed, request.output_tokens, request.table) == (7, 2, [3, 5])
    assert state.blocks.fill[5] == 3 and state.pool.wasted_slots == 1

    story.tell(events.Finished(request=1, reason="length", prompt_tokens=6, output_tokens=2, ttft_s=1.5, e2e_s=4.5))
    assert request.spans == [["queued", 2.0, 2.75], ["prefill", 2.75, 4.0], ["decode", 4.0, 6.0]]
    assert (request.state, request.table, request.ttft_s, request.e2e_s) == ("finished", [], 1.5, 4.5)
    assert (state.pool.used_blocks, state.pool.cached_blocks, state.pool.free_blocks) == (0, 1, 7)
    assert (state.totals.finished, state.totals.output_tokens, state.totals.computed_prefill_tokens) == (1, 2, 6)
    assert state.series[0][:11] == [3.0, 0.25, 4, 0, 1, 0, 4, 4, 1, 2, 0]


def test_a_shared_block_counts_once_and_saves_one():
    story = Story()
    story.queued(1, prompt=9)
    story.step(["admit", 1], ["alloc", 1, 0, 1, 2], prefill=[(1, 9, 0)], sealed=[0, 1])
    story.queued(2, prompt=9)
    story.step(["admit", 2, 0, 1], ["alloc", 2, 4], prefill=[(2, 1, 8)])
    state = story.state
    assert state.blocks.owners[0] == (1, 2) and state.requests[2].cached_tokens == 8
    assert (state.pool.used_blocks, state.pool.shared_saved_blocks) == (4, 2)
    assert state.pool.filled_slots == 4 + 4 + 2 + 1 and state.pool.held_tokens == 10 + 9
    assert (state.totals.lookup_tokens, state.totals.cached_tokens) == (18, 8)
    story.tell(events.Finished(request=1, reason="stop"))
    assert state.blocks.owners[0] == (2,) and state.pool.cached_blocks == 0 and state.pool.free_blocks == 5


def test_decode_none_leaves_out_who_only_now_begins_to_decode():
    story = Story()
    story.queued(1, prompt=2)
    story.queued(2, prompt=2)
    story.step(["admit", 1], ["alloc", 1, 0], prefill=[(1, 2, 0)])
    story.step(["admit", 2], ["alloc", 2, 1], prefill=[(2, 2, 0)])
    assert [story.state.requests[n].output_tokens for n in (1, 2)] == [2, 1]
    story.step(decode=[2])
    assert [story.state.requests[n].output_tokens for n in (1, 2)] == [2, 2]


def test_who_is_preempted_and_computed_anew_in_one_step_says_one_token():
    story = Story()
    story.queued(1, prompt=3)
    story.step(["admit", 1], ["alloc", 1, 0], prefill=[(1, 3, 0)])
    story.step(["preempt", 1], ["admit", 1], ["alloc", 1, 1], prefill=[(1, 4, 0)])
    request = story.state.requests[1]
    assert (request.state, request.computed, request.output_tokens, request.recomputed_tokens) == ("decode", 4, 2, 3)


def test_preemption_takes_everything_and_is_no_cache_hit_when_it_resumes():
    story = Story(blocks=4)
    story.queued(1, prompt=5)
    story.step(["admit", 1], ["alloc", 1, 0, 1], prefill=[(1, 5, 0)], sealed=[0])
    story.step()
    story.step(["preempt", 1])
    state, request = story.state, story.state.requests[1]
    assert (request.state, request.computed, request.table, request.preemptions) == ("preempted", 0, [], 1)
    assert state.blocks.mark[:2] == ["preempted", "preempted"] and state.blocks.marked[:2] == [3, 3]
    assert (state.pool.cached_blocks, state.pool.free_blocks) == (1, 3) and state.running == []

    story.step(["admit", 1, 0], ["alloc", 1, 2], prefill=[(1, 3, 4)])
    assert (request.state, request.computed, request.output_tokens) == ("decode", 7, 3)
    assert request.recomputed_tokens == state.totals.recomputed_tokens == 2  # of 6 computed before, 4 were found again
    assert (state.totals.lookup_tokens, state.totals.cached_tokens, request.cached_tokens) == (5, 0, 0)
    assert [span[0] for span in request.spans] == ["queued", "prefill", "decode", "preempted", "prefill", "decode"]


def test_a_cached_block_is_evicted_when_it_is_handed_out():
    story = Story(blocks=2)
    story.queued(1, prompt=4)
    story.step(["admit", 1], ["alloc", 1, 0], prefill=[(1, 4, 0)], sealed=[0])
    story.tell(events.Finished(request=1, reason="stop"))
    story.queued(2, prompt=3)
    story.step(["admit", 2], ["alloc", 2, 0], prefill=[(2, 3, 0)])
    state = story.state
    assert state.totals.evictions == 1 and (state.blocks.mark[0], state.blocks.marked[0]) == ("evicted", 2)
    assert (state.blocks.sealed[0], state.blocks.fill[0]) == (0, 3)


def test_copy_on_write_leaves_the_old_block_to_its_other_holder():
    story = Story()
    story.queued(1, prompt=6)
    story.step(["admit", 1], ["alloc", 1, 0, 1], prefill=[(1, 6, 0)], sealed=[0])
    story.queued(2, prompt=6)
    story.step(["admit", 2, 0, 1], ["copy", 2, 1, 3], prefill=[(2, 1, 5)])
    state = story.state
    assert state.requests[2].table == [0, 3] and state.requests[2].cached_tokens == 5
    assert state.blocks.owners[1] == (1,) and state.blocks.owners[3] == (2,) and state.blocks.fill[3] == 2
    fill_follows_from_tables(state)


def test_no_lookups_are_counted_with_the_prefix_cache_off():
    story = Story(prefix_cache=False)
    story.queued(1, prompt=4)
    story.step(["admit", 1], ["alloc", 1, 0], prefill=[(1, 4, 0)])
    assert story.state.totals.lookup_tokens == 0


def test_clearing_frees_what_nobody_holds():
    story = Story()
    story.queued(1, prompt=8)
    story.step(["admit", 1], ["alloc", 1, 0, 1], prefill=[(1, 8, 0)], sealed=[0, 1])
    story.tell(events.Finished(request=1, reason="stop"))
    assert story.state.pool.cached_blocks == 2
    story.tell(events.Cleared())
    assert (story.state.pool.cached_blocks, story.state.pool.free_blocks) == (0, 8)


def test_a_rebuilt_pool_is_empty_and_has_the_new_size():
    story = Story()
    story.queued(1, prompt=8)
    story.step(["admit", 1], ["alloc", 1, 0, 1], prefill=[(1, 8, 0)], sealed=[0, 1])
    story.tell(events.Finished(request=1, reason="stop"))
    story.tell(events.Configured(block_size=8, num_blocks=3, rebuilt=True, config={"chunk_size": 7}))
    state = story.state
    assert (state.block_size, len(state.blocks.owners), state.pool.free_blocks) == (8, 3, 3)
    assert state.config == {"chunk_size": 7}
    story.tell(events.Configured(block_size=8, num_blocks=3, config={"chunk_size": 9}))
    assert state.config == {"chunk_size": 9}


def test_a_rebuilt_pool_holds_nothing_of_a_request_whose_end_was_lost():
    story = Story()
    story.tell(events.Queued(request=1, id="a", prompt_tokens=5, max_tokens=2))
    story.step(["alloc", 1, 0])
    story.tell(events.Configured(block_size=4, num_blocks=8, rebuilt=True))
    assert story.state.requests[1].table == [] and story.state.pool.free_blocks == 8


def test_a_step_that_only_preempts_is_no_step():
    """The engine tells such a thing under the number of the step before."""
    story = Story()
    story.queued(1, prompt=2)
    story.step(["admit", 1], ["alloc", 1, 0], prefill=[(1, 2, 0)])
    story.tell(events.Step(step=1, ops=[["preempt", 1]], decode=[]))
    assert story.state.totals.steps == 1 and len(story.state.series) == 1
    assert story.state.requests[1].state == "preempted"


def test_a_chunk_before_the_beginning_is_skipped():
    story = Story()
    story.queued(1, prompt=2)
    story.step(prefill=[(1, 0, -1), (1, -3, 2)])
    story.step()
    assert (story.state.requests[1].computed, story.state.requests[1].state) == (0, "queued")


def test_a_request_may_have_arrived_before_the_last_event():
    """The server stamps the arrival; the engine tells it between two steps."""
    story = Story()
    event = events.Queued(seq=2, t=0.5, request=1, id="r", prompt_tokens=3, max_tokens=2)
    apply(story.state, event)
    assert story.state.t == 1.0 and story.state.requests[1].t_queued == 0.5


def test_only_the_last_finished_requests_stay():
    story = Story()
    for number in range(1, fold.KEPT_FINISHED + 5):
        story.queued(number, prompt=1)
        story.tell(events.Finished(request=number, reason="abort"))
    assert min(story.state.requests) == 5 and story.state.totals.aborted == fold.KEPT_FINISHED + 4


def test_lost_and_doubled_events_are_noticed():
    state = State()
    apply(
        state,
        events.Hello(
            seq=1, epoch="e", model=events.ModelInfo(name="m"), device=events.DeviceInfo(), block_size=4, num_blocks=2
        ),
    )
    apply(state, events.Tokens(seq=2, step=0, texts=[]))
    apply(state, events.Queued(seq=3, request=1, id="a", prompt_tokens=1, max_tokens=1))
    assert state.gaps == 0
    apply(state, events.Queued(seq=3, request=9, id="b", prompt_tokens=1, max_tokens=1))
    assert state.gaps == 0 and list(state.requests) == [1]
    apply(state, events.Queued(seq=6, request=2, id="c", prompt_tokens=1, max_tokens=1))
    assert state.gaps == 1 and state.seq == 6


def test_a_newer_schema_is_refused():
    hello = events.Hello(
        schema=events.SCHEMA + 1,
        epoch="e",
        model=events.ModelInfo(name="m"),
        device=events.DeviceInfo(),
        block_size=4,
        num_blocks=2,
    )
    with pytest.raises(fold.NewerSchema, match="update KVScope"):
        apply(State(), hello)
    with pytest.raises(fold.NewerSchema):
        apply(State(), events.Snapshot(schema=events.SCHEMA + 1, state={}))


def test_a_snapshot_whose_columns_are_cut_is_refused():
    content = json.loads(msgspec.json.encode(Story(blocks=3).state))
    content["blocks"]["fill"].pop()
    with pytest.raises(msgspec.ValidationError, match="3 blocks"):
        apply(State(), events.Snapshot(state=content))


def test_samples_stay_with_the_sensors_that_they_are_of():
    story = Story()
    state = story.state
    assert (state.devices.state, state.samples) == ("", [])
    power, load = events.Sensor(name="power", unit="W"), events.Sensor(name="load")
    gpu, host = events.Device(uuid="GPU-1", sensors=[power]), events.Device(uuid="host", kind="host", sensors=[load])
    story.tell(events.Sample(device=0, t0=1.0, values=[1.0]))
    assert state.samples == []  # nobody said what it would be of
    story.tell(events.Devices(devices=[gpu, host]))
    story.tell(events.Sample(device=0, t0=3.5, values=[310.5]))
    story.tell(events.Sample(device=1, t0=4.0, values=[None], spans=[2.0]))
    story.tell(events.Sample(device=1, t0=4.0, values=[1.0, 2.0]))
    story.tell(events.Sample(device=-1, t0=4.0, values=[1.0]))
    rows = [[4.0, 3.5, 0, [310.5], None], [5.0, 4.0, 1, [None], [2.0]]]
    assert state.samples == rows
    story.tell(events.Devices(devices=[msgspec.structs.replace(gpu, state="lost"), host], message="lost"))
    assert state.samples == rows and state.devices.devices[0].state == state.devices.message == "lost"
    story.tell(events.Devices(devices=[host, gpu]))
    assert state.samples == []
    for _ in range(fold.KEPT_SAMPLES + 3):
        story.tell(events.Sample(device=0, t0=0.0, values=[2.0]))
    assert len(state.samples) == fold.KEPT_SAMPLES


# foreign engines


def scraped(**values: float | None) -> events.Scrape:
    told = {name: events.Value(value=value, name=f"x:{name}") for name, value in values.items()}
    return events.Scrape(values=told, window_s=2.0, scrape_s=0.04)


def gauged(story: Story) -> tuple[int, int, int, int]:
    pool = story.state.pool
    return pool.used_blocks, pool.cached_blocks, pool.free_blocks, pool.resident_blocks


class Foreign(Story):
    """Counts of its pool come from gauges, not from tables."""

    def tell(self, event: events.Event) -> State:
        self.seq += 1
        self.t += 1.0
        event.seq, event.t = self.seq, self.t
        apply(self.state, event)
        return self.state


def test_a_scrape_is_kept_and_its_counters_make_the_totals():
    story = Foreign(blocks=63)
    rates = {"output_tokens_per_s": 7.5, "prompt_tokens_per_s": 100.0, "prompt_tokens_computed_per_s": 30.5}
    story.tell(scraped(running=3.0, waiting=2.0, used_blocks=6.0, preemptions=4.0, prefix_hits_per_s=64.0, **rates))
    state = story.tell(scraped(running=3.0, prefix_queries_per_s=100.0, **rates))
    assert state.scrape.values["running"].name == "x:running" and state.scrape.t == 3.0
    totals = state.totals
    assert (totals.output_tokens, totals.computed_prefill_tokens) == (30, 122)
    assert (totals.lookup_tokens, totals.cached_tokens, totals.preemptions) == (200, 128, 0)
    assert [row[:5] + row[8:11] for row in state.series] == [
        [2.0, 2.0, 61, 15, 6, 3, 2, 15],
        [3.0, 2.0, 61, 15, 6, 3, 0, 15],
    ]


def test_a_scrape_without_anything_to_draw_makes_no_row():
    story = Foreign()
    absent = events.Value(quality="absent", note="this engine has none")
    state = story.tell(events.Scrape(values={"running": absent}, window_s=1.0))
    assert state.series == [] and state.scrape.values["running"].value is None


def test_the_pool_of_a_foreign_engine_is_its_gauge_and_the_resident_cells():
    story = Foreign(blocks=63)
    story.tell(scraped(running=3.0, used_blocks=6.0))
    assert gauged(story) == (6, 0, 57, 0)
    story.tell(events.Resident(stored=[0, 1, 2, 3, 4]))
    assert gauged(story) == (6, 2, 55, 5)  # of 6 used ones 3 are not full: at most 3 of the 5 can be in use
    assert story.state.blocks.sealed[:6] == [1, 1, 1, 1, 1, 0] and story.state.blocks.fill[4] == 4
    story.tell(scraped(running=0.0, used_blocks=0.0))
    assert gauged(story) == (0, 5, 58, 5)
    story.tell(events.Resident(removed=[1, 1, 62, -3, 99], stored=[7, 7]))
    assert gauged(story) == (0, 5, 58, 5) and story.state.blocks.mark[1] == "evicted"
    assert story.state.totals.evictions == 1
    story.tell(events.Resident(cleared=True, stored=[1]))
    assert gauged(story) == (0, 1, 62, 1)


def test_a_request_at_a_foreign_engine_is_followed_by_what_its_client_hears():
    story = Foreign()
    story.tell(events.Queued(request=1, id="a", prompt_tokens=0, max_tokens=8))
    state, request = story.state, story.state.requests[1]
    story.tell(events.Heard(requests=[(1, 0, 0, None), (7, 1, 1, 0.5)]))
    assert (request.state, request.t_first, state.running) == ("prefill", None, [1])
    story.tell(events.Heard(requests=[(1, 20, 3, 3.5)]))
    assert (request.state, request.prompt_tokens, request.output_tokens) == ("decode", 20, 3)
    assert (request.t_first, request.ttft_s, state.ttfts) == (3.5, 1.5, [(3.5, 1.5)])
    assert request.computed == state.pool.held_tokens == 22 and request.table == []
    story.tell(events.Heard(requests=[(1, 0, 5, 3.5)]))
    assert request.output_tokens == 5 and state.totals.output_tokens == 0  # the engine's counters tell that
    story.tell(events.Finished(request=1, reason="stop", prompt_tokens=20, output_tokens=6, ttft_s=1.5))
    assert (request.state, state.running, state.pool.held_tokens) == ("finished", [], 0)
    assert [span[0] for span in request.spans] == ["queued", "prefill", "decode"]


def test_what_a_source_can_show_is_kept_until_the_next_epoch():
    story = Foreign()
    assert story.state.capabilities.kind == ""
    view = events.View(view="roofline", quality="none", why="no counters", flag="--enable-mfu-metrics")
    story.tell(events.Capabilities(kind="vllm", version="0.32.0", views=[view]))
    assert (story.state.capabilities.version, story.state.capabilities.views) == ("0.32.0", [view])
    assert Foreign().state.capabilities.views == []


def test_letters():
    assert [fold.label(n) for n in (1, 2, 26, 27, 52, 53, 702, 703)] == ["A", "B", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


def test_the_pool_splits_without_remainder():
    story = Story()
    story.queued(1, prompt=6)
    story.step(["admit", 1], ["alloc", 1, 0, 1], prefill=[(1, 6, 0)], sealed=[0])
    split = fold.pool_split(story.state)
    assert (split["filled"], split["wasted"], split["free"], split["block_bytes"]) == (1.5, 0.5, 6, 400)
    assert sum(split[part] for part in ("filled", "wasted", "cached", "free")) == split["total"] == 8


# whole streams

engines = st.fixed_dictionaries(
    {
        "blocks": st.integers(12, 90),
        "running": st.integers(1, 9),
        "block_size": st.sampled_from([1, 3, 4, 16]),
        "chunk": st.integers(1, 40),
        "shared_tokens": st.integers(0, 40),
        "abort_share": st.floats(0, 4),
        "fork_share": st.sampled_from([0.0, 0.4]),
        "prefix_cache": st.booleans(),
        "seed": st.integers(0, 10_000),
    }
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engines)
def test_the_fold_agrees_with_the_engine_after_every_step(options):
    capacity = options["blocks"] * options["block_size"]
    options |= {"prompt": (1, max(1, min(40, capacity // 3))), "output": (1, max(1, min(20, capacity // 3)))}
    state = State()

    def emit(event: events.Event) -> None:
        apply(state, events.decode(events.encode(event)))
        recount(state)

    engine = ScriptedEngine(emit, **options)
    engine.hello()
    for _ in engine.run(40):
        agree(state, engine)
        fill_follows_from_tables(state)
    engine.drain()
    agree(state, engine)
    engine.clear()
    agree(state, engine)


numbers = st.integers(-3, 12)
operations = st.tuples(
    st.sampled_from(["admit", "alloc", "copy", "preempt", "dance", ""]),
    st.lists(numbers | st.text(max_size=2), max_size=5),
)
broken_steps = st.builds(
    events.Step,
    step=st.integers(0, 5),
    ops=st.lists(operations.map(lambda op: [op[0], *op[1]]), max_size=5),
    prefill=st.lists(st.tuples(numbers, st.integers(0, 30), numbers), max_size=3),
    decode=st.none() | st.lists(numbers, max_size=4),
    sealed=st.lists(numbers, max_size=3),
)
broken_events = st.one_of(
    broken_steps,
    st.builds(events.Queued, request=numbers, id=st.just("x"), prompt_tokens=st.integers(0, 20), max_tokens=st.just(5)),
    st.builds(events.Finished, request=numbers, reason=st.sampled_from(["stop", "abort", "error", "?"])),
    st.builds(events.Cleared),
    st.builds(events.Configured, block_size=st.integers(1, 5), num_blocks=st.integers(0, 9), rebuilt=st.booleans()),
    st.builds(events.Fault, message=st.text(max_size=5)),
    st.builds(events.Devices, devices=st.lists(st.builds(events.Device, uuid=st.sampled_from("ab")), max_size=2)),
    st.builds(events.Sample, device=numbers, t0=st.just(0.0), values=st.lists(st.none() | st.just(1.0), max_size=2)),
)

few = st.floats(0, 1e6) | st.none()
broken_reports = st.one_of(
    st.builds(events.Resident, stored=st.lists(numbers), removed=st.lists(numbers), cleared=st.booleans()),
    st.builds(events.Heard, requests=st.lists(st.tuples(numbers, st.integers(0, 9), st.integers(0, 9), few))),
    st.builds(scraped, running=few, used_blocks=few, output_tokens_per_s=few),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(broken_events | broken_reports, max_size=25))
@example([events.Step(step=0, sealed=[0]), events.Resident(removed=[0])])
@example(
    [
        events.Resident(stored=list(range(7))),
        events.Queued(request=1, id="x", prompt_tokens=1, max_tokens=5),
        events.Step(step=0, ops=[["admit", 1], ["alloc", 1, 0]]),  # evicts what was counted
        events.Resident(stored=[0]),
    ]
)
def test_nonsense_of_a_foreign_engine_never_raises(told):
    state = Foreign(blocks=7).state
    for event in told:
        apply(state, event)
        assert 0 <= state.pool.resident_blocks <= state.num_blocks


@settings(max_examples=200, deadline=None)
@given(st.booleans(), st.lists(broken_events, max_size=25))
def test_nonsense_never_raises_and_never_breaks_the_counts(greeted, told):
    state = State()
    if greeted:
        apply(
            state,
            events.Hello(
                epoch="e", model=events.ModelInfo(name="m"), device=events.DeviceInfo(), block_size=4, num_blocks=7
            ),
        )
    for event in told:
        apply(state, event)
        recount(state)


@pytest.mark.parametrize("name", event_files.FILES)
def test_a_late_joiner_ends_in_the_same_state(name):
    told = list(event_files.read(name))
    whole = State()
    snapshots = {}
    for i, event in enumerate(told):
        if i % 97 == 0:
            snapshots[i] = events.encode(events.Snapshot(state=whole))
        apply(whole, event)
    for i, line in snapshots.items():
        late = State()
        apply(late, events.decode(line))
        for event in told[i:]:
            apply(late, event)
        assert late.gaps <= whole.gaps
        assert msgspec.structs.replace(late, gaps=whole.gaps) == whole


@pytest.mark.parametrize("name", event_files.FILES)
def test_the_event_files_show_what_they_are_for(name):
    state, seen = State(), Counter()
    for event in event_files.read(name):
        apply(state, event)
        seen.update(op[0] for op in getattr(event, "ops", ()))
        seen["shared"] = max(seen["shared"], state.pool.shared_saved_blocks)
        seen["no cache"] += bool(getattr(event, "prefill", ()) and not state.config.get("kv_cache", True))
        seen["samples"] = max(seen["samples"], len(state.samples))
        seen["lost"] += any(device.state == "lost" for device in state.devices.devices)
    totals = state.totals
    assert {
        "sharing": seen["shared"] > 5 and totals.cached_tokens > 500 and totals.preemptions == 0,
        "preemption": totals.preemptions > 5 and totals.evictions > 20 and totals.recomputed_tokens > 50,
        "forks": seen["copy"] > 5 and totals.aborted > 10 and state.gaps == 0,
        "reconfigured": state.epoch == "second" and state.num_blocks == 30,
        "sensors": state.devices.state == "absent" and seen["samples"] == fold.KEPT_SAMPLES and seen["lost"] > 0,
        "policies": seen["swap_out"] > 5 and seen["swap_in"] > 5 and seen["no cache"] > 20 and state.gaps == 0,
        "attached": state.epoch == "second" and totals.evictions > 50 and len(state.ttfts) > 9 and state.gaps == 0,
        "nonsense": state.gaps > 100 and totals.finished > 0,
    }[name]


@pytest.mark.parametrize("name", event_files.FILES)
def test_the_event_files_are_what_their_script_makes(name):
    made = []
    event_files.FILES[name](lambda event: made.append(events.encode(event)))
    assert made == (event_files.FOLDER / f"{name}.ndjson").read_bytes().splitlines()


# the twin


@pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed: the browser's fold is not compared here"
)
def test_the_browsers_fold_gives_the_same_states(tmp_path):
    """Python's states at many points of each file are what tests/js/fold.test.mjs must come to."""
    for name in event_files.FILES:
        state, points = State(), []
        lines = (event_files.FOLDER / f"{name}.ndjson").read_bytes().splitlines()
        for i, line in enumerate(lines, start=1):
            apply(state, events.decode(line))
            if i % 61 == 0 or i == len(lines):
                points.append({"lines": i, "state": json.loads(msgspec.json.encode(state))})
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"lines": [line.decode() for line in lines], "points": points})
        )
    done = subprocess.run(
        ["node", "--test", "tests/js/fold.test.mjs"],
        cwd=ROOT,
        env={**os.environ, "KVSCOPE_EXPECTED": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
