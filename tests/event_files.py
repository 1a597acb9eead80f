"""The event files in tests/data/events: what each shows, and how it is made anew.

python -m tests.event_files        (from the project's root)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from backend import events
from tests.scripted_engine import ScriptedEngine

FOLDER = Path(__file__).parent / "data" / "events"


def sharing(emit: Callable[[events.Event], None]) -> None:
    """A long shared prompt, roomy pool: many holders a block, cached blocks found again."""
    engine = ScriptedEngine(emit, blocks=200, running=10, prompt=(40, 70), output=(5, 30), shared_tokens=40, seed=1)
    engine.hello()
    _run(engine, 120)


def preemption(emit: Callable[[events.Event], None]) -> None:
    """A pool that is far too small: preemptions, evictions, work done twice."""
    engine = ScriptedEngine(
        emit, blocks=24, running=8, prompt=(8, 60), output=(20, 60), shared_tokens=16, fork_share=0, seed=2
    )
    engine.hello()
    _run(engine, 220)


def forks(emit: Callable[[events.Event], None]) -> None:
    """Siblings that share a prompt and copy its last block on write; aborts in every state; blocks of 5 tokens."""
    engine = ScriptedEngine(
        emit,
        blocks=80,
        running=6,
        block_size=5,
        prompt=(3, 40),
        output=(2, 25),
        shared_tokens=10,
        fork_share=0.5,
        abort_share=1.0,
        seed=3,
    )
    engine.hello()
    for i, _ in enumerate(engine.run(160)):
        if i % 9 == 0 and engine.waiting:
            engine.abort(engine.waiting[-1])
    engine.drain()


def reconfigured(emit: Callable[[events.Event], None]) -> None:
    """Idle, cleared, rebuilt with other blocks, no prefix cache, and a new epoch at the end."""
    engine = ScriptedEngine(emit, blocks=64, running=4, prompt=(10, 50), output=(3, 12), seed=4)
    engine.hello()
    _run(engine, 40)
    engine.clear()
    _run(engine, 20)
    engine.reconfigure(blocks=40, block_size=8)
    _run(engine, 40)
    emit(events.Fault(seq=engine.seq + 1, t=engine.t, message="a made-up fault"))
    again = ScriptedEngine(emit, blocks=30, running=3, prefix_cache=False, prompt=(4, 20), seed=5, epoch="second")
    again.hello()
    for _ in again.run(30):
        pass


def sensors(emit: Callable[[events.Event], None]) -> None:
    """Two devices that are read, one is lost and comes back with other sensors; more samples than are kept."""
    lots = random.Random(8)
    engine = ScriptedEngine(emit, blocks=20, running=2, prompt=(4, 20), output=(3, 9), seed=9)
    engine.hello()
    power = events.Sensor(name="power", unit="W", source="nvml_field", label="measured: NVML", period_s=0.2, span_s=0)
    none = events.Sensor(name="energy", unit="J", note="not available: this GPU counts no energy")
    gpu = events.Device(uuid="GPU-1", name="One", used=True, memory_bytes=2**34, sensors=[power, none])
    host = events.Device(uuid="host", kind="host", sensors=[events.Sensor(name="load", unit="1", source="proc")])

    def sample(device: int, *values: float | None, **fields: object) -> None:
        engine.report(events.Sample(device=device, t0=engine.t - 0.2, values=list(values), **fields))

    def read(steps: int, a_step: int = 1) -> None:
        for _ in engine.run(steps):
            for i in range(a_step):
                sample(0, lots.randint(60, 400), None, spans=[0.1, None] if i % 4 == 0 else None)
                sample(1, lots.randint(0, 2))
            sample(lots.randint(-1, 3), 1.0, 2.0, 3.0)  # belongs to nothing that was told

    sample(0, 1.0, 2.0)
    engine.report(events.Devices(devices=[gpu, host]))
    read(30)
    lost = msgspec.structs.replace(gpu, state="lost", notes=["lost: it fell off the bus"])
    engine.report(events.Devices(devices=[lost, host], message="one GPU is lost"))
    read(30)
    back = msgspec.structs.replace(gpu, sensors=[none, power], processes=[events.Process(pid=7, memory_bytes=5)])
    engine.report(events.Devices(devices=[back, host]))
    read(24, 13)
    engine.report(events.Devices(state="absent", message="no NVIDIA driver was found"))
    read(3)


def policies(emit: Callable[[events.Event], None]) -> None:
    """The real scheduler's other ways: swap with and without a prefix cache, no KV cache, memory in one piece."""
    from tests.engine.stub import greedy, prompt, stub_engine  # late: it imports torch

    lots, told = random.Random(10), []
    small = {"num_blocks": 14, "block_size": 4, "max_running": 5, "token_budget": 96, "chunk_size": 9}
    engine, made = stub_engine(max_model_len=80, preemption="swap", **small)
    config = msgspec.structs.asdict(engine.config)
    hello = events.Hello(
        epoch="policies", model=events.ModelInfo(name="stub"), device=events.DeviceInfo(), block_size=4, num_blocks=14,
        config=config,
    )  # fmt: skip
    engine.report(hello)
    plain = {"prefix_cache": False, "preemption": "recompute"}
    for changes in (
        {},
        {"prefix_cache": False},
        plain | {"kv_cache": False},
        plain | {"kv_cache": True, "allocator": "first-fit", "num_blocks": 30},
        {"allocator": "reserve"},
    ):
        engine.configure(changes)
        for step in range(24):
            if lots.random() < 0.8 and step < 16:
                tokens = prompt(lots.choice([0, 8, 16])) + prompt(lots.randrange(1, 16), lots.randrange(99))
                engine.submit(tokens, greedy(lots.randrange(1, 20)), id=f"{step}")
            if engine._requests and lots.random() < 0.03:
                engine.abort(lots.choice(list(engine._requests)))
            engine.step()
        while not engine.idle:
            engine.step()
        told += made
        made.clear()
    # The clock of this machine would make another file every time.
    for counter, event in enumerate(told):
        event.t = counter / 128
        for name in event.__struct_fields__:
            if name.endswith("_s") and getattr(event, name) is not None:
                setattr(event, name, 1 / 256)
        emit(event)


