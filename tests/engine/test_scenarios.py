"""What a user of the engine may rely on, one scenario each. The model is arithmetic, the rest is real."""

import pytest

from backend.engine.config import ConfigError, EngineConfig
from backend.engine.engine import Busy, NotIdle, Refused
from backend.events import Cleared, Configured, Fault, Finished, Queued, Step
from tests.engine.stub import alone, greedy, ids, prompt, run, stub_engine


def submit(engine, length=20, seed=0, max_tokens=8, **kwargs):
    params = {k: kwargs.pop(k) for k in list(kwargs) if k in greedy(1).__struct_fields__}
    return engine.submit(prompt(length, seed), greedy(max_tokens, **params), id=f"r{seed}", **kwargs)[0]


def of(events, kind):
    return [e for e in events if isinstance(e, kind)]


# ---- prefix cache


def test_the_same_prompt_again_computes_only_what_follows_the_last_full_block():
    engine, _ = stub_engine(block_size=16)
    first = submit(engine, 40)
    engine.step()
    second = submit(engine, 40)
    engine.step()
    assert second.cached_tokens == 32
    assert second.table[:2] == first.table[:2]
    assert [engine.pool.refs[b] for b in second.table[:2]] == [2, 2]
    shared = second.table[:2]
    run(engine)
    third = submit(engine, 40)
    engine.step()
    assert third.table[:2] == shared, "the hit is the same blocks after everyone has finished"
    assert third.cached_tokens == 32


def test_a_prompt_that_is_wholly_cached_still_computes_a_token_and_says_the_same():
    engine, _ = stub_engine(block_size=16)
    submit(engine, 48)
    cold = ids(run(engine)[1])
    warm = submit(engine, 48)
    assert ids(run(engine)[warm.number]) == cold
    assert warm.cached_tokens == 32, "the last full block holds the token whose logits are needed"


def test_a_shared_prefix_shorter_than_a_block_is_no_hit():
    engine, _ = stub_engine(block_size=16)
    engine.submit([*prompt(10), 40, 41, 42, 43, 44, 45, 46, 47], greedy(), id="a")
    run(engine)
    (other,) = engine.submit([*prompt(10), 60, 61, 62, 63, 64, 65, 66, 67], greedy(), id="b")
    run(engine)
    assert other.cached_tokens == 0


def test_the_same_block_under_another_parent_is_no_hit():
    engine, _ = stub_engine(block_size=4)
    tail = [50, 51, 52, 53, 54]
    engine.submit([40, 41, 42, 43, *tail], greedy(1), id="a")
    run(engine)
    (other,) = engine.submit([44, 45, 46, 47, *tail], greedy(1), id="b")
    run(engine)
    assert other.cached_tokens == 0


def test_a_salt_is_a_namespace():
    engine, _ = stub_engine(block_size=4)
    cached = []
    for salt in (b"a", b"b", b"a"):
        (request,) = engine.submit(prompt(9), greedy(1), id="x", salt=salt)
        run(engine)
        cached.append(request.cached_tokens)
    assert cached == [0, 0, 8]


def test_what_was_said_is_found_by_the_next_turn():
    engine, _ = stub_engine(block_size=4)
    submit(engine, 8, max_tokens=9)
    said = ids(run(engine)[1])
    (turn,) = engine.submit([*prompt(8), *said, 99], greedy(1), id="next")
    run(engine)
    assert turn.cached_tokens == 16


def test_two_identical_prompts_in_one_step_are_both_right():
    engine, _ = stub_engine(block_size=4)
    a, b = submit(engine, 12), submit(engine, 12)
    said = run(engine)
    assert ids(said[a.number]) == ids(said[b.number]) == alone(prompt(12), 8)
    assert b.cached_tokens == 0


def test_switched_off_there_are_no_hits_and_no_hashes():
    engine, events = stub_engine(block_size=4, prefix_cache=False)
    for _ in range(2):
        request = submit(engine, 12)
        run(engine)
    assert request.cached_tokens == 0 and not request.hashes
    assert all(not step.sealed for step in of(events, Step))
    assert engine.pool.cached_count == 0


def test_reset_refuses_while_busy_and_clears_when_idle():
    engine, events = stub_engine(block_size=4)
    submit(engine, 12)
    engine.step()
    with pytest.raises(NotIdle):
        engine.reset_prefix_cache()
    run(engine)
    engine.reset_prefix_cache()
    assert engine.pool.cached_count == 0 and of(events, Cleared)
    again = submit(engine, 12)
    run(engine)
    assert again.cached_tokens == 0


# ---- scheduling


