"""The event files in tests/data/events: what each shows, and how it is made anew.

python -m tests.event_files        (from the project's root)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

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


FILES = {make.__name__: make for make in (sharing, preemption, forks, reconfigured, nonsense)}


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
