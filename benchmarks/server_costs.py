"""What servers take beside their bounds: fits `backend.planner.served` to public measurements, and checks it on others.

    python -m benchmarks.server_costs silicon_sample.csv [--fit]

The file: silicon_sample.csv of https://github.com/ai-dynamo/aiconfigurator (Apache-2.0, commit ed133e9): TPOT
and TTFT of vLLM, SGLang and TensorRT-LLM under load, most of them from InferenceX. Of its aggregated rows (prompts and
decodes on the same GPUs), those without data parallelism on at most the 8 GPUs of a machine, of models and accelerators
of the catalogues. They are split by what was measured (some stand there twice): whoever runs it gets the same halves.
`--fit` turns the knobs on one half, until no turn brings the mean of |log(measured / played)| down; the ends of the
bands were then set by hand, to round numbers that hold 8 of 10 of that half. Without it the constants of `served` are
checked on both halves.

Rows are played by a stand-in of the scheduler that takes stretches of decodes in one go, since there are a thousand;
`modelled_against_measured` plays the engine itself.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import math
import multiprocessing
import os
import random
import statistics
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from backend.planner import accelerators, catalogue, served
from backend.planner.capacity import Reserve, memory_budget
from backend.planner.errors import PlannerError
from backend.planner.formats import kv_format, weight_format
from backend.planner.kvcache import kv_model
from backend.planner.roofline import arithmetic, span_flops
from backend.planner.weights import read_bytes

MODELS = {  # in the file -> in the catalogue; the first name that is part of the path
    "llama-3.1-8b": "llama-3.1-8b", "llama-3.1-70b": "llama-3.1-70b", "llama-3.3-70b": "llama-3.1-70b",
    "qwen3-32b": "qwen3-32b", "qwen3-235b-a22b": "qwen3-235b-a22b", "qwen3-30b-a3b": "qwen3-30b-a3b",
    "gpt-oss-120b": "gpt-oss-120b", "gpt-oss-20b": "gpt-oss-20b", "deepseek-r1": "deepseek-r1",
    "deepseek-v3": "deepseek-v3", "glm-4.5-air": "glm-4.5-air", "glm-4.5": "glm-4.5",
}  # fmt: skip
GPUS = {
    "a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm-80gb", "h200_sxm": "h200-sxm-141gb", "gb200": "gb200",
    "b200_sxm": "b200-sxm-180gb", "gb300": "gb300", "b300_sxm": "b300-sxm", "l40s": "l40s",
}  # fmt: skip
FORMATS = {"bf16": ("bf16", "bf16"), "fp16": ("bf16", "bf16"), "fp8": ("fp8", "fp8"), "fp4": ("nvfp4", "fp8")}
MOST_GPUS = 8
STEP_TOKENS = 8192
ROUNDS, SHORTEST = 10, 0.8  # as InferenceX loads its servers
KNOBS = (
    "memory", "arithmetic", "prompt_arithmetic", "kernels_s", "launches_s", "step_s", "front_s", "exchange_s",
    "exchange",
)  # fmt: skip
FAR = 1.2
TURNS = (1.5, 1 / 1.5, 1.15, 1 / 1.15)
LEAST = {"memory": 1.05, "arithmetic": 1.05, "prompt_arithmetic": 1.05, "exchange": 1.0}


class Row(NamedTuple):
    id: str
    model: str
    gpu: str
    weights: str
    kv: str
    tp: int
    prompt: int
    answer: int
    users: int
    tpot_ms: float
    ttft_ms: float

    @property
    def half(self) -> int:
        return hashlib.sha256(f"{self.tpot_ms:.4f} {self.ttft_ms:.4f}".encode()).digest()[0] % 2


def rows(path: Path) -> list[Row]:
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            named = row["model_path"].lower()
            model = next((key for name, key in MODELS.items() if name in named), None)
            gpu, formats = GPUS.get(row["system"]), FORMATS.get(row["precision"])
            alone = all(row[name] in ("", "1") for name in ("attention_dp_size", "pp_size"))
            if row["mode"] == "agg" and model and gpu and formats and alone and 0 < int(row["tp_size"]) <= MOST_GPUS:
                numbers = (int(row[name]) for name in ("tp_size", "isl", "osl", "batch_size"))
                times = (float(row[f"silicon_{name}_ms"]) for name in ("tpot", "ttft"))
                found.append(Row(row["id"], model, gpu, *formats, *numbers, *times))
    return found


class Server:
    """A row's model on its GPUs, prepared to be asked often. Raises PlannerError where it has no arithmetic for it."""

    def __init__(self, row: Row):
        self.row, self.tp = row, row.tp
        self.arch = catalogue.models()[row.model].architecture
        self.form, self.where = weight_format(row.weights), accelerators.load()[row.gpu]
        self.cache = kv_model(self.arch, kv_format(row.kv), row.tp)
        self.rate = arithmetic(self.where, self.form)[1]
        self.body = 2 * (self.arch.active_matmul_parameters - self.arch.head)
        attention, states = span_flops(self.arch, 1, 1023, decode=True)
        self.pair_flops, self.state_flops = attention / 1024, states

    @cached_property
    def most(self) -> int:
        """Sequences that fit; 0: the weights do not."""
        budget = memory_budget(self.arch, self.form, self.where, Reserve(), tp=self.tp).value
        return max(0, int(budget // self.cache.bytes(self.row.prompt + self.row.answer)))

    def step_s(self, decodes: int, context: float, chunks: list[tuple[int, int]]) -> float:
        tokens = decodes + sum(new for new, _ in chunks)
        kv = decodes * self.cache.bytes(context) + sum(self.cache.bytes(new + before) for new, before in chunks)
        flops = self.body * tokens + 2 * self.arch.head * (decodes + len(chunks))
        flops += decodes * (self.pair_flops * context + self.state_flops)
        flops += sum(sum(span_flops(self.arch, new, before, decode=False)) for new, before in chunks)
        memory_s = (read_bytes(self.arch, self.form, tokens, self.tp) + kv) / self.where.bandwidth_bytes_per_s
        arithmetic_s = flops / self.tp / self.rate
        middle = served.step_s(
            self.arch, self.where, self.tp,
            memory_s=memory_s, arithmetic_s=arithmetic_s, tokens=tokens, prompts=bool(chunks),
        )  # fmt: skip
        return max(memory_s, arithmetic_s, middle)


def play(server: Server, rounds: int = ROUNDS) -> tuple[float, float]:
    """(TPOT, TTFT) in ms, means. A request is [sent, prompt, answer, computed, said, first token]."""
    row, chance, now = server.row, random.Random(0), 0.0

    def request() -> list:
        lengths = [max(2, round(n * chance.uniform(SHORTEST, 1.0))) for n in (row.prompt, row.answer)]
        return [now, *lengths, 0, 0, 0.0]

    waiting, prefilling, decoding = [request() for _ in range(row.users)], [], []
    sent, tpot, ttft = row.users, [], []
    front_s = served.costs(server.arch).front_s
    while waiting or prefilling or decoding:
        room, chunks = STEP_TOKENS - len(decoding), []
        while room > 0 and waiting and len(prefilling) + len(decoding) < server.most:
            prefilling.append(waiting.pop(0))
            room -= prefilling[-1][1]
        room = STEP_TOKENS - len(decoding)
        for one in prefilling:
            if (new := min(room, one[1] - one[3])) > 0:
                chunks.append((one, new))
                room -= new
        count = len(decoding)
        context = sum(one[1] + one[4] for one in decoding) / count if count else 0.0
        steps = 1 if chunks else min(one[2] - one[4] for one in decoding)
        now += steps * server.step_s(count, context + steps / 2, [(new, one[3]) for one, new in chunks])
        for one in decoding:
            one[4] += steps
        for one in [one for one in decoding if one[4] >= one[2]]:
            decoding.remove(one)
            tpot.append((now - one[5]) / (one[2] - 1))
            if sent < row.users * rounds:
                sent += 1
                waiting.append(request())
        for one, new in chunks:
            one[3] += new
            if one[3] >= one[1]:
                prefilling.remove(one)
                one[4], one[5] = 1, now
                ttft.append(now - one[0] + front_s)
                decoding.append(one)
    return 1e3 * statistics.mean(tpot), 1e3 * statistics.mean(ttft)


def _logs(job: tuple[Row, served.Costs, served.Costs, int]) -> tuple[Row, float, float] | None:
    """log(measured / played) of TPOT and TTFT."""
    row, served.DENSE, served.MIXTURE, rounds = job
    try:
        server = Server(row)
    except PlannerError:
        return None
    if not server.most:
        return None
    tpot, ttft = play(server, rounds)
    return row, math.log(row.tpot_ms / tpot), math.log(row.ttft_ms / ttft)


def logs(pool, wanted: list[Row], dense: served.Costs, mixture: served.Costs, rounds: int = ROUNDS) -> list:
    found = pool.map(_logs, [(row, dense, mixture, rounds) for row in wanted], chunksize=4)
    return [one for one in found if one]


def _off(found: list) -> float:
    """What is brought down: the mean distance, TPOT and TTFT alike; who is far off counts no more than `FAR`."""
    return sum(statistics.fmean(min(FAR, abs(one[place])) for one in found) for place in (1, 2))


def fit(pool, wanted: list[Row], costs: served.Costs, kind: str) -> served.Costs:
    def off(candidate: served.Costs) -> float:
        return _off(logs(pool, wanted, candidate, candidate))

    best, turned = off(costs), True
    while turned:
        turned = False
        for knob in KNOBS:
            for turn in TURNS:
                value = max(LEAST.get(knob, 0.0), getattr(costs, knob) * turn)
                candidate = dataclasses.replace(costs, **{knob: value})
                if (found := off(candidate)) < best - 1e-3:
                    best, costs, turned = found, candidate, True
                    print(f"{kind}: {knob} {value:.3g}: off by {best:.4f}", flush=True)
    return costs


def report(found: list, words: str) -> None:
    for place, name in ((1, "TPOT"), (2, "TTFT")):
        for kind, mixture in (("dense", False), ("mixtures", True)):
            own = sorted(
                o[place] for o in found if bool(catalogue.models()[o[0].model].architecture.mixtures) == mixture
            )
            if len(own) < 5:
                continue
            paid = served.MIXTURE if mixture else served.DENSE
            fast, slow = (paid.fast, paid.slow) if name == "TPOT" else (paid.prompt_fast, paid.prompt_slow)
            held = sum(math.log(fast) <= value <= math.log(slow) for value in own) / len(own)
            low, middle, high = (math.exp(own[int(share * (len(own) - 1))]) for share in (0.1, 0.5, 0.9))
            print(
                f"{words}, {name}, {kind}: {len(own)} rows, measured / middle of the band: 10 % {low:.2f}, median "
                f"{middle:.2f}, 90 % {high:.2f}; {held:.0%} within × {fast:g} … {slow:g}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--most", type=int, default=120, help="rows of each kind that are fitted to")
    parser.add_argument("--users", type=int, default=128, help="most at once; more take long to play")
    arguments = parser.parse_args()
    every = [row for row in rows(arguments.file) if row.users <= arguments.users]
    halves = [[row for row in every if row.half == half] for half in (0, 1)]
    with multiprocessing.Pool(os.cpu_count()) as pool:
        if arguments.fit:
            for kind, costs in (("dense", served.DENSE), ("mixture", served.MIXTURE)):
                own = [
                    r for r in halves[0] if bool(catalogue.models()[r.model].architecture.mixtures) == (kind != "dense")
                ]
                print(fit(pool, random.Random(1).sample(own, min(len(own), arguments.most)), costs, kind))
            return
        for half, words in zip(halves, ("fitted half", "other half"), strict=True):
            report(logs(pool, half, served.DENSE, served.MIXTURE), words)


if __name__ == "__main__":
    main()
