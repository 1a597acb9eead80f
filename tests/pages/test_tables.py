"""The tables under the pictures say what the folded state says."""

import pandas as pd

from backend import events, fold
from pages.widgets import tables
from tests.scripted_engine import ScriptedEngine


def folded(steps=120):
    state = fold.State()
    engine = ScriptedEngine(lambda event: fold.apply(state, event), blocks=64, running=8, seed=3)
    engine.hello()
    for _ in engine.run(steps):
        pass
    return state


def test_every_request_has_a_row_live_ones_first():
    state = folded()
    frame = tables.requests(state)
    assert len(frame) == len(state.requests)
    live = [number for number, request in state.requests.items() if request.state != "finished"]
    assert sorted(frame["number"][: len(live)]) == sorted(live)
    assert not frame["state"][: len(live)].str.startswith("finished").any()
    first = state.requests[frame["number"][0]]
    assert frame["request"][0] == fold.label(first.request)
    assert frame["blocks"][0] == len(first.table)


def test_block_states_add_up_to_the_pool():
    state = folded()
    frame = tables.blocks(state)
    kinds = frame["state"].value_counts()
    assert len(frame) == state.num_blocks
    assert kinds.get("used", 0) + kinds.get("shared", 0) == state.pool.used_blocks
    assert kinds.get("cached", 0) == state.pool.cached_blocks
    assert (frame["holders"] - 1).clip(lower=0).sum() == state.pool.shared_saved_blocks


def test_the_split_adds_up_in_blocks_and_bytes():
    state = folded()
    frame = tables.split(state).set_index("part")
    pool = frame.drop("saved by sharing")
    assert round(pool["blocks"].sum()) == state.num_blocks
    expected = state.num_blocks * state.block_size * state.model.kv_bytes_per_token
    assert abs(pool["bytes"].sum() - expected) < 8


def test_steps_and_usage_are_newest_first():
    state = folded()
    for frame in (tables.steps(state), tables.usage(state)):
        assert frame["time (s)"].is_monotonic_decreasing
        assert frame["time (s)"][0] == round(state.series[-1][0], 3)


def test_what_is_cached_where_has_a_row_a_medium():
    state = folded()
    assert len(tables.media(state)) == 0
    told = {
        "cached_tokens_gpu": events.Value(value=512.0, name="KV events"),
        "cached_tokens_disk": events.Value(value=64.0, name="KV events", quality="derived", note="partial"),
        "running": events.Value(value=1.0),
    }
    fold.apply(state, events.Scrape(seq=state.seq + 1, t=state.t + 1, values=told, window_s=1.0))
    frame = tables.media(state)
    assert list(frame["medium"]) == ["GPU", "DISK"] and list(frame["tokens"]) == [512, 64]
    assert list(frame["bytes"]) == [n * state.model.kv_bytes_per_token for n in (512, 64)]
    assert list(frame["quality"]) == ["measured", "derived"] and frame["note"][1] == "partial"


def test_an_empty_state_gives_empty_tables():
    state = fold.State()
    for read in (tables.requests, tables.steps, tables.blocks, tables.usage):
        assert len(read(state)) == 0
    assert tables.split(state)["blocks"].sum() == 0


def test_of_an_attached_engine_the_tables_say_no_more_than_it_tells():
    state = fold.State()
    model, device = events.ModelInfo(name="m"), events.DeviceInfo(kind="unknown")
    fold.apply(state, events.Hello(seq=1, epoch="e", model=model, device=device, block_size=16, num_blocks=8))
    fold.apply(state, events.Queued(seq=2, t=1.0, request=1, id="a", user="you", prompt_tokens=0, max_tokens=9))
    fold.apply(state, events.Resident(seq=3, t=1.1, stored=[0, 1]))
    values = {
        "running": events.Value(value=2.0, name="vllm:num_requests_running"),
        "used_blocks": events.Value(value=3.0, quality="derived"),
        "hit_rate": events.Value(quality="absent", note="no such counter"),
    }
    fold.apply(state, events.Scrape(seq=4, t=2.0, values=values, window_s=1.0))

    requests = tables.requests(state)
    assert not tables.UNSEEN & set(requests.columns) and pd.isna(requests["prompt tokens"][0])
    assert list(tables.blocks(state)["cell"]) == [0, 1]
    assert not {"wasted", "saved by sharing"} & set(tables.split(state)["part"])
    assert tables.split(state)["blocks"].sum() == 8
    assert "filled slots" not in tables.usage(state) and tables.usage(state)["used blocks"][0] == 3
    told = tables.scraped(state).set_index("value")
    assert told.loc["running", "read from"] == "vllm:num_requests_running"
    assert pd.isna(told.loc["hit_rate", "now"]) and told.loc["hit_rate", "note"] == "no such counter"
    assert tables.scraped(fold.State()).empty
