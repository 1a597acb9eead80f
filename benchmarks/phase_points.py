"""Where prefill and decode lie on this machine's roofline: shapes run as the phases page runs them.

    python benchmarks/phase_points.py [--rounds 3] [--model smollm2-135m] [--out FILE]

Each shape is run `--rounds` times on an idle engine; its prefill-only and its full-batch decode steps are summed, and
the rounds' spread is stated. The ceilings are measured first, in the same engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from backend.phases import events, join, summary  # noqa: E402
from backend.sources import open_source  # noqa: E402
from backend.workload.shape_run import Shape, body  # noqa: E402

SHAPES = [Shape(1, 64), Shape(1, 512), Shape(1, 2048), Shape(8, 64), Shape(8, 512), Shape(32, 64), Shape(32, 512)]
WAIT_S = 900.0
LINE = (
    "{batch:>4} × {context:<5} {phase:8} {flop_per_byte:10.2f} {gflop_per_s:9.1f} {ms_per_token:9.2f}  ±{spread:4.0%}"
    "   {regime}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=1 << 20, help="shapes of more tokens than this are left out")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    source = open_source({"model": asked.model, "num_blocks": 2048})
    try:
        report = run(source, asked.rounds, [s for s in SHAPES if s.batch * s.context <= asked.largest])
    finally:
        source.close()
    out = asked.out or ROOT / "benchmarks" / "results" / f"phases-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(out)


def run(source, rounds: int, shapes: list[Shape]) -> dict:
    wait(lambda: source.status.phase == "ready", source)
    ceilings = source.client.measure_ceilings()
    ridge = ceilings["matmul"]["value"] / ceilings["read"]["value"]
    model, device = source.hub.read(lambda state: (state.model.name, state.device.name))
    print(f"{model} on {device}: ridge {ridge:.2f} FLOP/byte")
    print(f"{'shape':>12} {'phase':8} {'FLOP/byte':>10} {'GFLOP/s':>9} {'ms/token':>9}  spread   verdict")
    rows = []
    for shape in shapes:
        found: dict[str, list] = {}
        for _ in range(rounds):
            for phase, told in one(source, shape, ceilings).items():
                found.setdefault(phase, []).append(told)
        for phase, runs in found.items():
            rows.append(row(shape, phase, runs))
            print(LINE.format(**rows[-1]), flush=True)
    return {"model": model, "device": device, "ridge": ridge, "ceilings": ceilings, "rounds": rounds, "rows": rows}


def one(source, shape: Shape, ceilings: dict) -> dict:
    """Summaries of the prefill-only steps and of the decode steps with all sequences, of one run of the shape."""
    hub = source.hub
    before, vocab, kv = hub.read(lambda state: (state.seq, state.model.vocab, state.model.kv_bytes_per_token))
    source.client.complete(**body(shape, vocab))
    wait(lambda: hub.read(lambda state: state.in_flight == 0 and state.seq > before), source)
    lines = [line for line in hub.lines_since(before) or [] if line.startswith(b'{"type":"step"')]
    rows = [join.row(step, kv) for step in map(events.decode, lines) if step.flops]
    chosen = {
        "prefill": [r for r in rows if r.phase == "prefill"],
        "decode": [r for r in rows if r.phase == "decode" and r.tokens == shape.batch],
    }
    return {phase: summary(mine, ceilings, kv) for phase, mine in chosen.items() if mine}


def row(shape: Shape, phase: str, runs: list) -> dict:
    rates = [s.flops / s.seconds for s in runs]
    middle = runs[rates.index(statistics.median_low(rates))]
    moved = middle.weight_bytes + middle.kv_read_bytes + middle.kv_write_bytes + middle.activation_bytes
    return {
        "batch": shape.batch,
        "context": shape.context,
        "phase": phase,
        "flop_per_byte": middle.flops / moved,
        "gflop_per_s": middle.flops / middle.seconds / 1e9,
        "gb_per_s": moved / middle.seconds / 1e9,
        "ms_per_token": 1e3 * middle.seconds / middle.tokens,
        "spread": (max(rates) - min(rates)) / (2 * statistics.median(rates)),
        "regime": middle.verdict.regime,
        "mbu": middle.verdict.mbu,
        "mfu": middle.verdict.mfu,
        "steps": middle.steps,
    }


def wait(condition, source) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        if source.status.phase in ("refused", "dead") or time.monotonic() > end:
            raise SystemExit(source.status.message or "the engine did not become ready in time")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
