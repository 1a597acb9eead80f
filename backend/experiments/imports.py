"""Results of other load generators, as rows of the same table: `vllm bench serve`, guidellm, aiperf (their JSON).

Where a file holds single requests, percentiles are taken from them by our rule; where it holds none, the tool's own are
shown. What a tool calls by another name: guidellm's and aiperf's "inter-token latency" is one value a request, which is
our TPOT; aiperf's "inter-chunk latency" is our ITL.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from backend.experiments import ExperimentError
from backend.experiments.latency import METRICS, SHARES
from backend.experiments.percentiles import percentiles

MAX_BYTES = 64 << 20
MAX_SAMPLES = 2_000_000


@dataclass
class Imported:
    """One file. `table`: a row a run, with the columns of a sweep's table that the tool tells. `samples`: by metric."""

    tool: str
    table: pd.DataFrame
    samples: list[dict[str, list[float]]] = field(default_factory=list)  # of each row: metric -> seconds


def read(data: bytes, name: str) -> Imported:
    """Raises ExperimentError, which names the file and what is wrong with it."""
    if len(data) > MAX_BYTES:
        raise ExperimentError(f"{name} has {len(data) / 2**20:,.0f} MiB; at most {MAX_BYTES >> 20} MiB are read")
    try:
        told = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ExperimentError(f"{name} is not UTF-8 text") from None
    except (json.JSONDecodeError, RecursionError):
        raise ExperimentError(f"{name} is no JSON document: save the result as JSON") from None
    for tool, (mark, understand) in TOOLS.items():
        if isinstance(told, dict) and mark(told):
            try:
                rows = understand(told)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise ExperimentError(f"{name} looks like {tool}, but {_what(error)}") from None
            if not rows:
                raise ExperimentError(f"{name} holds no finished run of {tool}")
            # As numbers: a column that holds None only could not be put together with a sweep's.
            table = pd.DataFrame([row for row, _ in rows]).apply(pd.to_numeric).assign(source=f"{tool}: {name}")
            return Imported(tool, table, [samples for _, samples in rows])
    raise ExperimentError(f"{name} is no result of {', '.join(TOOLS)} that is understood here")


Row = tuple[dict[str, Any], dict[str, list[float]]]


def _vllm(told: dict) -> list[Row]:
    samples: dict[str, list[float]] = {}
    if told.get("ttfts"):
        errors = told.get("errors") or [""] * len(told["ttfts"])
        good = [i for i, error in enumerate(errors) if not error]
        gaps = [told["itls"][i] for i in good]
        ttfts = [_number(told["ttfts"][i]) for i in good]
        lengths = [int(told["output_lens"][i]) for i in good]
        # Older files have no latencies: a request's are its first token and all the gaps after it.
        latencies = told.get("latencies") or [told["ttfts"][i] + sum(told["itls"][i]) for i in range(len(errors))]
        later = [_number(latencies[i]) - told["ttfts"][i] for i in good]
        samples = {
            "ttft": ttfts,
            "tpot": [rest / (length - 1) for rest, length in zip(later, lengths, strict=True) if length > 1],
            "itl": [_number(gap) for one in gaps for gap in one],
            "e2e": [first + rest for first, rest in zip(ttfts, later, strict=True)],
        }
    own: dict[str, Any] = {}
    for metric, other in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2el")):
        own[f"{metric}_mean_s"] = _ms(told.get(f"mean_{other}_ms"))
        own[f"{metric}_p50_s"] = _ms(told.get(f"median_{other}_ms"))
        for share in SHARES:
            if told.get(f"p{share}_{other}_ms") is not None:
                own[f"{metric}_p{share}_s"] = _ms(told[f"p{share}_{other}_ms"])
    completed = int(told["completed"])
    rate = told.get("request_rate")
    failed = int(told.get("failed") or 0)
    row = {
        "offered_rate_per_s": None if rate in (None, "inf") else _number(rate),
        "achieved_rate_per_s": _number(told["request_throughput"]),
        "output_tokens_per_s": _number(told["output_throughput"]),
        "requests": completed + failed,
        "ok": completed,
        "failed": failed,
        "duration_s": _number(told["duration"]),
        "input_tokens_mean": _number(told["total_input_tokens"]) / completed if completed else None,
        "output_tokens_mean": _number(told["total_output_tokens"]) / completed if completed else None,
    }
    return [(row | own | _of(samples), samples)]


