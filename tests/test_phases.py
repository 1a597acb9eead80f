"""What limits a phase, folded from steps whose numbers are known."""

from __future__ import annotations

import json

import pytest

from backend import events, phases
from backend.hub import Hub
from backend.telemetry import join
from tests.scripted_engine import ScriptedEngine

KV = 1000  # bytes of a token's keys and values
CEILINGS = {"read": {"value": 10e9}, "matmul": {"value": 100e9}, "copy": {"value": 12e9}}


def step(
    t: float, *, prefill: int = 0, decode: int = 0, step_s: float = 0.1, flops: float = 1e9, **more
) -> events.Step:
    """`prefill` tokens of one prompt and `decode` sequences, in a step that ended at `t`."""
    return events.Step(
        t=t,
        step=int(t * 10),
        prefill=[(1, prefill, 7)] if prefill else [],
        step_s=step_s,
        flops=flops,
        weight_bytes=more.pop("weight_bytes", 500_000_000),
        kv_write_bytes=KV * (prefill + decode),
        **more,
    )


def rows(*steps: events.Step) -> list[join.StepRow]:
    return [join.row(s, KV) for s in steps]


def test_phases_are_told_apart_and_each_is_summed_by_itself():
    found = phases.message(
        "e",
        1.0,
        rows(
            step(0.2, prefill=64, flops=8e9, forward_s=0.09),
            step(0.4, decode=4, kv_read_bytes=4 * 50 * KV),
            step(0.6, decode=4, kv_read_bytes=4 * 70 * KV),
            step(0.8, decode=3, prefill=10),
        ),
        {},
        KV,
    )
    assert {phase: s.steps for phase, s in found.phases.items()} == {"prefill": 1, "decode": 2, "mixed": 1}
    assert found.phases["prefill"].tokens == 64
    decode = found.phases["decode"]
    assert (decode.batch, decode.context, decode.tokens) == (4, 60, 8)
    assert decode.seconds == pytest.approx(0.2)
    assert found.phases["mixed"].batch == 0


def test_the_parts_of_a_step_add_up_to_its_time():
    one = step(
        1.0, decode=1, step_s=0.1, schedule_s=0.01, build_s=0.02, forward_s=0.05, attention_s=0.015, sample_s=0.003,
        output_s=0.002,
    )  # fmt: skip
    found = phases.summary(rows(one), None, KV)
    assert sum(found.parts.values()) == pytest.approx(0.1)
    assert found.parts["linear"] == pytest.approx(0.035)
    assert found.parts["unattributed"] == pytest.approx(0.015)
    assert found.attention_measured and found.verdict is None


@pytest.mark.parametrize(
    ("more", "regime"),
    [
        ({"weight_bytes": 900_000_000, "flops": 1e9}, "memory"),  # 90 ms for bytes, 10 ms for FLOPs, of 100 ms
        ({"weight_bytes": 100_000_000, "flops": 8e9}, "compute"),
        ({"weight_bytes": 100_000_000, "flops": 1e9}, "overhead"),
    ],
)
def test_verdicts_follow_the_rule(more, regime):
    verdict = phases.summary(rows(step(1.0, decode=1, **more)), CEILINGS, KV).verdict
    assert verdict.regime == regime
    assert verdict.rule and verdict.words.startswith(regime)


def test_a_summary_is_about_the_newest_steps_only():
    old = [step(t / 10, decode=1, flops=1e6) for t in range(1, 60)]
    new = [step(6 + t / 10, decode=8, flops=1e9) for t in range(phases.NEWEST)]
    assert phases.message("e", 10.0, rows(*old, *new), {}, KV).phases["decode"].batch == 8


def test_the_trail_weighs_steps_by_their_time_and_ends_after_a_while():
    found = phases.trail(
        rows(
            step(0.1, decode=1, flops=2e9, step_s=0.1),
            step(0.4, decode=1, flops=2e9, step_s=0.3),
            step(5.0, prefill=5, flops=5e9),
        )
    )
    assert [(phase, y) for _, phase, _, y in found] == [("decode", 1e10), ("prefill", 5e10)]
    old, new = step(1.0, decode=1), step(1.1 + phases.TRAIL_S, decode=1)
    assert len(phases.message("e", new.t, rows(old, new), {}, KV).trail) == 1


