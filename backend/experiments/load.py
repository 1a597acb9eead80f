"""How much load can it take: one rate after the other, each an open loop, until it is too much."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from backend.experiments import Experiment, ExperimentError, Partial, Progress, saturation
from backend.experiments.load_run import REFUSED, WINDOW, Kept, Run
from backend.workload import arrivals, lengths
from backend.workload.arrivals import Arrivals, LoadError
from backend.workload.job import Answer, End, Endpoint, Job, Target, Tick
from backend.workload.lengths import Lengths
from backend.workload.target import check_room, find
from backend.workload.worker import Worker

MAX_RATES = 30
MIN_REQUESTS = 10
MAX_S = 3600.0  # that a rate may be held for
LOOK_S = 0.5  # between two looks at whether it is too much
CERTAIN = 4.0  # roots of the mean: two looks a second find more chance than one at the end
LOOKS = 4  # in a row that must say so
REPORT_S = 0.25
PARTIAL_S = 2.0
DEAD = 10  # requests in a row that got no answer at all


@dataclass(frozen=True)
class Settings:
    rates: Sequence[float] = (1.0, 2.0, 4.0)  # requests/s
    requests: int = 60  # at each rate, and more at rates at which they would all come in less than
    min_s: float = 15.0
    arrivals: Arrivals = Arrivals.poisson
    burstiness: float = 0.25  # of bursty arrivals
    lengths: Lengths = Lengths.fixed
    input_tokens: int = 128
    output_tokens: int = 64
    trace: Sequence[tuple[float, int, int]] = ()  # instead of rates, requests and lengths
    seed: int = 0
    drain_s: float = 60.0
    timeout_s: float = 600.0
    stop_when_saturated: bool = True
    extra: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True, "temperature": 0.0})

    def as_dict(self) -> dict[str, Any]:
        """For people; a trace as the number of its requests."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"trace": len(self.trace)}

    def plan(self) -> list[tuple[float, int]]:
        """[(offered rate, requests)], lowest first. Raises LoadError for a load that cannot be made."""
        if self.trace:
            lasted = self.trace[-1][0]
            return [(len(self.trace) / lasted if lasted else float(len(self.trace)), len(self.trace))]
        rates = sorted({arrivals.check_rate(rate) for rate in self.rates})
        if not 1 <= len(rates) <= MAX_RATES:
            raise LoadError(f"{len(rates)} rates: give 1 to {MAX_RATES}")
        if not 0 <= self.min_s <= MAX_S:
            raise LoadError(f"{self.min_s:g} s at each rate: give 0 to {MAX_S:,.0f}")
        if self.requests < MIN_REQUESTS:
            raise LoadError(f"{self.requests} requests at a rate tell nothing: give at least {MIN_REQUESTS}")
        return [(rate, arrivals.check_count(max(self.requests, math.ceil(self.min_s * rate)))) for rate in rates]

    def runs(self) -> list[tuple[float, list[tuple[float, int, int]]]]:
        """[(offered rate, requests)], the same for the same seed. Raises LoadError."""
        if self.trace:
            return [(rate, list(self.trace)) for rate, _ in self.plan()]
        made = []
        for rate, count in self.plan():
            pairs = lengths.draw(self.lengths, count, self.input_tokens, self.output_tokens, self.seed)
            at = arrivals.times(self.arrivals, rate, count, self.seed, self.burstiness)
            made.append((rate, [(t, i, o) for t, (i, o) in zip(at, pairs, strict=True)]))
        return made