def _guidellm(told: dict) -> list[Row]:
    rows = []
    for run in told["benchmarks"]:
        metrics = run["metrics"]
        done = run["requests"]["successful"] or []
        samples: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
        for request in done:
            at = request["info"]["timings"]
            begin, first, last = at["request_start"], at["first_token_iteration"], at["last_token_iteration"]
            tokens = (request.get("output_metrics") or {}).get("total_tokens")
            if first is None or last is None:
                continue
            samples["ttft"].append(_number(first) - _number(begin))
            samples["e2e"].append(_number(last) - _number(begin))
            if tokens and tokens > 1:
                samples["tpot"].append((_number(last) - first) / (tokens - 1))
        own: dict[str, Any] = {}
        for metric, name, factor in (
            ("ttft", "time_to_first_token_ms", 1e-3),
            ("tpot", "inter_token_latency_ms", 1e-3),
            ("e2e", "request_latency", 1.0),
        ):
            told_of = (metrics.get(name) or {}).get("successful") or {}
            if told_of.get("count"):
                own[f"{metric}_mean_s"] = _number(told_of["mean"]) * factor
                own |= {
                    f"{metric}_p{share}_s": _number(told_of["percentiles"][f"p{share}"]) * factor for share in SHARES
                }
        totals = metrics["request_totals"]
        strategy = run["config"]["strategy"]
        rate = strategy.get("rate")
        row = {
            "offered_rate_per_s": _number(rate) if rate else None,
            "achieved_rate_per_s": _number(metrics["requests_per_second"]["successful"]["mean"]),
            "output_tokens_per_s": _number(metrics["output_tokens_per_second"]["successful"]["mean"]),
            "requests": int(totals["total"]),
            "ok": int(totals["successful"]),
            "failed": int(totals["errored"]),
            "cut": int(totals["incomplete"]),
            "duration_s": _number(run["duration"]),
            "input_tokens_mean": _number(metrics["prompt_token_count"]["successful"]["mean"]),
            "output_tokens_mean": _number(metrics["output_token_count"]["successful"]["mean"]),
        }
        rows.append((row | own | _of(samples), samples if samples["ttft"] else {}))
    return rows


def _aiperf(told: dict) -> list[Row]:
    def one(name: str, figure: str = "avg") -> float | None:
        value = (told.get(name) or {}).get(figure)
        return None if value is None else _number(value)

    row: dict[str, Any] = {
        "offered_rate_per_s": _find(told.get("input_config"), ("request_rate", "rate")),
        "achieved_rate_per_s": one("request_throughput"),
        "output_tokens_per_s": one("output_token_throughput"),
        "requests": int((one("request_count") or 0) + (one("error_request_count") or 0)),
        "ok": int(one("request_count") or 0),
        "failed": int(one("error_request_count") or 0),
        "duration_s": one("benchmark_duration"),
        "input_tokens_mean": one("input_sequence_length"),
        "output_tokens_mean": one("output_sequence_length"),
    }
    if row["achieved_rate_per_s"] is None:
        raise KeyError("request_throughput")
    for metric, name in (
        ("ttft", "time_to_first_token"),
        ("tpot", "inter_token_latency"),
        ("itl", "inter_chunk_latency"),
        ("e2e", "request_latency"),
    ):
        factor = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6}[told[name]["unit"]] if told.get(name) else 1.0
        for ending, figure in (("mean", "avg"), *((f"p{share}", f"p{share}") for share in SHARES)):
            value = one(name, figure)
            row[f"{metric}_{ending}_s"] = None if value is None else value * factor
    return [(row, {})]


TOOLS: dict[str, tuple[Callable[[dict], bool], Callable[[dict], list[Row]]]] = {
    "vllm bench serve": (lambda told: "request_throughput" in told and "completed" in told, _vllm),
    "guidellm": (lambda told: isinstance(told.get("benchmarks"), list), _guidellm),
    "aiperf": (lambda told: isinstance(told.get("request_throughput"), dict), _aiperf),
}


def _of(samples: dict[str, list[float]]) -> dict[str, float | None]:
    """Mean and percentiles of those metrics that have samples."""
    if sum(map(len, samples.values())) > MAX_SAMPLES:
        raise ValueError(f"it has more than {MAX_SAMPLES:,} samples")
    found: dict[str, float | None] = {}
    for metric in METRICS:
        if values := samples.get(metric):
            found[f"{metric}_mean_s"] = sum(values) / len(values)
            found |= zip((f"{metric}_p{share}_s" for share in SHARES), percentiles(values, SHARES), strict=True)
    return found


def _find(told: Any, names: tuple[str, ...]) -> float | None:
    """The first number under one of `names`, at whatever depth."""
    if isinstance(told, dict):
        for name in names:
            if isinstance(value := told.get(name), (int, float)) and not isinstance(value, bool):
                return _number(value)
    inner = told.values() if isinstance(told, dict) else told if isinstance(told, list) else ()
    return next((found for one in inner if (found := _find(one, names)) is not None), None)


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{value!r} is no number")
    return number


def _ms(value: Any) -> float | None:
    return None if value is None else _number(value) / 1000


def _what(error: Exception) -> str:
    return (
        f"has no {error}" if isinstance(error, KeyError) else f"something in it is not understood: {str(error)[:120]}"
    )