class Clock:
    """`time.monotonic` that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phases.time, "monotonic", clock)
    return clock


def scripted(hub: Hub, epoch: str = "one", **options) -> ScriptedEngine:
    engine = ScriptedEngine(hub.publish, blocks=64, running=6, seed=4, epoch=epoch, **options)
    engine.hello()
    return engine


def run(engine: ScriptedEngine, steps: int) -> None:
    for _ in engine.run(steps):
        pass


def test_each_step_counts_once_however_often_somebody_asks(clock):
    hub = Hub()
    engine = scripted(hub)
    found = phases.Phases(hub)
    seen = set()
    for _ in range(6):
        run(engine, 7)
        clock.now += 1
        told = json.loads(found.message())
        assert found.message() is found.message()  # nothing is computed again within a quarter of a second
        seen.add(len(found._rows))
    steps = hub.read(lambda state: [row for row in state.series])
    assert len(found._rows) == len(steps) == 42 and len(seen) == 6
    assert told["type"] == "phases" and told["epoch"] == "one"
    assert sum(row.tokens for row in found._rows) == sum(row[2] + row[3] for row in steps)


def test_what_was_before_somebody_asked_is_found_in_the_history(clock):
    hub = Hub(max_lines=60)
    run(scripted(hub), 200)
    told = json.loads(phases.Phases(hub).message())
    assert sum(s["steps"] for s in told["phases"].values()) > 10
    assert told["chunk"][0] > 1


def test_another_engine_begins_anew(clock):
    hub = Hub()
    found = phases.Phases(hub)
    run(scripted(hub), 30)
    found.message()
    clock.now += 1
    scripted(hub, epoch="two")
    told = json.loads(found.message())
    assert told["epoch"] == "two" and told["phases"] == {} and told["trail"] == []


def test_readings_are_held_against_the_steps_of_the_device_that_computes(clock):
    hub = Hub()
    engine = scripted(hub)
    power = events.Sensor(name="power", unit="W", source="nvml", label="measured: NVML", span_s=0.0)
    other = events.Device(uuid="GPU-0", sensors=[power])
    mine = events.Device(uuid="GPU-1", used=True, sensors=[power])
    engine.report(events.Devices(devices=[other, mine]))
    for _ in engine.run(150):
        engine.report(events.Sample(device=0, t0=engine.t - 0.02, values=[999.0]))
        engine.report(events.Sample(device=1, t0=engine.t - 0.02, values=[100.0]))
    told = json.loads(phases.Phases(hub).message())["window"]["phases"]
    decode = max(told.values(), key=lambda phase: phase["seconds"])
    assert decode["joules_per_token"]["value"] * decode["tokens"] == pytest.approx(100 * decode["seconds"], rel=0.05)
    assert decode["measured"]["value"] is None and decode["measured"]["reason"]


def test_an_engine_that_was_never_heard_gives_an_empty_message():
    told = json.loads(phases.Phases(Hub(), lambda epoch: {"state": "unknown"}).message())
    assert told["phases"] == {} and told["roofs"] == {"state": "unknown"}


# foreign engines


def scraped(t: float, flops: float | None, read: float = 2e9, written: float = 5e8, **fields) -> events.Scrape:
    told = {"flops_per_s": flops, "read_bytes_per_s": read, "write_bytes_per_s": written}
    values = {
        name: events.Value(value=value, name=f"x:{name}", quality="estimated" if value else "absent")
        for name, value in told.items()
    }
    return events.Scrape(t=t, values=values, **{"window_s": 1.0, **fields})


def test_what_a_foreign_engine_estimates_becomes_a_point(clock):
    hub = Hub()
    model = events.ModelInfo(name="m")
    told = [
        events.Hello(epoch="e", source="vllm", model=model, device=events.DeviceInfo(), block_size=0, num_blocks=0),
        scraped(1.0, 1e10),
        scraped(2.0, 4e10),
        scraped(3.0, None),  # the flag is off
        scraped(4.0, 1e9, window_s=0.0),  # the first after a restart
        scraped(5.0, 0.0),  # idle
    ]
    for seq, event in enumerate(told, 1):
        event.seq = seq
        hub.publish(event)
    found = phases.Phases(hub, lambda epoch: {"state": "unknown", "text": "nobody measured it"})
    message = json.loads(found.message())
    assert message["trail"] == [[1.0, "estimated", 4.0, 1e10], [2.0, "estimated", 16.0, 4e10]]
    assert message["phases"] == {} and message["roofs"]["text"] == "nobody measured it"
    one = message["estimate"]
    assert (one["window_s"], one["flops_per_s"], one["bytes_per_s"], one["flop_per_byte"]) == (1.0, 4e10, 2.5e9, 16.0)
    assert one["series"][0] == "x:flops_per_s"


def test_an_engine_of_our_own_has_no_estimate():
    assert phases.message("e", 1.0, rows(step(1.0, decode=1)), {}, KV).estimate is None
    assert phases.estimate(events.Scrape(window_s=1.0)) is None
