"""Tables and words of the phases page and the hardware page say what the state and the messages say."""

from __future__ import annotations

import msgspec

from backend import events, fold, phases
from backend.hub import Hub
from pages.widgets import hardware
from pages.widgets import phases as widgets
from tests.scripted_engine import ScriptedEngine


def test_a_phase_is_a_row_with_the_same_numbers():
    hub = Hub()
    engine = ScriptedEngine(hub.publish, blocks=64, running=6, seed=2)
    engine.hello()
    for _ in engine.run(80):
        pass
    ceilings = {"read": {"value": 1e10}, "matmul": {"value": 1e11}}
    told = msgspec.json.decode(phases.Phases(hub, lambda epoch: {"ceilings": ceilings}).message())
    frame = widgets.phases_table(told).set_index("phase")
    assert set(frame.index) == set(told["phases"])
    for phase, summary in told["phases"].items():
        assert frame["steps"][phase] == summary["steps"]
        assert frame["verdict"][phase] == summary["verdict"]["regime"]
        parts = sum(frame[f"{name} (ms)"][phase] for name in phases.PARTS)
        assert abs(parts - frame["ms a step"][phase]) < 0.01
    assert widgets.phases_table({}).empty


def test_the_grouping_formula_has_this_models_values():
    state = fold.State()
    assert widgets.grouping(state) is None
    state.model = events.ModelInfo(
        name="m", layers=30, heads=9, kv_heads=3, head_dim=64, kv_bytes_per_token=2 * 30 * 3 * 64 * 4
    )
    formula, frame = widgets.grouping(state)
    assert "2 · 9 ÷ (3 · 4 B)" in formula and "1.50" in formula
    own = frame[frame["keys and values"].str.contains("this model")]
    assert own["FLOP/byte"].tolist() == [1.5]
    assert frame["FLOP/byte"].iloc[-1] == 241.78  # absorbed latent attention of DeepSeek-V3


def machine() -> fold.State:
    power = events.Sensor(name="power", unit="W", source="nvml", label="measured: NVML, at this moment")
    energy = events.Sensor(name="energy", unit="J", label="not available: needs Volta", note="needs Volta")
    state = fold.State(t=10.0)
    state.devices.devices = [
        events.Device(uuid="GPU-1", name="Old", fake=True, sensors=[power, energy]),
        events.Device(uuid="host", kind="host", used=True, sensors=[power]),
    ]
    state.samples = [[8.0, 7.8, 0, [120.0, None], None], [9.0, 8.8, 0, [130.0, None], None]]
    return state


def test_every_reading_is_a_row_and_a_missing_one_has_no_value():
    frame = hardware.readings(machine())
    assert frame["reading"].tolist() == ["power", "energy", "power"]
    assert frame["value"][0] == 130.0 and frame["age (s)"][0] == 1.0
    assert frame["value"].isna().tolist() == [False, True, True]
    assert frame["label"][1] == "not available: needs Volta"
    assert list(hardware.readings(fold.State()).columns) == list(frame.columns)


def test_a_reading_that_failed_has_no_value_left():
    state = machine()
    state.devices.devices[0].sensors[0].note = "no answer at the moment: timeout"
    assert hardware.readings(state)["value"].isna().all()


def test_where_the_engine_computes():
    state = machine()
    assert hardware.has_gpu(state) and not hardware.computes_on_gpu(state)
    state.devices.devices[0].used = True
    assert hardware.computes_on_gpu(state)
    assert not hardware.has_gpu(fold.State()) and not hardware.computes_on_gpu(fold.State())