def test_first_come_first_served_within_budget_and_cap():
    engine, events = stub_engine(max_running=3, token_budget=40, chunk_size=16, block_size=4, num_blocks=200)
    requests = [submit(engine, 20 + i, seed=i) for i in range(8)]
    run(engine)
    admitted = [op[1] for step in of(events, Step) for op in step.ops if op[0] == "admit"]
    assert admitted == [r.number for r in requests]
    running: set[int] = set()
    for event in events:
        if isinstance(event, Step):
            running |= {op[1] for op in event.ops if op[0] == "admit"}
            decode = len(event.decode) if event.decode is not None else 0
            assert sum(n for _, n, _ in event.prefill) + decode <= 40
            assert len(running) <= 3
        if isinstance(event, Finished):
            running.discard(event.request)


def test_a_long_prompt_is_chunked_and_only_its_last_chunk_speaks():
    engine, events = stub_engine(token_budget=64, chunk_size=16, block_size=4)
    other = submit(engine, 4, max_tokens=30)
    engine.step()
    long = submit(engine, 60, seed=1, max_tokens=1)
    said = run(engine)
    chunks = [n for step in of(events, Step) for r, n, _ in step.prefill if r == long.number]
    assert chunks == [16, 16, 16, 12]
    assert len(ids(said[long.number])) == 1
    # and the other one went on speaking in every step meanwhile
    assert ids(said[other.number]) == alone(prompt(4), 30)[1:]
    while_chunking = [s for s in of(events, Step) if any(r == long.number for r, *_ in s.prefill)]
    assert all(s.decode is None or other.number in s.decode for s in while_chunking)


def test_alone_a_long_prompt_may_use_the_whole_budget_but_not_beside_others():
    engine, events = stub_engine(token_budget=64, chunk_size=16, block_size=4)
    submit(engine, 60)
    run(engine)
    assert of(events, Step)[0].prefill == [(1, 60, 0)]
    submit(engine, 60, seed=1)
    submit(engine, 60, seed=2)
    engine.step()
    assert [n for _, n, _ in of(events, Step)[-1].prefill] == [16, 16]


def test_out_of_blocks_the_newest_gives_way_and_nobody_is_admitted_in_that_step():
    engine, events = stub_engine(block_size=4, num_blocks=6, max_running=2, prefix_cache=False)
    old, new = submit(engine, 8, seed=1, max_tokens=12), submit(engine, 8, seed=2, max_tokens=12)
    third = submit(engine, 4, seed=3, max_tokens=2)
    said = run(engine)
    assert old.preemptions == 0 and new.preemptions > 0
    for step in of(events, Step):
        kinds = [op[0] for op in step.ops]
        assert not ("preempt" in kinds and "admit" in kinds)
    for request, length in ((old, 8), (new, 8)):
        assert ids(said[request.number]) == alone(prompt(length, request.number), 12)
    assert ids(said[third.number]) == alone(prompt(4, 3), 2)


def test_a_preempted_request_returns_to_the_front_and_repeats_nothing():
    engine, events = stub_engine(block_size=4, num_blocks=8, max_running=3, prefix_cache=False)
    requests = [submit(engine, 8, seed=i, max_tokens=14) for i in range(1, 4)]
    late = submit(engine, 4, seed=9, max_tokens=2)
    said = run(engine)
    assert sum(r.preemptions for r in requests) > 0
    order = [op[1] for s in of(events, Step) for op in s.ops if op[0] == "admit"]
    assert order.index(late.number) > max(order.index(r.number) for r in requests)
    for request in requests:
        text = "".join(d.text for d in said[request.number])
        assert text == bytes(alone(prompt(8, request.number), 14)).decode()
    finished = {e.request: e for e in of(events, Finished)}
    assert all(finished[r.number].preemptions == r.preemptions for r in requests)
    assert any(e.recomputed_tokens > 0 for e in finished.values())


def test_recomputing_after_preemption_is_no_cache_hit():
    engine, events = stub_engine(block_size=4, num_blocks=7, max_running=2)
    submit(engine, 8, seed=1, max_tokens=16)
    new = submit(engine, 8, seed=2, max_tokens=16)
    run(engine)
    assert new.preemptions > 0
    assert all(e.cached_tokens == 0 for e in of(events, Finished))