def attached(emit: Callable[[events.Event], None]) -> None:
    """A foreign engine: scrapes with and without gauges, cells that come and go, requests of our own, a restart."""
    lots = random.Random(11)
    told = 0

    def tell(event: events.Event) -> None:
        nonlocal told
        told += 1
        event.seq, event.t = told, told / 8
        emit(event)

    def hello(epoch: str) -> None:
        tell(
            events.Hello(
                epoch=epoch, source="vllm", model=events.ModelInfo(name="m", kv_bytes_per_token=100),
                device=events.DeviceInfo(kind="unknown"), block_size=32, num_blocks=63,
            )
        )  # fmt: skip
        view = events.View(view="roofline", quality="estimated", why="counters", flag="--enable-mfu-metrics")
        tell(events.Capabilities(kind="vllm", version="0.32.0", views=[view]))

    def scrape(second: int) -> events.Scrape:
        values = {
            "running": events.Value(value=lots.randint(0, 9), name="vllm:num_requests_running"),
            "waiting": events.Value(value=lots.randint(0, 5)),
            "used_blocks": events.Value(value=lots.randint(0, 70), quality="derived"),
            "output_tokens_per_s": events.Value(value=lots.randint(0, 4000) / 7),
            "prompt_tokens_per_s": events.Value(value=lots.randint(0, 4000) / 3),
            "prefix_queries_per_s": events.Value(value=lots.randint(0, 400) / 11),
            "prefix_hits_per_s": events.Value(value=lots.randint(0, 40) / 13),
            "preemptions": events.Value(value=second),
            "ttft_p95_s": events.Value(value=0.3, low=0.25, high=0.5, quality="derived"),
            "flops_per_s": events.Value(quality="absent", note="not switched on"),
        }
        if second % 3 == 0:
            values["prompt_tokens_computed_per_s"] = events.Value(value=lots.randint(0, 900) / 9)
        if second % 7 == 6:  # an engine that has lost its gauges
            values = {"running": events.Value(quality="absent", note="it was not exported")}
        rows = [events.EngineRow(labels={"engine": str(i)}, running=i, kv_usage=None) for i in range(second % 3)]
        return events.Scrape(values=values, window_s=1.003 if second else 0.0, scrape_s=0.04, by_engine=rows, unknown=3)

    number, said, cells = 0, {}, set()
    for epoch in ("first", "second"):
        hello(epoch)
        said.clear(), cells.clear()
        for second in range(60):
            tell(scrape(second))
            if second % 25 == 24:
                tell(events.Resident(cleared=True))
                cells.clear()
            gone = {cell for cell in cells if lots.random() < 0.1}
            new = {lots.randrange(-1, 70) for _ in range(9)} - cells
            cells = cells - gone | new
            tell(events.Resident(removed=sorted(gone), stored=sorted(new)))
            if lots.random() < 0.6:
                number += 1
                said[number] = (0, 0, None)
                tell(events.Queued(request=number, id=f"r{number}", prompt_tokens=lots.choice([0, 90]), max_tokens=64))
            for request, (prompt, output, first) in list(said.items()):
                first = first or (told / 8 if lots.random() < 0.7 else None)
                said[request] = (prompt or lots.choice([0, 90]), output + (lots.randint(0, 9) if first else 0), first)
            tell(events.Heard(requests=[(request, *how) for request, how in said.items()] + [(999, 1, 1, 0.5)]))
            for request in [request for request in said if lots.random() < 0.2]:
                prompt, output, _ = said.pop(request)
                reason = lots.choice(["stop", "length", "abort", "error"])
                tell(events.Finished(request=request, reason=reason, prompt_tokens=prompt, output_tokens=output))


def nonsense(emit: Callable[[events.Event], None]) -> None:
    """Half of the lines lost, requests and blocks that do not exist: to be borne, alike in both languages."""
    lots = random.Random(6)

    def lossy(event: events.Event) -> None:
        if isinstance(event, events.Hello) or lots.random() < 0.5:
            if isinstance(event, events.Step) and lots.random() < 0.3:
                event.ops = event.ops + [["alloc", lots.randint(0, 60), lots.randint(-2, 70)], ["copy", 1, 2, 3]]
                event.decode = [lots.randint(0, 60) for _ in range(4)]
                event.sealed = event.sealed + [lots.randint(-3, 90)]
            emit(event)

    engine = ScriptedEngine(lossy, blocks=48, running=6, prompt=(6, 50), output=(4, 40), seed=7)
    engine.hello()
    _run(engine, 150)


FILES = {
    make.__name__: make for make in (sharing, preemption, forks, reconfigured, sensors, policies, attached, nonsense)
}


def read(name: str) -> Iterator[events.Event]:
    for line in (FOLDER / f"{name}.ndjson").read_bytes().splitlines():
        yield events.decode(line)


def _run(engine: ScriptedEngine, steps: int) -> None:
    for _ in engine.run(steps):
        pass
    engine.drain()


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in FILES.items():
        lines: list[bytes] = []
        make(lambda event: lines.append(events.encode(event)))  # noqa: B023  called within the loop
        (FOLDER / f"{name}.ndjson").write_bytes(b"\n".join(lines) + b"\n")


if __name__ == "__main__":
    main()