@dataclass(frozen=True)
class Server:
    """Where the load goes; `headers` may hold a key and are shown nowhere."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    model: str = ""
    endpoint: Endpoint | None = None
    modelled: str = ""  # of an engine whose steps are modelled: what they are, in words


def drive(server: Server, settings: Settings) -> Experiment:
    """Finds out how to speak to the server, then `sweep`s."""
    yield Progress(0, 1, None, f"asking {server.url} for its model")
    try:
        settings.runs()
        target = find(
            server.url, headers=server.headers, model=server.model, endpoint=server.endpoint, extra=settings.extra
        )
    except LoadError as error:
        raise ExperimentError(str(error)) from None
    return (yield from sweep(target, settings, modelled=server.modelled))


def sweep(target: Target, settings: Settings, *, salt: str = "", modelled: str = "") -> Experiment:
    """Tables: one row a rate; `requests`, `queue` (ten looks a second), `gaps` (ITL), `little`.

    `salt` makes the prompts' words; without one, they are of no sweep before.
    Closing it cuts off what is in flight. Raises ExperimentError for a load that cannot be made.
    """
    try:
        runs = settings.runs()
        check_room(target, [(i, o) for _, requests in runs for _, i, o in requests])
        kept = Kept(target, settings.as_dict(), modelled)
        kept.salt = salt or kept.salt
        worker = Worker()
        try:
            yield from _sweep(kept, settings, runs, worker)
        finally:
            worker.close()
    except LoadError as error:
        raise ExperimentError(str(error)) from None
    return kept.result(complete=True)


def _sweep(
    kept: Kept, settings: Settings, runs: list[tuple[float, list]], worker: Worker
) -> Generator[Progress | Partial, None, None]:
    whole_s = sum(requests[-1][0] for _, requests in runs)
    before_s = 0.0
    for i, (rate, requests) in enumerate(runs):
        run = Run(rate, requests)
        where = f"{rate:g} requests/s" + (f" ({i + 1} of {len(runs)})" if len(runs) > 1 else "")
        for report in _follow(kept, settings, run, worker):
            if isinstance(report, Partial):
                yield report
                continue
            done = before_s + min(report.t, requests[-1][0])
            note = f"{where}: {report.arrived} of {len(requests)} sent, {report.in_flight} in flight"
            yield Progress(done, whole_s, max(0.0, whole_s - done), note)
        before_s += requests[-1][0]
        end = _reason_to_end(settings, run)
        run.end()
        kept.runs.append(run)
        yield Partial(kept.result())
        if end:
            left = [f"{rate:g}" for rate, _ in runs[i + 1 :]]
            kept.notes.insert(0, end + (f" Not run: {', '.join(left)} requests/s." if left else ""))
            return


def _follow(kept: Kept, settings: Settings, run: Run, worker: Worker) -> Iterator[Tick | Partial]:
    """Reads one run to its end; ends it when it is clearly too much, or nobody is there any more."""
    job = Job(
        target=kept.target,
        requests=run.planned,
        salt=f"{kept.salt} {run.rate}",
        extra=settings.extra,
        timeout_s=settings.timeout_s,
        drain_s=settings.drain_s,
    )
    looked, over, reported = 0.0, 0, 0.0
    partial_at = time.monotonic() + PARTIAL_S
    for said in worker.run(job):
        if isinstance(said, Answer):
            run.answers.append(said)
        elif isinstance(said, Tick) and said.t > 0:
            run.ticks.append(said)
            if not run.stopped and said.t - looked >= LOOK_S:
                looked = said.t
                why, over = _too_much(run, over, settings.stop_when_saturated)
                if why:
                    run.stopped, run.stopped_s = why, said.t
                    worker.stop()
            if said.t - reported >= REPORT_S:
                reported = said.t
                yield said
            if time.monotonic() >= partial_at:
                begin = time.monotonic()
                yield Partial(kept.result(run))
                # Never more than a twentieth of the time for summing up.
                partial_at = time.monotonic() + max(PARTIAL_S, 20 * (time.monotonic() - begin))
        elif isinstance(said, End):
            return


def _too_much(run: Run, over: int, may_stop: bool) -> tuple[str, int]:
    """(why to end it now or "", looks in a row that said so)."""
    last = run.answers[-DEAD:]
    if len(last) == DEAD and all(answer.state == "failed" and not answer.code for answer in last):
        return f"the server does not answer any more: {last[-1].message}", over
    if not may_stop:
        return "", 0
    window = run.answers[-WINDOW:]
    refused = sum(answer.state == "refused" for answer in window)
    if len(window) == WINDOW and refused > REFUSED * WINDOW:
        return f"the server refuses: 429 for {refused} of the last {WINDOW} requests ({_refusal(window)})", over
    half = run.ticks[-1].arrived >= len(run.planned) / 2 and run.ticks[-1].arrived < len(run.planned)
    found = saturation.judge(run.ticks, run.until_s, CERTAIN) if half else None
    over = over + 1 if found is not None and found.state == "over-saturated" else 0
    return (f"over-saturated: {found.why}" if found is not None and over >= LOOKS else ""), over


def _refusal(answers: Sequence[Answer]) -> str:
    return next(answer.message for answer in answers if answer.state == "refused")


def _reason_to_end(settings: Settings, run: Run) -> str:
    if run.stopped:
        return f"Ended at {run.rate:g} requests/s: {run.stopped}."
    found = run.verdict()
    if found.state == "over-saturated" and settings.stop_when_saturated:
        return f"Ended after {run.rate:g} requests/s: over-saturated, {found.why}."
    if run.answers and not any(answer.state == "ok" for answer in run.answers):
        return f"Ended at {run.rate:g} requests/s: no request was answered ({run.answers[-1].message})."
    return ""