def test_lower_priority_numbers_go_first_and_the_worst_is_the_victim():
    engine, events = stub_engine(block_size=4, num_blocks=8, max_running=2, prefix_cache=False)
    low = submit(engine, 8, seed=1, max_tokens=16, priority=5)
    high = submit(engine, 8, seed=2, max_tokens=16, priority=0)
    mid = submit(engine, 4, seed=3, max_tokens=2, priority=1)
    run(engine)
    order = [op[1] for s in of(events, Step) for op in s.ops if op[0] == "admit"]
    assert order[:2] == [high.number, mid.number]
    assert high.preemptions == 0 and order[2] == low.number


def test_static_batching_admits_nobody_until_the_batch_has_drained():
    engine, events = stub_engine(policy="static", max_running=2)
    requests = [submit(engine, 6, seed=i, max_tokens=n) for i, n in enumerate([2, 6, 2, 2])]
    said = run(engine)
    finished_at = {e.request: e.seq for e in of(events, Finished)}
    admitted_at = {op[1]: s.seq for s in of(events, Step) for op in s.ops if op[0] == "admit"}
    first, second, third, fourth = (r.number for r in requests)
    assert admitted_at[third] > max(finished_at[first], finished_at[second])
    assert admitted_at[third] == admitted_at[fourth]
    for i, (request, n) in enumerate(zip(requests, [2, 6, 2, 2], strict=True)):
        assert ids(said[request.number]) == alone(prompt(6, i), n)


# ---- admission


def test_what_can_never_fit_is_refused_with_numbers_and_others_proceed():
    engine, _ = stub_engine(block_size=4, num_blocks=4, max_model_len=1000)
    with pytest.raises(Refused, match=r"20 tokens.*4 blocks of 4 tokens") as refusal:
        submit(engine, 20)
    assert refusal.value.param == "prompt"
    with pytest.raises(Refused, match="at most 9") as refusal:
        submit(engine, 8, max_tokens=20)
    assert refusal.value.param == "max_tokens"
    fits = submit(engine, 8, max_tokens=9)
    assert len(ids(run(engine)[fits.number])) == 9


def test_the_length_limit_is_exact():
    engine, _ = stub_engine(max_model_len=32)
    with pytest.raises(Refused, match="32 tokens"):
        submit(engine, 32, max_tokens=1)
    last = submit(engine, 31, max_tokens=1)
    assert len(ids(run(engine)[last.number])) == 1


def test_an_empty_prompt_is_refused():
    engine, _ = stub_engine()
    with pytest.raises(Refused, match="empty"):
        submit(engine, 0)


def test_a_full_queue_is_busy_and_takes_none_of_a_group():
    engine, _ = stub_engine(max_waiting=3)
    submit(engine)
    submit(engine)
    with pytest.raises(Busy):
        submit(engine, n=2)
    assert len(engine.scheduler.waiting) == 2


# ---- how requests end


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_ends_with_length(max_tokens):
    engine, _ = stub_engine()
    request = submit(engine, max_tokens=max_tokens)
    deltas = run(engine)[request.number]
    assert deltas[-1].finish_reason == "length" and len(ids(deltas)) == max_tokens
    assert deltas[-1].usage.output_tokens == max_tokens


def test_eos_and_stop_ids_end_with_stop_and_are_not_shown():
    expected = alone(prompt(20), 8)
    engine, _ = stub_engine(stop_ids=[expected[3]])
    request = submit(engine)
    deltas = run(engine)[request.number]
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason is None
    assert "".join(d.text for d in deltas) == bytes(expected[:3]).decode()
    engine, _ = stub_engine()
    request = submit(engine, stop_token_ids=[expected[2]])
    deltas = run(engine)[request.number]
    assert deltas[-1].stop_reason == expected[2]
    assert "".join(d.text for d in deltas) == bytes(expected[:2]).decode()


def test_ignore_eos_goes_on():
    expected = alone(prompt(20), 8)
    engine, _ = stub_engine(stop_ids=[expected[3]])
    request = submit(engine, ignore_eos=True)
    assert ids(run(engine)[request.number]) == expected


def test_a_stop_string_ends_the_text_before_it():
    expected = bytes(alone(prompt(20), 8)).decode()
    engine, _ = stub_engine()
    request = submit(engine, stop=[expected[3:5]])
    deltas = run(engine)[request.number]
    assert "".join(d.text for d in deltas) == expected[:3]
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == expected[3:5]


def test_no_stop_string_counts_before_min_tokens():
    expected = bytes(alone(prompt(20), 8)).decode()
    engine, _ = stub_engine()
    request = submit(engine, stop=[expected[1]], min_tokens=4)
    text = "".join(d.text for d in run(engine)[request.number])
    assert len(text) >= 4 and expected.startswith(text)


# ---- abort


