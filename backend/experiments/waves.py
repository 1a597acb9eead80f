"""Static against continuous batching on the same requests: who holds which slot, and what the empty ones cost."""

from __future__ import annotations

import heapq
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import pandas as pd

from backend.events import Finished, Step
from backend.experiments import Experiment, ExperimentError, Number, Partial, Progress, Result
from backend.experiments.bench import Ask, Bench, prompts
from backend.sources.remote import EngineClient

NAME = "static against continuous"
POLICIES = ("static", "continuous")
SHORT, LONG = 20, 800  # output tokens, before they are divided by `scale`
MOST_REQUESTS = 1000
MOST_TOKENS = 100_000
GAIN_RULE = (
    "A static batch runs until its longest answer ends, so a slot is busy for mean ÷ E[max] of the time; a continuous "
    "one refills it at once. Predicted gain: E[max of a batch] ÷ mean length, for many requests and steps that cost "
    "the same however full they are."
)
STEP_RULE = (
    "Steps are what the prediction is about. In time the gain is smaller where a step with empty slots is cheaper than "
    "a full one; 'in time, predicted' takes that into account: the planned steps of this very trace, each at the "
    "median time from one step's end to the next with so many requests in it, measured here."
)

Kind = Literal["bimodal", "uniform", "exponential", "uploaded"]


