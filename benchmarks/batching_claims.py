"""What the pages Batching and Load promise, measured once on this machine with a server of its own.

    python -m benchmarks.batching_claims [--parts batch,waves,chunked,races,little] [--quick] [--model smollm2-135m]
        [--dtype bfloat16] [--out FILE]

Prints a table and keeps JSON in benchmarks/results/, written anew after each part, so that what was measured survives
whatever comes after it. It runs the experiments of the pages, nothing of its own. Ten minutes on two quiet cores;
`--quick` shows in one or two that everything runs, its figures are not worth keeping. Exit status 1: something did not
hold.

Batches of four are where a step costs about the same however full it is, as the prediction of continuous batching's
gain supposes. At eight the gain is smaller in time than in steps, since a step with empty slots is cheaper: there time
is held against what the measured steps predict.

Figures of the races' full size need many tokens, not a good model: those are counted on a tiny one with random weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from backend.bench import machine
from backend.experiments import Result, chunked, load, race, sweep, waves
from backend.experiments.little import ENOUGH, SMALL
from backend.experiments.races import computations
from backend.sources.remote import EngineClient
from backend.workload.target import find
from benchmarks.claims import Claim, Part, engine, near, run, run_parts
from benchmarks.viewers import ROOT

NEAR = 0.15  # gain of continuous batching, against its prediction
CUT = 3.0  # of the worst ITL, by chunks
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 2304, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class How:
    quick: bool
    model: str
    dtype: str | None

    def pick(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full


def numbers(result: Result) -> dict[str, float]:
    return {number.name: number.value for number in result.numbers}


# ---- the parts -------------------------------------------------------------------------------------------------------


def batch(client: EngineClient, how: How) -> Part:
    batches, contexts = how.pick(((1, 2, 4, 8, 16, 32, 64), (64, 256)), ((1, 4, 8, 16), (16,)))
    result = run(sweep.sweep(client, sweep.Settings(batches, contexts, steps=how.pick(24, 6))))
    claims = []
    for mark in result.tables["marks"].to_dict("records"):
        context, knee = mark["prompt (tokens)"], mark["knee (batch)"]
        rows = result.table[result.table["prompt (tokens)"] == context]
        curve = ", ".join(f"{b}: {ms:.1f} ms" for b, ms in zip(rows["batch"], rows["step (ms)"], strict=True))
        claims.append(Claim(f"decode step by batch, {context} tokens of context", curve, "told", None))
        inside = knee is not None and batches[0] < knee < batches[-1]
        ridge = "none" if pd.isna(mark["ridge (batch)"]) else f"{mark['ridge (batch)']:.1f}"
        holds = f"{mark['KV memory holds (batch)']:,.0f}"
        claims.append(Claim("  its knee lies inside", f"{knee:g}", f"{batches[0]} < knee < {batches[-1]}", inside))
        claims.append(Claim("  ridge batch, KV memory holds", f"{ridge}, {holds}", "told", None))
        above = (rows["step (ms)"] / rows["lower bound (ms)"]).min()
        claims.append(Claim("  least measured ÷ lower bound", f"{above:.2f}", "1 or more", above >= 1))
    found = numbers(result)
    told = f"{found['a step at batch 8 costs']:.2f} ×, {found['and gives']:.2f} × tok/s"
    claims.append(Claim("batch 8 costs and gives", told, "told; the text: 1.65 ×, 4.86 ×", None))
    return Part(claims, [result])


def gains(client: EngineClient, how: How) -> Part:
    claims, results = [], []
    for slots, requests, scale in how.pick(((4, 128, 10.0), (8, 256, 40.0)), ((4, 32, 40.0),)):
        for kind in ("exponential", "bimodal"):
            settings = waves.Settings(kind, requests, slots, scale)
            results.append(run(waves.waves(client, settings)))
            found = numbers(results[-1])
            title = f"continuous ÷ static, {kind}, {slots} slots"
            predicted, measured_s = found["predicted"], found["in time"]
            steps = found["continuous gains, in steps"]
            claims.append(near(f"{title}: in steps", steps, predicted, NEAR))
            if slots <= 4:
                claims.append(near(f"{title}: in time", measured_s, predicted, NEAR))
            claims.append(near(f"{title}: in time, by its steps", measured_s, found["in time, predicted"], NEAR))
    return Part(claims, results)


def spikes(client: EngineClient, how: How) -> Part:
    results = []
    for seed in range(how.pick(3, 1)):
        settings = chunked.Settings(
            prompt_tokens=how.pick(1024, 256), chunks=how.pick((0, 512, 128), (0, 64)), seed=seed
        )
        results.append(run(chunked.chunked(client, settings)))
    claims = []
    for name in results[0].table["prefill"]:
        rows = [result.table[result.table["prefill"] == name].iloc[0] for result in results]
        worst, ttft = (
            statistics.median(row[column] for row in rows) for column in ("worst ITL (ms)", "newcomer's TTFT (ms)")
        )
        quiet = statistics.median(row["median ITL before (ms)"] for row in rows)
        told = f"worst ITL {worst:.0f} ms (before: {quiet:.0f}), TTFT {ttft:.0f} ms"
        claims.append(Claim(f"a long prompt, {name}", told, "told", None))
    cut = statistics.median(numbers(result)["the spike is cut by"] for result in results)
    cost = statistics.median(numbers(result)["newcomer's TTFT grows by"] for result in results)
    claims.append(Claim("the worst ITL is cut by", f"{cut:.1f} ×, TTFT × {cost:.2f}", f"{CUT:g} × or more", cut >= CUT))
    return Part(claims, results)


def races(client: EngineClient, how: How) -> Part:
    sizes = [(kind, "small") for kind in race.KINDS] + how.pick([("prefix", "full")], [])
    results = [run(race.race(client, race.Settings(kind, size))) for kind, size in sizes]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(TINY), encoding="utf-8")
        with engine(str(config), "float32", "--weights", "random", "--num-blocks", "1024") as tiny:
            results += [run(race.race(tiny, race.Settings(kind, "full"))) for kind in how.pick(("cache", "memory"), ())]
    claims = [claim for result in results for claim in _race_claims(result)]
    without, cached = computations(100, 1000)
    exact = (without, cached) == (599_500, 1_099)
    claims.append(
        Claim("1,000 tokens after 100, by formula", f"{without:,} and {cached:,}", "599,500 and 1,099", exact)
    )
    return Part(claims, results)


def _race_claims(result: Result) -> list[Claim]:
    kind, size = result.settings["kind"], result.settings["size"]
    title = f"race {kind}, {size}" + ("" if "smollm" in result.machine["model"]["name"] else ", tiny model")
    rows = {row["lane"]: row for row in result.table.to_dict("records")}
    if kind == "cache":
        counted = {name: row["tokens computed"] for name, row in rows.items()}
        expected = {name: row["tokens computed, expected"] for name, row in rows.items()}
        sooner = rows["no cache"]["time (s)"] / rows["cache"]["time (s)"]
        told = " and ".join(f"{count:,}" for count in counted.values())
        wanted = " and ".join(f"{count:,}" for count in expected.values())
        return [Claim(f"{title}: tokens computed", f"{told}; {sooner:.1f} × faster", wanted, counted == expected)]
    if kind == "memory":
        end, paged = rows["reserve"]["wasted at a request's end (%)"], rows["paged"]["wasted over the run (%)"]
        return [
            Claim(f"{title}: reserve wastes, at a request's end", f"{end:.1f} %", "60 to 80 %", 60 <= end <= 80),
            Claim(f"{title}: paged wastes", f"{paged:.1f} %", "below 4 %", paged < 4),
        ]
    if kind == "preemption":
        again, swapped = (rows[name]["recomputed tokens"] for name in ("recompute", "swap"))
        ratio = rows["recompute"]["time (s)"] / rows["swap"]["time (s)"]
        told = f"{again:,} and {swapped:,}; {ratio:.2f} × the time"
        return [Claim(f"{title}: computed again", told, "some and none", again > 0 == swapped)]
    on, off = rows["on"], rows["off"]
    skipped, whole, wanted = on["found in the cache"] / 4, on["prompt tokens"] / 4, {"small": 368, "full": 1488}[size]
    sooner = f"TTFT {off['median TTFT (ms)']:.0f} → {on['median TTFT (ms)']:.0f} ms"
    told = f"{skipped:g} of {whole:g} ({skipped / whole:.1%}); {sooner}"
    return [Claim(f"{title}: skipped of a prompt", told, f"{wanted}", skipped == wanted)]


def law(client: EngineClient, how: How) -> Part:
    """Too much first: what is answered then is what it can do. Steady is half of that."""
    shape = {"input_tokens": 16, "output_tokens": 16, "min_s": 0.0, "drain_s": 120.0}
    target, results = find(client.url), []
    for rate in (32.0, 128.0, 512.0):
        crowd = load.Settings(rates=(rate,), requests=how.pick(600, 150), stop_when_saturated=False, **shape)
        results.append(run(load.sweep(target, crowd)))
        over = results[-1].table.iloc[0]
        if over["verdict"] == "over-saturated":
            break
    most = float(over["achieved_rate_per_s"])
    calm = load.Settings(rates=(most / 2,), requests=how.pick(400, ENOUGH + 30), stop_when_saturated=False, **shape)
    results.append(run(load.sweep(target, calm)))
    steady = results[-1].table.iloc[0]
    told = f"{steady['little_residual']:+.1%} of L = {steady['l_mean']:.1f} ({steady['requests']} requests)"
    found = f"{told}, {steady['little']}"
    held = abs(steady["little_residual"]) < SMALL and steady["little"] == "steady"
    left = over["little_residual"]
    worse = f"{over['little_why'] if left is None else f'{left:+.1%}'}; {over['little']}"
    return Part(
        [
            Claim("most that it answers", f"{most:.2f} requests/s", "told", None),
            Claim(f"L − λW at {most / 2:.2f} requests/s", found, f"below {SMALL:.0%}, steady", held),
            Claim(f"L − λW at {rate:g} requests/s", worse, "unstable", over["little"] == "unstable"),
        ],
        results,
    )


PARTS: dict[str, Callable[[EngineClient, How], Part]] = {
    "batch": batch,
    "waves": gains,
    "chunked": spikes,
    "races": races,
    "little": law,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", help="by default what it serves in")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    chosen = wanted.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    how = How(wanted.quick, wanted.model, wanted.dtype)
    out = wanted.out or ROOT / "benchmarks" / "results" / f"batching-claims-{datetime.now():%Y%m%d-%H%M%S}.json"
    report: dict[str, Any] = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "model": how.model,
        "quick": how.quick,
        "parts": {},
    }
    with engine(how.model, how.dtype) as client:
        held = run_parts({name: partial(PARTS[name], client, how) for name in chosen}, report, out)
    print(f"kept in {out}", file=sys.stderr)
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