def test_abort_in_every_state_gives_the_blocks_back_and_disturbs_nobody():
    engine, events = stub_engine(block_size=4, max_running=2, chunk_size=8, token_budget=16)
    decoding = submit(engine, 4, seed=1, max_tokens=50)
    engine.step()
    mid_prefill = submit(engine, 60, seed=2)
    engine.step()
    waiting = submit(engine, 8, seed=3)
    other = submit(engine, 6, seed=4, max_tokens=5)
    assert mid_prefill.admitted and not mid_prefill.decoding and not waiting.admitted
    for request in (decoding, mid_prefill, waiting):
        assert engine.abort(request.number).finish_reason == "abort"
        assert engine.abort(request.number) is None, "again is harmless"
    assert engine.abort(12345) is None
    assert ids(run(engine)[other.number]) == alone(prompt(6, 4), 5)
    assert engine.abort(other.number) is None, "just finished"
    assert engine.pool.used_count == 0
    again = submit(engine, 4, seed=1, max_tokens=3)
    assert again.id == decoding.id and len(ids(run(engine)[again.number])) == 3
    assert [e.reason for e in of(events, Finished)].count("abort") == 3


def test_an_id_that_looks_like_a_siblings_is_another_request():
    engine, _ = stub_engine()
    (one,) = engine.submit(prompt(4), greedy(3), id="x")
    (other,) = engine.submit(prompt(4), greedy(3), id="x-0")
    group = engine.submit(prompt(4), greedy(3), id="g", n=2)
    assert engine.find("x") == [one.number]
    assert engine.find("x-0") == [other.number]
    assert engine.find("g") == [r.number for r in group] and engine.find("g-1") == [group[1].number]


# ---- n > 1


def test_siblings_share_the_prompt_and_copy_the_block_that_both_write():
    engine, events = stub_engine(block_size=4, prefix_cache=False)
    group = engine.submit(prompt(10), greedy(6), id="g", n=3)
    said = run(engine)
    for request in group:
        assert ids(said[request.number]) == alone(prompt(10), 6)
    copies = [op for s in of(events, Step) for op in s.ops if op[0] == "copy"]
    assert len(copies) == 2
    assert sum(n for s in of(events, Step) for _, n, _ in s.prefill) == 10 + 2, "the prompt was computed once"


def test_a_sibling_whose_leader_is_gone_computes_the_prompt_itself():
    engine, _ = stub_engine(block_size=4, prefix_cache=False)
    leader, follower = engine.submit(prompt(10), greedy(6), id="g", n=2)
    engine.abort(leader.number)
    assert ids(run(engine)[follower.number]) == alone(prompt(10), 6)


# ---- faults and switches


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on():
    engine, events = stub_engine()
    request = submit(engine)
    engine.runner.fail_next = MemoryError("no room for activations")
    (delta,) = engine.step()
    assert delta.finish_reason == "error" and "no room for activations" in delta.message
    assert of(events, Fault) and engine.pool.used_count == 0
    after = submit(engine, seed=1)
    assert ids(run(engine)[after.number]) == alone(prompt(20, 1), 8)
    assert request.done


def test_switches_apply_when_idle_and_say_so_otherwise():
    engine, events = stub_engine(block_size=16)
    submit(engine)
    with pytest.raises(NotIdle, match="block_size"):
        engine.configure({"block_size": 8})
    engine.configure({"chunk_size": 32})
    assert engine.scheduler.config.chunk_size == 32
    run(engine)
    engine.configure({"block_size": 8, "num_blocks": 50, "policy": "static"})
    assert of(events, Configured)[-1].rebuilt and engine.pool.num_blocks == 50
    request = submit(engine)
    assert ids(run(engine)[request.number]) == alone(prompt(20), 8)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"blocksize": 8}, "unknown switch 'blocksize'"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "16"}, "block_size"),
        ({"policy": "greedy"}, "greedy"),
        ({"token_budget": 8}, "token_budget"),
        ({"allocator": "reserve"}, "switch prefix_cache off"),
        ({"allocator": "first-fit", "preemption": "swap"}, "switch prefix_cache off"),
        ({"kv_cache": False}, "prefix_cache must be off"),
        ({"kv_cache": False, "prefix_cache": False, "preemption": "swap"}, "preemption must be recompute"),
        ({"kv_cache": False, "prefix_cache": False}, r"token_budget \(2048\) must be at least max_model_len \(8192\)"),
    ],
)
def test_a_switch_that_cannot_be_is_refused_by_name(changes, says):
    engine, _ = stub_engine()
    before = engine.config
    with pytest.raises(ConfigError, match=says):
        engine.configure(changes)
    assert engine.config == before