@dataclass(frozen=True)
class Settings:
    kind: Kind = "bimodal"
    requests: int = 128
    slots: int = 8
    scale: float = 16.0  # lengths are divided by this: 20/800 tokens become 1/50
    lengths: tuple[int, ...] = ()  # output tokens of each request, with kind "uploaded"
    prompt_tokens: int = 1  # so that a step in which somebody enters computes no more than the others
    seed: int = 0

    def check(self) -> None:
        if self.kind not in get_args(Kind):
            raise ExperimentError(f"there are no lengths '{self.kind}'; there are {', '.join(get_args(Kind))}")
        if not 1 <= self.slots <= 256:
            raise ExperimentError(f"slots must be between 1 and 256, not {self.slots}")
        if self.kind == "uploaded" and not self.lengths:
            raise ExperimentError("the trace has no lengths: one output length a line, or a column named output_tokens")
        if self.kind != "uploaded" and not self.slots <= self.requests <= MOST_REQUESTS:
            raise ExperimentError(f"requests must be between the slots ({self.slots}) and {MOST_REQUESTS}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ExperimentError("lengths are divided by a number above 0")
        drawn = draw(self)
        if not all(1 <= length <= MOST_TOKENS for length in drawn) or len(drawn) > MOST_REQUESTS:
            raise ExperimentError(f"a trace has at most {MOST_REQUESTS} answers of 1 to {MOST_TOKENS:,} tokens")


@dataclass
class _Lane:
    """What one policy did. Times in seconds since its first step began."""

    slots: list[tuple[int, int, float, float]] = field(default_factory=list)  # (request, slot, from, to)
    waits: list[float] = field(default_factory=list)
    active: list[int] = field(default_factory=list)  # requests in each step
    step_s: list[float] = field(default_factory=list)  # from the end of the step before
    seconds: float = 0.0


def waves(client: EngineClient, settings: Settings) -> Experiment:
    settings.check()
    lengths = draw(settings)
    lanes: dict[str, _Lane] = {}
    with Bench(client, _switches(settings, lengths)) as bench:
        texts = prompts(bench.alphabet, len(lengths), settings.prompt_tokens, settings.seed)
        asks = [Ask(text, length) for text, length in zip(texts, lengths, strict=True)]
        total, done, started = len(POLICIES) * sum(lengths), 0, time.monotonic()
        for policy in POLICIES:
            bench.configure({**_switches(settings, lengths), "policy": policy})
            lane = _Lane()
            for tokens in _run(bench, asks, lane, settings.slots):
                done += tokens
                took = time.monotonic() - started
                yield Progress(done, total, took * (total - done) / done if done else None, f"{policy} batching")
            lanes[policy] = lane
            yield Partial(_result(settings, lengths, lanes, bench))
    return _result(settings, lengths, lanes, bench)


def draw(settings: Settings) -> list[int]:
    """Output lengths, the same for the same seed: evenly over the distribution (the middles of as many equal shares of
    it), then shuffled, so that also a short trace has the distribution's mean."""
    if settings.kind == "uploaded":
        return list(settings.lengths)
    lots = random.Random(f"{settings.kind} {settings.seed}")
    at_share = {
        "bimodal": lambda share: SHORT if share < 0.5 else LONG,
        "uniform": lambda share: SHORT + (LONG - SHORT) * share,
        "exponential": lambda share: -math.log(1 - share) * (SHORT + LONG) / 2,
    }[settings.kind]
    shares = [(i + 0.5) / settings.requests for i in range(settings.requests)]
    lots.shuffle(shares)
    return [max(1, round(at_share(share) / settings.scale)) for share in shares]


def predicted_gain(kind: Kind, slots: int, lengths: Sequence[int] = ()) -> float:
    """E[longest of `slots` answers] ÷ mean length of the distribution; of the lengths themselves when uploaded."""
    mean = (SHORT + LONG) / 2
    if kind == "bimodal":
        return (LONG - (LONG - SHORT) * 0.5**slots) / mean
    if kind == "uniform":
        return (SHORT + (LONG - SHORT) * slots / (slots + 1)) / mean
    if kind == "exponential":
        return sum(1 / i for i in range(1, slots + 1))  # H_B
    ordered, n = sorted(lengths), len(lengths)
    longest = sum(x * (((i + 1) / n) ** slots - (i / n) ** slots) for i, x in enumerate(ordered))
    return longest / statistics.fmean(lengths)


def planned(policy: str, lengths: Sequence[int], slots: int) -> list[int]:
    """Requests in the batch, step by step, when a request takes as many steps as it says tokens."""
    ends: list[int] = []  # of the requests in the slots
    spans, now = [], 0
    waiting = list(lengths)[::-1]
    while waiting:
        if policy == "static":
            wave = [waiting.pop() for _ in range(min(slots, len(waiting)))]
            spans += [(now, now + length) for length in wave]
            now += max(wave)
            continue
        begin = heapq.heappop(ends) if len(ends) == slots else 0
        heapq.heappush(ends, begin + waiting[-1])
        spans.append((begin, begin + waiting.pop()))
    active = [0] * max(end for _, end in spans)
    for begin, end in spans:
        for step in range(begin, end):
            active[step] += 1
    return active


def _switches(settings: Settings, lengths: Sequence[int]) -> dict[str, Any]:
    longest = max(lengths) + settings.prompt_tokens
    tokens = max(256, settings.slots * settings.prompt_tokens)
    return {
        "policy": "static",
        "allocator": "paged",
        "kv_cache": True,
        "prefix_cache": False,
        "preemption": "recompute",
        "block_size": 16,
        "num_blocks": settings.slots * -(-longest // 16) + 1,
        "max_running": settings.slots,
        "max_waiting": max(1024, len(lengths)),
        "token_budget": tokens,
        "chunk_size": tokens,
        "max_model_len": longest + 1,
    }


def _run(bench: Bench, asks: list[Ask], lane: _Lane, slots: int):
    """Fills `lane`; yields how many tokens were said since the last time."""
    free, held, since = list(range(slots)), {}, {}
    run, first = bench.start(asks), None
    for event in bench.watch(run):
        if isinstance(event, Step):
            begin = event.t - event.step_s
            first = begin if first is None else first
            for kind, number, *_ in event.ops:
                if kind == "admit":
                    held[number], since[number] = heapq.heappop(free), begin
                    lane.waits.append(begin - first)
            lane.active.append(len(held))
            lane.step_s.append(event.t - first - lane.seconds)
            lane.seconds = event.t - first
            yield len(held)
        elif isinstance(event, Finished) and event.request in held:
            slot = held.pop(event.request)
            heapq.heappush(free, slot)
            lane.slots.append((run.index_of[event.request], slot, since[event.request] - first, event.t - first))
        elif event is None:
            yield 0


def _result(settings: Settings, lengths: list[int], lanes: dict[str, _Lane], bench: Bench) -> Result:
    tokens = sum(lengths)
    rows = [
        {
            "policy": policy,
            "steps": len(lane.active),
            "time (s)": lane.seconds,
            "tok/s": tokens / lane.seconds,
            "mean wait (s)": statistics.fmean(lane.waits),
            "slots in use (%)": 100 * sum(lane.active) / (settings.slots * len(lane.active)),
            "median step (ms)": 1e3 * statistics.median(lane.step_s),
        }
        for policy, lane in lanes.items()
        if lane.seconds
    ]
    requests = pd.DataFrame(
        [
            {
                "policy": policy,
                "request": index + 1,
                "slot": slot + 1,
                "enters (s)": begin,
                "ends (s)": end,
                "output tokens": lengths[index],
            }
            for policy, lane in lanes.items()
            for index, slot, begin, end in lane.slots
        ]
    )
    notes = [GAIN_RULE, STEP_RULE, "All requests arrive at once; wait is the time until a request enters the batch."]
    if bench.strangers:
        notes.append(f"{bench.strangers} requests of others came in meanwhile: these numbers are not clean.")
    numbers = _gains(settings, lengths, lanes) if len(lanes) == 2 else []
    return Result(
        NAME, pd.DataFrame(rows), numbers, notes, {"requests": requests}, asdict(settings), dict(bench.machine)
    )  # fmt: skip


def _gains(settings: Settings, lengths: list[int], lanes: dict[str, _Lane]) -> list[Number]:
    static, continuous = lanes["static"], lanes["continuous"]
    plans = {policy: planned(policy, lengths, settings.slots) for policy in POLICIES}
    samples: dict[int, list[float]] = {}
    for lane in lanes.values():
        for active, seconds in zip(lane.active, lane.step_s, strict=True):
            samples.setdefault(active, []).append(seconds)
    medians = {active: statistics.median(seconds) for active, seconds in samples.items()}
    planned_s = {p: sum(medians.get(active, 0.0) for active in plan) for p, plan in plans.items()}
    theory = predicted_gain(settings.kind, settings.slots, lengths)
    steps = len(static.active) / len(continuous.active)
    return [
        Number("continuous gains, in steps", steps, "×", "measured", "steps of static ÷ steps of continuous batching"),
        Number("predicted", theory, "×", "computed", GAIN_RULE),
        Number(
            "this trace, planned",
            len(plans["static"]) / len(plans["continuous"]),
            "×",
            "computed",
            "the same schedule on paper: as the prediction, but for these lengths, with the last slots running empty",
        ),
        Number(
            "in time", static.seconds / continuous.seconds, "×", "measured", "tok/s of continuous ÷ tok/s of static"
        ),
        Number("in time, predicted", planned_s["static"] / planned_s["continuous"], "×", "computed", STEP_RULE),
    ]
