"""The engine on hardware that is not here: times are the planner's to the last digit, scheduling is the real one's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.config import ConfigError
from backend.engine.modelled.build import Wanted, build
from backend.engine.modelled.clock import ModelledClock
from backend.events import Finished, Hello, Step
from backend.models.errors import ModelError
from backend.models.plain import PlainTokenizer
from backend.planner import served
from backend.planner.roofline import decode_step
from benchmarks import modelled_against_measured
from tests.engine.stub import greedy, run, stub_engine


class Wall:
    """A wall clock that only moves when somebody sleeps, or is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def modelled(speed: float = 100.0, model: str = "llama-3-70b", gpu: str = "h100-sxm", tp: int = 8, **switches):
    events: list = []
    wanted = Wanted(model=model, gpu=gpu, tp=tp, speed=speed)
    engine, _ = build(wanted, switches, events.append, PlainTokenizer(32_000))
    wall = Wall()
    engine._clock._wall, engine._clock._sleep = wall, wall.sleep
    engine._clock._wall_at = engine._clock._due = wall.now
    engine._clock._at = 10.0  # so that nobody has arrived before the engine began
    return engine, events, wanted.machine()[1]


def steps(events: list) -> list[Step]:
    return [e for e in events if isinstance(e, Step)]


def test_a_single_user_waits_exactly_as_long_as_the_planner_says():
    engine, events, machine = modelled()
    engine.submit(list(range(300, 800)), greedy(20, ignore_eos=True), id="x")
    run(engine)
    prefill, *decodes = steps(events)
    assert prefill.step_s == pytest.approx(machine.step([(500, 0)], 1).estimate_s)
    assert [s.step_s for s in decodes] == pytest.approx([machine.step([(1, 500 + i)], 1).estimate_s for i in range(19)])
    (finished,) = [e for e in events if isinstance(e, Finished)]
    assert finished.tpot_s == pytest.approx(sum(s.step_s for s in decodes) / 19)
    assert finished.ttft_s == pytest.approx(machine.front_s + prefill.step_s)


@pytest.mark.parametrize("speed", [0.5, 1, 100])
def test_speed_changes_the_waiting_and_no_number(speed):
    engine, events, _ = modelled(speed)
    wall = engine._clock._wall
    began = wall()
    for i in range(32):
        engine.submit(list(range(300, 400 + i)), greedy(10 + i, ignore_eos=True), id="x")
    run(engine)
    told = [s.step_s for s in steps(events)]
    assert (wall() - began) * speed == pytest.approx(sum(told))
    other, others, _ = modelled(1)
    for i in range(32):
        other.submit(list(range(300, 400 + i)), greedy(10 + i, ignore_eos=True), id="x")
    run(other)
    assert told == pytest.approx([s.step_s for s in steps(others)])


def test_the_schedule_is_the_real_ones():
    """The same requests through the same switches give the same block moves, whatever computes."""
    switches = {"num_blocks": 40, "block_size": 8, "max_running": 8, "chunk_size": 32, "token_budget": 64}
    real, said = stub_engine(**switches)
    engine, events, _ = modelled(**switches)
    for i in range(12):
        tokens = [40 + (7 * i + j) % 60 for j in range(30 + 5 * i)]
        for one in (real, engine):
            one.submit(list(tokens), greedy(15, ignore_eos=True), id="x")
    run(real)
    run(engine)
    moves = [[(op[0], op[1]) for op in s.ops] for s in steps(events)]
    assert moves == [[(op[0], op[1]) for op in s.ops] for s in steps(said)]
    assert any(op[0] == "preempt" for step in moves for op in step)


def test_the_hello_cannot_be_taken_for_a_measurement():
    engine, events, _ = modelled()
    hello = next(e for e in events if isinstance(e, Hello))
    assert (hello.source, hello.evidence, hello.device.kind) == ("modelled", "modelled", "modelled")
    assert hello.device.name.startswith("8 × ") and "H100" in hello.device.name
    assert hello.model.parameters == pytest.approx(70.6e9, rel=0.01)
    assert "Modelled" in hello.model.notes[0]
    assert engine.idle


def test_what_cannot_be_is_refused_in_words():
    with pytest.raises(ModelError, match="does not fit"):
        modelled(tp=1)
    with pytest.raises(ModelError, match="no model 'llama-99'"):
        modelled(model="llama-99")
    with pytest.raises(ModelError, match="no accelerator 'abacus'"):
        modelled(gpu="abacus")
    with pytest.raises(ModelError, match="speed 1000"):
        modelled(speed=1000)
    with pytest.raises(ConfigError, match="fit beside the weights"):
        modelled(num_blocks=1_000_000)


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=40),
    efficiency=st.sampled_from(["bound", "fast", "typical", "slow"]),
)
def test_no_step_beats_its_bound_and_more_work_never_takes_less(spans, efficiency):
    _, machine = Wanted(model="llama-3-8b", gpu="h100-sxm", efficiency=efficiency).machine()
    time = machine.step(spans, len(spans))
    assert time.estimate_s >= time.bound_s > 0
    longer = machine.step([(new, before + 1) for new, before in spans], len(spans))
    assert longer.bound_s >= time.bound_s


def test_a_step_of_decodes_is_the_plans_decode_step():
    _, machine = Wanted(model="llama-3-8b", gpu="h100-sxm").machine()
    plan = decode_step(machine.arch, machine.weights, machine.kv, machine.accelerator, batch=8, context=1024)
    time = machine.step([(1, 1023)] * 8, 8)
    assert time.bound_s == pytest.approx(plan.value, rel=1e-9)
    assert time.estimate_s > served.costs(machine.arch).memory * plan.value