def test_memory_in_one_piece_admits_as_many_as_it_has_pieces():
    """Eight blocks: the longest answer may take four of them, these take two."""
    config = {"num_blocks": 8, "block_size": 4, "max_model_len": 16, "prefix_cache": False}
    most = {}
    for allocator in ("reserve", "first-fit", "paged"):
        engine, _ = stub_engine(allocator=allocator, **config)
        requests = [submit(engine, 3, seed=i, max_tokens=5) for i in range(6)]
        engine.step()
        most[allocator] = len(engine.scheduler.running)
        run(engine)
        assert [r.tokens[3:] for r in requests] == [alone(prompt(3, i), 5) for i in range(6)]
    assert most == {"reserve": 2, "first-fit": 4, "paged": 6}


def test_a_swapped_request_goes_on_where_it_was():
    engine, events = stub_engine(block_size=4, num_blocks=7, max_running=2, preemption="swap", prefix_cache=False)
    first, second = submit(engine, 8, seed=1, max_tokens=16), submit(engine, 8, seed=2, max_tokens=16)
    said = run(engine)
    assert [ids(said[r.number]) for r in (first, second)] == [alone(prompt(8, i), 16) for i in (1, 2)]
    ops = [op[:2] for step in of(events, Step) for op in step.ops]
    assert ops.count(["swap_out", second.number]) == ops.count(["swap_in", second.number]) > 0
    assert sum(f.recomputed_tokens for f in of(events, Finished)) == 0
    assert sum(n for s in of(events, Step) for _, n, _ in s.prefill) == 16 + ops.count(["swap_in", second.number])
    moved = [step for step in of(events, Step) if step.swap_bytes]
    assert len(moved) == 2 * ops.count(["swap_in", second.number]) and all(step.move_s > 0 for step in moved)


def test_an_abort_forgets_what_was_swapped_out():
    engine, _ = stub_engine(block_size=4, num_blocks=7, max_running=2, preemption="swap", prefix_cache=False)
    submit(engine, 8, seed=1, max_tokens=16)
    second = submit(engine, 8, seed=2, max_tokens=16)
    while not second.swapped:
        engine.step()
    assert second.saved and not second.table
    engine.abort(second.number)
    run(engine)
    assert engine.pool.used_count == 0


def test_an_idle_engine_has_nothing_to_do():
    engine, events = stub_engine()
    assert engine.idle and engine.step() == [] and events == []


# ---- what the events say


def test_events_are_numbered_without_gaps_and_tell_the_whole_story():
    engine, events = stub_engine(block_size=4, num_blocks=6, max_running=2)
    for i in range(4):
        submit(engine, 8, seed=i, max_tokens=6, user=f"u{i}")
    run(engine)
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    assert [e.user for e in of(events, Queued)] == ["u0", "u1", "u2", "u3"]
    tables: dict[int, list[int]] = {}
    held: dict[int, set[int]] = {}
    for event in events:
        if isinstance(event, Step):
            for kind, request, *blocks in event.ops:
                if kind == "admit":
                    tables[request] = list(blocks)
                elif kind == "alloc":
                    for block in blocks:
                        assert not held.get(block), f"block {block} handed out twice"
                    tables[request] += blocks
                elif kind == "preempt":
                    for block in tables.pop(request):
                        held[block].discard(request)
                    continue
                for block in blocks:
                    held.setdefault(block, set()).add(request)
        if isinstance(event, Finished):
            for block in tables.pop(event.request):
                held[block].discard(event.request)
    assert not any(held.values()) and not tables


def test_defaults_are_a_valid_configuration():
    config = EngineConfig()
    assert config.max_running <= config.token_budget


def test_recomputed_tokens_are_those_computed_twice():
    engine, events = stub_engine(block_size=4, num_blocks=7, max_running=2)
    submit(engine, 8, seed=1, max_tokens=16)
    submit(engine, 8, seed=2, max_tokens=16)
    run(engine)
    computed = sum(n for s in of(events, Step) for _, n, _ in s.prefill)
    decoded = sum(e.output_tokens for e in of(events, Finished))
    finished = of(events, Finished)
    assert sum(e.recomputed_tokens for e in finished) > 0
    # Each request computes all it comes to know but the last token once; anything beyond that is work done again.
    resumes = sum(e.preemptions for e in finished)
    once = sum(e.prompt_tokens + e.output_tokens - 1 for e in finished)
    steps_of_one = decoded - len(finished) - resumes
    assert computed + steps_of_one - once == sum(e.recomputed_tokens for e in finished)
