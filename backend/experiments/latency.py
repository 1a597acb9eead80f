"""From what the load client saw to the words that people compare: TTFT, TPOT, ITL, E2E, goodput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from backend.experiments.percentiles import percentiles
from backend.workload.job import Answer, Tick

METRICS = ("ttft", "tpot", "itl", "e2e")
SHARES = (50, 95, 99)
NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end-to-end latency",
}
RULES = {
    "ttft": "from the planned arrival to the first piece of the answer that carries text",
    "tpot": "(last piece - first piece) / (output tokens - 1), one value a request; tokens as the server counts them",
    "itl": "gaps between two pieces of one stream, all requests together; a piece may carry several tokens",
    "e2e": "from the planned arrival to the last piece of the answer: TTFT + (output tokens - 1) TPOT",
}


@dataclass(frozen=True)
class Slo:
    """What a good answer keeps, in s; None: no matter."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.e2e_s))


def request_row(rate: float, answer: Answer) -> dict[str, Any]:
    """One row of the table of requests. Times of `arrival_s`, `sent_s`, `end_s` are s from the start of the run."""
    times = answer.times_s
    tokens = answer.output_tokens
    spread = times[-1] - times[0] if times else None
    return {
        "offered_rate_per_s": rate,
        "number": answer.number,
        "state": answer.state,
        "arrival_s": answer.arrival_s,
        "sent_s": answer.sent_s,
        "end_s": answer.end_s,
        "ttft_s": times[0] - answer.arrival_s if times else None,
        "tpot_s": spread / (tokens - 1) if times and tokens and tokens > 1 else None,
        "e2e_s": times[-1] - answer.arrival_s if times and answer.state == "ok" else None,
        "input_tokens": answer.input_tokens,
        "output_tokens": tokens,
        "wanted_input_tokens": answer.wanted_input,
        "wanted_output_tokens": answer.wanted_output,
        "http_status": answer.code,
        "message": answer.message,
    }


REQUEST_COLUMNS = tuple(request_row(0.0, Answer(
    number=0, arrival_s=0, sent_s=0, end_s=0, state="ok", wanted_input=0, wanted_output=0
)))  # fmt: skip


def requests_table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(REQUEST_COLUMNS))


def gaps(answers: Iterable[Answer]) -> list[float]:
    """Seconds between two pieces of one stream."""
    return [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.times_s, answer.times_s[1:], strict=False)
    ]


def summary(rate: float, answers: Sequence[Answer], ticks: Sequence[Tick], source: str) -> dict[str, Any]:
    """One row of a sweep. Latencies are of requests that ended well; None where there is nothing to take them of."""
    rows = [request_row(rate, answer) for answer in answers]
    good = [row for row in rows if row["state"] == "ok"]
    done = [answer for answer in answers if answer.state == "ok"]
    samples = {name: _values(good, f"{name}_s") for name in ("ttft", "tpot", "e2e")} | {"itl": gaps(done)}
    begin = min((answer.arrival_s for answer in answers), default=0.0)
    end = max((answer.end_s for answer in done), default=0.0)
    lasted = max(end - begin, 0.0)
    states = [answer.state for answer in answers]
    output = sum(row["output_tokens"] or 0 for row in good)
    row: dict[str, Any] = {
        "source": source,
        "offered_rate_per_s": rate,
        "achieved_rate_per_s": len(done) / lasted if lasted else 0.0,
        "output_tokens_per_s": output / lasted if lasted else 0.0,
        "requests": len(answers),
        "ok": len(done),
        **{state: states.count(state) for state in ("refused", "failed", "cut")},
        "duration_s": lasted,
        "input_tokens_mean": _mean(_values(good, "input_tokens")),
        "output_tokens_mean": _mean(_values(good, "output_tokens")),
    }
    for name in METRICS:
        row[f"{name}_mean_s"] = _mean(samples[name])
        for share, value in zip(SHARES, percentiles(samples[name], SHARES), strict=True):
            row[f"{name}_p{share}_s"] = value
    (late,) = percentiles([answer.sent_s - answer.arrival_s for answer in answers], (99,))
    row["client_late_p99_s"] = late
    row["in_flight_max"] = max((tick.in_flight for tick in ticks), default=0)
    return row


def good_requests(requests: pd.DataFrame, slo: Slo) -> pd.Series:
    """For each request, whether it ended well and kept every limit given. One without a TPOT (one token) keeps that."""
    kept = requests["state"] == "ok"
    for column, limit in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s), ("e2e_s", slo.e2e_s)):
        if limit is not None:
            values = pd.to_numeric(requests[column])
            kept &= (values <= limit) | (values.isna() & (column == "tpot_s"))
    return kept


def goodput(table: pd.DataFrame, requests: pd.DataFrame, slo: Slo) -> pd.DataFrame:
    """offered_rate_per_s, goodput_per_s, good_share for each rate of our own sweep: good requests over its duration."""
    kept = good_requests(requests, slo)
    rows = []
    for row in table.itertuples():
        mine = kept[requests["offered_rate_per_s"] == row.offered_rate_per_s]
        if row.requests and len(mine):
            good = int(mine.sum())
            rate = good / row.duration_s if row.duration_s else 0.0
            rows.append((row.offered_rate_per_s, row.achieved_rate_per_s, rate, good / len(mine)))
    return pd.DataFrame(rows, columns=["offered_rate_per_s", "achieved_rate_per_s", "goodput_per_s", "good_share"])


def _values(rows: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row[name] is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
