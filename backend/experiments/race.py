"""Lanes on one clock: each is a run of the real engine, one after the other, and all are shown together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import pandas as pd

from backend.events import Finished, Step
from backend.experiments import Experiment, ExperimentError, Number, Partial, Progress, Result
from backend.experiments.bench import Ask, Bench
from backend.experiments.races import Course, Kind, Size, course
from backend.sources.remote import EngineClient

NAME = "race"
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Settings:
    kind: Kind = "cache"
    size: Size = "small"
    seed: int = 0

    def check(self) -> None:
        if self.kind not in KINDS:
            raise ExperimentError(f"there is no race '{self.kind}'; there are {', '.join(KINDS)}")
        if self.size not in get_args(Size):
            raise ExperimentError(f"there is no size '{self.size}'; there are {', '.join(get_args(Size))}")


@dataclass
class _Lane:
    points: list[dict[str, float]] = field(default_factory=list)  # one a step
    finished: list[Finished] = field(default_factory=list)
    end_waste: list[float] = field(default_factory=list)  # share of what a request held at its end that it never filled
    seconds: float = 0.0
    given: int = 0  # slots, summed over the steps
    wasted: int = 0  # of those, not filled
    swap_bytes: int = 0
    move_s: float = 0.0
    recomputed: int = 0
    preemptions: int = 0
    over: bool = False


def race(client: EngineClient, settings: Settings) -> Experiment:
    settings.check()
    track = course(settings.kind, settings.size)
    names = list(track.lanes)
    lanes: dict[str, _Lane] = {}
    with Bench(client, track.lanes[names[0]]) as bench:
        asks = track.asks(bench.alphabet, settings.seed)
        each, started = sum(ask.max_tokens for ask in asks), time.monotonic()
        for index, name in enumerate(names):
            bench.configure(track.lanes[name])
            lanes[name] = lane = _Lane()
            shown = 0.0
            for said in _drive(bench, asks, track, lane):
                done = index * each + said
                took = time.monotonic() - started
                # Lanes differ in speed, that is what the race is about: only a rough guess of the time left.
                yield Progress(
                    done, each * len(names), took * (each * len(names) - done) / done if done else None, name
                )
                if took - shown > 0.5:
                    shown = took
                    yield Partial(_result(settings, track, lanes, bench))
            yield Partial(_result(settings, track, lanes, bench))
    return _result(settings, track, lanes, bench)


def _drive(bench: Bench, asks: list[Ask], track: Course, lane: _Lane) -> Iterator[int]:
    """Runs a lane; yields output tokens so far."""
    totals = bench.state.totals
    at_start = (totals.output_tokens, totals.recomputed_tokens, totals.preemptions)
    odometers = {"tokens computed": 0, "output tokens": 0}
    batches = [[ask] for ask in asks] if track.one_by_one else [asks]
    begin = None
    for batch in batches:
        run = bench.start(batch)
        for event in bench.watch(run):
            if isinstance(event, Step):
                begin = event.t - event.step_s if begin is None else begin
                _count(bench, event, lane, odometers, begin)
            elif isinstance(event, Finished):
                lane.finished.append(event)
            totals = bench.state.totals
            yield totals.output_tokens - at_start[0]
    lane.recomputed = totals.recomputed_tokens - at_start[1]
    lane.preemptions = totals.preemptions - at_start[2]
    lane.over = True


def _count(bench: Bench, step: Step, lane: _Lane, odometers: dict[str, int], begin: float) -> None:
    """One more row of the lane, after a step."""
    state = bench.state
    prefill = sum(tokens for _, tokens, _ in step.prefill)
    newest = state.series[-1]
    odometers["tokens computed"] += prefill + int(newest[3])
    odometers["output tokens"] += int(newest[10])
    lane.swap_bytes += step.swap_bytes
    lane.move_s += step.move_s
    lane.seconds = step.t - begin
    pool, size = state.pool, state.block_size
    given = pool.used_blocks * size
    lane.given += given
    lane.wasted += pool.wasted_slots
    free = [owners == () for owners in state.blocks.owners]
    lane.points.append(
        {
            "time (s)": lane.seconds,
            **odometers,
            "running": len(state.running),
            "waiting": step.waiting,
            "slots given out": given,
            "slots filled": pool.filled_slots,
            "slots wasted": pool.wasted_slots,
            "wasted so far (%)": 100 * lane.wasted / lane.given if lane.given else 0.0,
            "free blocks": sum(free),
            "largest hole (blocks)": _longest(free),
            "swapped (MB)": lane.swap_bytes / 1e6,
            "recomputed tokens": state.totals.recomputed_tokens,
        }
    )
    # Who says its last token in this step has its K and V filled as far as they ever will be.
    for number in state.running:
        request = state.requests[number]
        if request.output_tokens >= request.max_tokens and request.table:
            lane.end_waste.append(1 - request.computed / (len(request.table) * size))


def _longest(free: list[bool]) -> int:
    longest = run = 0
    for is_free in free:
        run = run + 1 if is_free else 0
        longest = max(longest, run)
    return longest


def _result(settings: Settings, track: Course, lanes: dict[str, _Lane], bench: Bench) -> Result:
    ran = {name: lane for name, lane in lanes.items() if lane.points}
    rows = [_row(name, lane, track) for name, lane in ran.items()]
    points = pd.DataFrame([{"lane": name, **point} for name, lane in ran.items() for point in lane.points])
    notes = [
        track.question,
        *track.facts,
        "Each lane is a run of the real engine, one after the other, on the same requests; shown on one clock.",
    ]
    if bench.strangers:
        notes.append(f"{bench.strangers} requests of others came in meanwhile: these numbers are not clean.")
    over = all(name in lanes and lanes[name].over for name in track.lanes)
    numbers = _numbers(settings.kind, rows, track) if over else []
    return Result(
        NAME, pd.DataFrame(rows), numbers, notes, {"lanes": points}, asdict(settings), dict(bench.machine)
    )  # fmt: skip


def _row(name: str, lane: _Lane, track: Course) -> dict[str, Any]:
    last = lane.points[-1]
    row: dict[str, Any] = {
        "lane": name,
        "time (s)": lane.seconds,
        "tokens computed": last["tokens computed"],
        "output tokens": last["output tokens"],
    }
    if track.expected:
        row["tokens computed, expected"] = track.expected[name]
    if len(track.lanes) == 3:
        waiting = [p for p in lane.points if p["waiting"]]
        torn = [p["largest hole (blocks)"] / p["free blocks"] for p in waiting if p["free blocks"]]
        pool = statistics.fmean(p["free blocks"] for p in waiting) if waiting else 0.0
        row |= {
            "wasted over the run (%)": last["wasted so far (%)"],
            "wasted at a request's end (%)": 100 * statistics.fmean(lane.end_waste) if lane.end_waste else None,
            "free while others wait (blocks)": pool,
            "largest hole ÷ free, mean": statistics.fmean(torn) if torn else None,
            "most at once": max(p["running"] for p in lane.points),
        }
    if lane.preemptions or "recompute" in track.lanes:
        row |= {
            "preemptions": lane.preemptions,
            "recomputed tokens": lane.recomputed,
            "swapped (MB)": lane.swap_bytes / 1e6,
            "moving K and V (ms)": lane.move_s * 1e3,
        }
    if track.one_by_one and len(lane.finished) > 1:
        after = lane.finished[1:]
        row |= {
            "prompt tokens": sum(f.prompt_tokens for f in after),
            "found in the cache": sum(f.cached_tokens for f in after),
            "median TTFT (ms)": 1e3 * statistics.median(f.ttft_s for f in after),
        }
    return row


def _numbers(kind: Kind, rows: list[dict[str, Any]], track: Course) -> list[Number]:
    by = {row["lane"]: row for row in rows}
    if kind == "cache":
        without, cached = by["no cache"], by["cache"]
        source = "tokens of all steps, counted by the engine's events"
        return [
            Number("computed without a cache", without["tokens computed"], "tokens", "measured", source),
            Number("computed with one", cached["tokens computed"], "tokens", "measured", source),
            Number("times less", without["tokens computed"] / cached["tokens computed"], "×", "measured", source),
            Number("times faster", without["time (s)"] / cached["time (s)"], "×", "measured", "time of the lanes"),
        ]
    if kind == "memory":
        source = "slots given out and not filled ÷ slots given out, both summed over the steps of the lane"
        return [
            Number(f"{name}: wasted", row["wasted over the run (%)"], "%", "measured", source)
            for name, row in by.items()
        ] + [
            Number(
                "reserve: at a request's end", by["reserve"]["wasted at a request's end (%)"], "%", "measured",
                "mean over requests: slots never filled ÷ slots held, when it says its last token",
            ),
        ]  # fmt: skip
    if kind == "preemption":
        recompute, swap = by["recompute"], by["swap"]
        return [
            Number("preemptions", recompute["preemptions"], "", "measured", "of the recompute lane"),
            Number("computed again", recompute["recomputed tokens"], "tokens", "measured", "of the recompute lane"),
            Number("swapped", swap["swapped (MB)"], "MB", "measured", "to host memory and back, of the swap lane"),
            Number(
                "recompute ÷ swap", recompute["time (s)"] / swap["time (s)"], "× the time", "measured",
                "time of the lanes",
            ),
        ]  # fmt: skip
    off, on = by["off"], by["on"]
    return [
        Number(
            "of the prefill skipped", 100 * on["found in the cache"] / on["prompt tokens"], "%", "measured",
            "prompt tokens found in the prefix cache, requests after the first",
        ),
        Number("TTFT, cache off", off["median TTFT (ms)"], "ms", "measured", "median of the requests after the first"),
        Number("TTFT, cache on", on["median TTFT (ms)"], "ms", "measured", "median of the requests after the first"),
        Number(
            "times sooner", off["median TTFT (ms)"] / on["median TTFT (ms)"], "×", "measured", "ratio of the medians"
        ),
    ]  # fmt: skip