def test_each_cause_is_in_the_estimate_and_none_in_the_bound():
    """GPUs that exchange wait for each other; prompts are launched kernel by kernel; the band lies around."""

    def step(spans, **more):
        return (
            Wanted(model="llama-3-70b", gpu="h100-sxm", **{"tp": 8, "weights": "fp8"} | more)
            .machine()[1]
            .step(spans, 1)
        )

    decode, prompt = [(1, 500)], [(2, 499)]
    paid = served.costs(Wanted(model="llama-3-70b", gpu="h100-sxm", tp=8).machine()[1].arch)
    one, eight = step(decode, tp=1), step(decode)
    assert eight.estimate_s - one.estimate_s * eight.bound_s / one.bound_s > 2 * 80 * paid.exchange_s
    launched = step(prompt).estimate_s - step(decode).estimate_s
    assert launched == pytest.approx(80 * (paid.launches_s - paid.kernels_s), rel=0.05)
    places = [step(decode, efficiency=where).estimate_s for where in ("bound", "fast", "typical", "slow")]
    assert places == sorted(places) and places[0] == eight.bound_s
    assert places[3] / places[1] == pytest.approx(paid.slow / paid.fast)


def test_a_model_without_keys_and_values_is_played_by_its_states():
    engine, events, machine = modelled(model="mamba-2.8b", tp=1)
    hello = next(e for e in events if isinstance(e, Hello))
    assert hello.model.kv_bytes_per_token == 0 and not engine.config.prefix_cache
    assert any("state of" in note and "Blocks only count tokens" in note for note in hello.model.notes)
    for _ in range(3):
        engine.submit(list(range(300, 400)), greedy(4, ignore_eos=True), id="x")
    run(engine)
    *_, last = steps(events)
    assert last.kv_write_bytes == 0 and last.kv_read_bytes == 3 * machine.arch.states[0].bytes_per_sequence * 64
    with pytest.raises(ConfigError, match="states fit"):
        modelled(model="mamba-2.8b", gpu="rtx-4070-laptop", tp=1, max_running=1024)


@pytest.mark.parametrize("key", ["gpt-oss-120b", "deepseek-r1", "gemma-3-27b"])
def test_models_of_several_kinds_of_layers_are_played_too(key):
    """Latent keys, shared experts, windows: no `ModelShape` can say them, and the planner counts them all the same."""
    events: list = []
    wanted = Wanted(model=key, gpu="b200-sxm", tp=8, weights="fp8")
    engine, _ = build(wanted, {"num_blocks": 64}, events.append, PlainTokenizer(32_000))
    wall = Wall()
    engine._clock._wall, engine._clock._sleep = wall, wall.sleep
    engine._clock._wall_at = engine._clock._due = wall.now
    engine.submit(list(range(300, 400)), greedy(4, ignore_eos=True), id="x")
    run(engine)
    first, *rest = steps(events)
    assert first.flops > 50 * rest[0].flops > 0
    assert all(step.weight_bytes > 0 and step.kv_read_bytes > 0 for step in rest)
    assert rest[1].kv_read_bytes > rest[0].kv_read_bytes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=40))
def test_a_dense_models_step_is_counted_alike_by_its_shape_and_by_its_layers(spans):
    _, machine = Wanted(model="llama-3-8b", gpu="h100-sxm", tp=4).machine()
    of_layers, of_shape = machine.step_cost(spans, len(spans)), machine.arch.shape(2, 2).step_cost(spans, len(spans))
    for name in ("flops", "attention_flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes"):
        assert getattr(of_layers, name) == pytest.approx(getattr(of_shape, name), rel=1e-6), name
    assert machine.kv_bytes_per_token == machine.arch.shape(2, 2).kv_bytes_per_token


def test_the_band_holds_published_measurements():
    """Two rows that are quickly played; `python -m benchmarks.modelled_against_measured` plays all of them."""
    wanted = {"P257": "tpot", "P297": "tpot"}
    found = {row.id: row for row in modelled_against_measured.rows() if row.id in wanted}
    assert set(found) == set(wanted)
    for row in found.values():
        fast, slow = (modelled_against_measured.play(row.inputs, end, rounds=1) for end in ("fast", "slow"))
        assert fast.tpot_ms <= row.measured_ms <= slow.tpot_ms, row.id


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_the_clock_goes_with_the_wall_while_nothing_is_to_do_and_with_the_steps_else():
    wall, idle = Wall(), [True]
    clock = ModelledClock(10.0, lambda: idle[0], wall=wall, sleep=wall.sleep)
    wall.now += 1
    assert clock() == pytest.approx(10)
    idle[0] = False
    wall.now += 5  # somebody computes: no matter how long
    assert clock() == pytest.approx(10)
    clock.spend(2)
    assert clock() == pytest.approx(12)
    wall.now += 3
    assert clock() == pytest.approx(12)
    idle[0] = True
    wall.now += 1
    assert clock() == pytest.approx(22)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(1e-4, 0.5), st.booleans()), max_size=30))
def test_the_clock_never_goes_back(history):
    wall, idle = Wall(), [True]
    clock = ModelledClock(3.0, lambda: idle[0], wall=wall, sleep=wall.sleep)
    last = clock()
    for pause, step, busy in history:
        wall.now += pause
        assert clock() >= last
        last = clock()
        idle[0] = not busy
        if busy:
            clock.spend(step)
            assert clock() == pytest.approx(last + step)
            last = clock()
