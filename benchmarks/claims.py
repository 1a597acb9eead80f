"""What a benchmark promises and what it found, part by part: a table to read, JSON that outlives what comes later."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.bench import machine
from backend.experiments import Experiment, ExperimentError, Result
from backend.sources.background import Background
from backend.sources.remote import EngineClient
from backend.workload.arrivals import LoadError
from benchmarks.viewers import server

LONG = {"requests", "lanes", "queue", "gaps", "little"}  # tables that are not kept


@dataclass(frozen=True)
class Claim:
    what: str
    found: str
    wanted: str
    holds: bool | None  # None: a figure that is told, not judged

    @property
    def failed(self) -> bool:
        return self.holds is not None and not self.holds


@dataclass
class Part:
    claims: list[Claim]
    results: list[Result]


def near(what: str, found: float, predicted: float, within: float) -> Claim:
    off = found / predicted - 1
    return Claim(what, f"{found:.2f} × ({off:+.1%})", f"{predicted:.2f} × ± {within:.0%}", abs(off) <= within)


def run(experiment: Experiment) -> Result:
    """To its end; interrupted, it puts the engine back and is heard of further up."""
    with closing(experiment):
        while True:
            try:
                next(experiment)
            except StopIteration as end:
                return end.value


@contextmanager
def engine(model: str, dtype: str | None, *options: str) -> Iterator[EngineClient]:
    background = Background("kvscope-claims")
    try:
        with server(model, dtype, *options) as (url, _):
            client = EngineClient(lambda: url, background)
            yield client
            client.close()
    finally:
        background.close()


def kept(part: Part, took_s: float, load_average: float) -> dict[str, Any]:
    results = [result.as_dict() for result in part.results]
    for result in results:
        result["tables"] = {name: rows for name, rows in result["tables"].items() if name not in LONG}
    return {
        "took_s": round(took_s, 1),
        "load_average": load_average,
        "claims": [asdict(claim) for claim in part.claims],
        "results": results,
    }


def _plain(value: Any) -> Any:
    """For json: numpy's numbers and truths, and whatever else a setting is."""
    return value.item() if hasattr(value, "item") else str(value)


def words(claim: Claim) -> str:
    mark = "DOES NOT HOLD" if claim.failed else "" if claim.holds is None else "holds"
    return f"  {claim.what:58} {claim.found:44} {claim.wanted:32} {mark}".rstrip()


def run_parts(parts: Mapping[str, Callable[[], Part]], report: dict[str, Any], out: Path) -> bool:
    """One after the other, printed and written as they end; whether all that was promised holds."""
    held = True
    for name, part in parts.items():
        before, begin = machine.load_average(), time.monotonic()
        try:
            found = part()
        except (ExperimentError, LoadError) as error:
            held, report["parts"][name] = False, {"error": str(error)}
            print(f"{name}: {error}", flush=True)
        else:
            held &= not any(claim.failed for claim in found.claims)
            report["parts"][name] = kept(found, time.monotonic() - begin, before)
            print(f"{name}: {time.monotonic() - begin:.0f} s, load average {before:.1f} before", flush=True)
            print("\n".join(map(words, found.claims)), flush=True)
        out.write_text(json.dumps(report, indent=1, default=_plain) + "\n", encoding="utf-8")
    return held
