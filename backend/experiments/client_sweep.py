"""What a batch costs at a server that is not ours: n streams at once, timed where they arrive.

An engine of our own is measured by its steps (`sweep`). Of an attached one no steps are known; what n requests that
decode together get is seen from outside just as well, network included.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from backend.experiments import Experiment, ExperimentError, Number, Partial, Progress, Result
from backend.experiments.load import Server
from backend.experiments.percentiles import RULE, percentiles
from backend.experiments.sweep import KNEE_RULE, NAME, Settings, knee
from backend.workload.arrivals import LoadError
from backend.workload.job import Answer, Job, Target, Tick
from backend.workload.target import check_room, find
from backend.workload.worker import Worker

PROMPT_TOKENS = 512  # a step of the server computes at least so many of prompts: how long the last one may wait
MARGIN = 16  # tokens more than are measured, for those that begin later
CUT_S = 600.0
TOGETHER_RULE = (
    "Measured at the client, network included, while all requests of the batch stream: from the last one's first piece "
    "to the first one's last. A request's time per token there is that time ÷ its tokens; a piece counts as its "
    "request's tokens ÷ its pieces. Milliseconds are the median over the requests, whiskers p10 and p90."
)


def client_sweep(server: Server, settings: Settings) -> Experiment:
    """The table has the columns of `sweep`; what only the engine itself can know is empty."""
    settings.check()
    batches, contexts = sorted(set(settings.batches)), sorted(set(settings.contexts))
    extra = {"ignore_eos": True, "temperature": 0.0}
    yield Progress(0, 1, None, f"asking {server.url} for its model")
    points: list[dict[str, Any]] = []
    missed: list[str] = []
    try:
        target = find(server.url, headers=server.headers, model=server.model, endpoint=server.endpoint, extra=extra)
        runs = [(c, b, _answer_tokens(settings, c, b)) for c in contexts for b in batches]
        check_room(target, [(context, output) for context, _, output in runs])
        worker = Worker()
        try:
            total, done, begin = sum(b * c for c, b, _ in runs), 0, time.monotonic()
            for context, batch, output in runs:
                note = f"batch {batch}, prompts of {context}"
                left = (time.monotonic() - begin) * (total - done) / done if done else None
                yield Progress(done, total, left, note)
                job = Job(
                    target=target,
                    requests=[(0.0, context, output)] * batch,
                    salt=secrets.token_hex(8),
                    extra=extra,
                    drain_s=CUT_S,
                )
                answers: list[Answer] = []
                for said in _reports(worker, job, answers):
                    yield Progress(done, total, left, f"{note}: {said.left} of {batch} answered")
                done += batch * context
                point = _point(context, batch, answers)
                if point:
                    points.append(point)
                else:
                    missed.append(f"{note}: {_why(answers)}")
                yield Partial(_result(points, missed, settings, target))
        finally:
            worker.close()
    except LoadError as error:
        raise ExperimentError(str(error)) from None
    return _result(points, missed, settings, target)


def _answer_tokens(settings: Settings, context: int, batch: int) -> int:
    return settings.steps + MARGIN + -(-batch * context // PROMPT_TOKENS)


def _reports(worker: Worker, job: Job, answers: list[Answer]) -> Iterator[Tick]:
    """Collects the answers; a report a second."""
    told = 0.0
    for said in worker.run(job):
        if isinstance(said, Answer):
            answers.append(said)
        elif isinstance(said, Tick) and said.t - told >= 1.0:
            told = said.t
            yield said


def together(answers: Sequence[Answer]) -> tuple[float, float]:
    """(begin, end) of the time in which all of them stream; the end is not after the begin when there is none."""
    streams = [answer.times_s for answer in answers if answer.times_s]
    if not streams or len(streams) < len(answers):
        return 0.0, 0.0
    return max(times[0] for times in streams), min(times[-1] for times in streams)


def _point(context: int, batch: int, answers: Sequence[Answer]) -> dict[str, Any] | None:
    begin, end = together(answers)
    if end <= begin or any(answer.state != "ok" for answer in answers):
        return None
    each = []
    for answer in answers:
        inside = sum(begin < t <= end for t in answer.times_s)
        tokens = inside * (answer.output_tokens or len(answer.times_s)) / len(answer.times_s)
        each.append(tokens / (end - begin))
    if not all(each):
        return None
    rates = [1 / rate for rate in each]
    low, high = percentiles(rates, (10, 90))
    return {
        "prompt (tokens)": context,
        "batch": batch,
        "step (ms)": statistics.median(rates) * 1e3,
        "p10 step (ms)": low * 1e3,
        "p90 step (ms)": high * 1e3,
        "lower bound (ms)": None,
        "tok/s": sum(each),
        "tok/s per user": sum(each) / batch,
        "together (s)": end - begin,
    }


def _why(answers: Sequence[Answer]) -> str:
    bad = [answer for answer in answers if answer.state != "ok"]
    if bad:
        return f"{len(bad)} of {len(answers)} {bad[-1].state} ({bad[-1].message})"
    return "the first had ended before the last began, so they were never all in one batch: take more steps"


def _result(points: list[dict[str, Any]], missed: list[str], settings: Settings, target: Target) -> Result:
    table = pd.DataFrame(points)
    marks, numbers = [], []
    for context in sorted({point["prompt (tokens)"] for point in points}):
        curve = [point for point in points if point["prompt (tokens)"] == context]
        found = knee([(point["batch"], point["tok/s"]) for point in curve])
        marks.append(
            {
                "prompt (tokens)": context,
                "knee (batch)": found,
                "KV memory holds (batch)": None,
                "ridge (batch)": None,
            }
        )
        if not numbers:
            best = max(curve, key=lambda point: point["tok/s"])
            numbers.append(Number("knee", found, "requests", "measured", KNEE_RULE))
            numbers.append(Number("most tok/s", best["tok/s"], f"tok/s at {best['batch']}", "measured", TOGETHER_RULE))
    notes = [*missed, TOGETHER_RULE, KNEE_RULE, RULE, *target.notes]
    notes.append("No lower bound, no memory limit: the server does not tell its steps, nor what its device can do.")
    machine = {
        "model": {"name": target.model, "dtype": "timed at the client"},
        "device": {"name": target.url + target.path},
    }
    return Result(NAME, table, numbers, notes, {"marks": pd.DataFrame(marks)}, asdict(settings), machine)
