"""Attaches to an engine that is really there, makes load, and holds what is shown against what the engine itself says.

    python -m benchmarks.attach.real [--kind vllm] [--model smollm2-135m] [--json] [--keep-log FILE]
    python -m benchmarks.attach.real --kind llamacpp --python VENV/bin/python --gguf MODEL.gguf [--json]

vLLM must be installed (the program `vllm` on PATH, or KVSCOPE_VLLM names it); llama.cpp comes as the package xllamacpp,
in the environment whose Python is named. Where the engine is not installed, one line says so and the exit status is 77.

The engine is small on purpose, 64 blocks of 32 tokens: waiting, preemption and eviction happen within seconds.
Witnesses (`witness.py`) read the same server by other means. Each check is one line; the exit status is 1 when one
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from backend.bench import machine
from backend.models import find
from backend.sources import vllm_command
from backend.sources.attach.source import AttachedSource
from backend.sources.attach.target import TargetConfig
from backend.sources.launch import VllmLaunch
from backend.sources.vllm_command import Options
from backend.workload import prompts
from backend.workload.job import Answer, Job
from backend.workload.target import find as find_target
from backend.workload.worker import Worker
from benchmarks.attach.llamacpp import LlamaCpp
from benchmarks.attach.witness import Events, Metrics, Sample, quantile_bounds

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77
BLOCKS, BLOCK_SIZE, CONTEXT = 64, 32, 1024
INTERVAL_S = 0.5
SHARED = f"{prompts.SYSTEM}\n\n"  # the beginning that requests have in common
START_S, QUIET_S, LOST_S = 600.0, 300.0, 60.0
QUANTILES_S = 30.0  # over how long the source takes its quantiles
GAUGES = {
    "vllm": {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_usage": "vllm:kv_cache_usage_perc",
    },
    "llamacpp": {"running": "llamacpp:requests_processing", "waiting": "llamacpp:requests_deferred"},
}
HISTOGRAMS = {
    "ttft_p50_s": ("vllm:time_to_first_token_seconds", 0.5),
    "ttft_p95_s": ("vllm:time_to_first_token_seconds", 0.95),
    "tpot_p50_s": ("vllm:request_time_per_output_token_seconds", 0.5),
    "e2e_p95_s": ("vllm:e2e_request_latency_seconds", 0.95),
}
COUNTERS = {
    "vllm": {"output_tokens": "vllm:generation_tokens_total", "preemptions": "vllm:num_preemptions_total"},
    "llamacpp": {"output_tokens": "llamacpp:tokens_predicted_total"},
}


class Checks:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __call__(self, what: str, ok: bool, detail: Any = "") -> None:
        self.rows.append({"check": what, "ok": bool(ok), "detail": detail})
        print(f"{'ok  ' if ok else 'FAIL'} {what}: {detail}", flush=True)


def until(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    end = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.05)
    return found


class Shown:
    """What the source showed, reading by reading."""

    def __init__(self, source: AttachedSource):
        self.source = source
        self.rows: list[tuple[float, float, dict[str, Any]]] = []  # monotonic: asked, answered; values
        self._last = None

    def look(self) -> None:
        reading = self.source.reading
        if reading is not None and reading is not self._last:
            self._last = reading
            asked = time.monotonic() - (self.source.scraper.clock() - reading.t)
            self.rows.append((asked, asked + reading.scrape_s, reading.values))

    def watch(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        until(lambda: (self.look(), condition())[1], limit_s, what)

    def rest(self) -> None:
        """Two more scrapes, in which nothing happens."""
        seen = len(self.rows)
        self.watch(lambda: len(self.rows) >= seen + 3, 30, "three more scrapes")


def own_requests(source: AttachedSource, shown: Shown, count: int, *, prefix: str, tokens: int) -> dict:
    """As from the cockpit's prompt box, all at once."""
    before = source.hub.read(lambda state: state.totals.finished)
    for question in random.Random(count).sample(prompts.QUESTIONS, count):
        source.client.complete(prefix + question, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        shown.look()
    done = lambda: source.hub.read(lambda state: state.totals.finished) >= before + count  # noqa: E731
    shown.watch(done, QUIET_S, f"{count} own requests")
    rows = source.hub.read(lambda state: [state.requests[number] for number in list(state.ended)[-count:]])
    return {
        "finished": len(rows),
        "output_tokens": sorted({row.output_tokens for row in rows}),
        "ttft_s": sorted(round(row.ttft_s, 3) for row in rows if row.ttft_s is not None),
    }


def open_loop(url: str, shown: Shown, count: int) -> list[Answer]:
    """By the load page's client: a request every 150 ms, whatever the server does, with a shared prefix."""
    target = find_target(url, extra={"temperature": 0.0, "ignore_eos": True})
    requests = [(0.15 * i, 48, 64) for i in range(count)]
    job = Job(
        target=target,
        requests=requests,
        salt="attach",
        prefix=SHARED,
        extra={"temperature": 0.0, "ignore_eos": True},
        drain_s=QUIET_S,
    )
    worker, answers = Worker(), []
    try:
        for said in worker.run(job):
            shown.look()
            if isinstance(said, Answer):
                answers.append(said)
    finally:
        worker.close()
    return answers


def agree(check: Checks, phase: str, kind: str, shown: Shown, metrics: Metrics, begin: float) -> None:
    """Every gauge of every scrape lies among what the witness read from one interval before it to one after."""
    for name, series in GAUGES[kind].items():
        compared, off, most = 0, [], 0.0
        for t, answered, values in shown.rows:
            around = metrics.between(t - INTERVAL_S, answered + INTERVAL_S)
            told = [sample.values[series] for sample in around if series in sample.values]
            ours = values[name].value
            if t < begin or not told or ours is None:
                continue
            compared, most = compared + 1, max(most, ours)
            if not min(told) - 1e-9 <= ours <= max(told) + 1e-9:
                off.append((round(ours, 4), round(min(told), 4), round(max(told), 4)))
        # between two looks of the witness a gauge may pass through a value that it never sees
        check(f"{phase}: {name} within one scrape", compared > 3 and len(off) <= 0.05 * compared,
              f"{compared} scrapes, {len(off)} apart {off[:3]}, most {most:g}")  # fmt: skip


def agree_on_latency(check: Checks, phase: str, shown: Shown, metrics: Metrics, begin: float) -> None:
    t, _, values = shown.rows[-1]
    first = max(begin - 2 * INTERVAL_S, t - QUANTILES_S)
    before = _nearest(metrics.samples, first)
    after = _nearest(metrics.samples, t)
    for name, (histogram, share) in HISTOGRAMS.items():
        ours, theirs = values[name], quantile_bounds(before, after, histogram, share)
        ok = theirs is not None and ours.low is not None and (ours.low, ours.high) == theirs
        detail = f"ours {ours.value and round(ours.value, 4)} in [{ours.low}, {ours.high}], theirs in {theirs}"
        check(f"{phase}: {name} lies in the bucket that the server's own histogram says", ok, detail)


def _nearest(samples: list[Sample], t: float) -> Sample:
    return min(samples, key=lambda sample: abs(sample.t - t))


def agree_on_totals(check: Checks, phase: str, kind: str, source: AttachedSource, first: Sample, last: Sample) -> None:
    totals = source.hub.read(lambda state: {name: getattr(state.totals, name) for name in COUNTERS[kind]})
    for name, series in COUNTERS[kind].items():
        grown = last.values.get(series, 0.0) - first.values.get(series, 0.0)
        check(f"{phase}: {name} since attached", totals[name] == grown, f"ours {totals[name]:g}, theirs {grown:g}")


def agree_on_blocks(check: Checks, phase: str, source: AttachedSource, raw: Events) -> dict[str, int]:
    """The map and the tree against a replay by brute force of the raw messages."""
    missed = raw.fill()
    cache = raw.replayed()
    heard = f"{len(raw.payloads)} batches ({missed} only by replay)"
    try:
        until(lambda: source.kv.resident() == dict(cache.copies), 10, "the same blocks")
    except TimeoutError:
        pass
    same = source.kv.resident() == dict(cache.copies)
    check(f"{phase}: cached hashes", same, f"{cache.copies.total()} copies, at most {cache.most} at once, {heard}")
    source.hub.pump()
    sealed = source.hub.read(lambda state: [cell for cell, full in enumerate(state.blocks.sealed) if full])
    blocks = [source.hub.block(cell) for cell in sealed]
    check(f"{phase}: cells on the map", sorted(block["hash"] for block in blocks) == sorted(cache.copies.elements()),
          f"{len(sealed)} cells")  # fmt: skip
    tree = until(lambda: (told := source.hub.tree()) and told, 5, "the tree")
    nodes = tree["nodes"]
    ours = {row[2]: nodes[row[0]][2] if row[0] >= 0 else "" for row in nodes}
    theirs = {name: above if (above := cache.parent[name]) in cache.copies else "" for name in cache.copies}
    check(f"{phase}: prefix tree", ours == theirs, f"{len(nodes)} nodes, {sum(not up for up in theirs.values())} roots")
    wrong = [b["hash"] for b in blocks if b["text"] and b["text"] != _text(source, cache.tokens[b["hash"]])]
    told = sum(bool(block["text"]) for block in blocks)
    check(f"{phase}: text of cached blocks", not wrong and told == len(blocks), f"{told} of {len(blocks)} blocks")
    return {"stored": cache.stored, "removed": cache.removed, "cleared": cache.cleared, "resident": len(sealed)}


def _text(source: AttachedSource, tokens: list[int]) -> str:
    body = {"model": source.found.model, "tokens": tokens}
    return httpx.post(f"{source.found.base_url}/detokenize", json=body, timeout=30).json()["prompt"]


def follow_vllm(check: Checks, launch: VllmLaunch, options: Options) -> dict:
    begun = time.monotonic()
    launch.start(options)
    started = until(lambda: launch.url or not launch.running, START_S, "vLLM's start")
    if started is True:
        raise SystemExit(f"vLLM did not start: {launch.status.words}")
    url = launch.url
    result: dict[str, Any] = {"start_s": round(time.monotonic() - begun, 1), "command": _plain(launch.shown)}
    said = httpx.get(f"{url}/kv_event_sources").json()["0"]
    raw, metrics = Events(said["endpoint"], said["replay_endpoint"]), Metrics(f"{url}/metrics")
    source = AttachedSource(TargetConfig(url=url, interval_s=INTERVAL_S))
    shown = Shown(source)
    try:
        shown.watch(lambda: source.status.phase == "ready" and len(shown.rows) >= 2, 30, "attached")
        first = _nearest(metrics.samples, shown.rows[0][0])
        found, cells = source.found, source.hub.read(lambda state: (state.num_blocks, state.block_size))
        check(
            "what it is",
            (found.kind, cells) == ("vllm", (BLOCKS - 1, BLOCK_SIZE)),
            f"{found.kind} {found.version}, {cells}",
        )
        result["capabilities"] = {view.view: view.quality for view in found.capabilities}

        begin = time.monotonic()
        result["own_requests"] = own_requests(source, shown, 8, prefix=SHARED, tokens=64)
        shown.rest()
        check("8 own requests have ended", result["own_requests"]["output_tokens"] == [64], result["own_requests"])
        agree(check, "8 requests", "vllm", shown, metrics, begin)
        agree_on_latency(check, "8 requests", shown, metrics, begin)
        result["after_8"] = agree_on_blocks(check, "after 8 requests", source, raw)

        time.sleep(QUANTILES_S + 1)  # so that quantiles are those of the next phase alone
        begin = time.monotonic()
        answers = open_loop(url, shown, 32)
        shown.rest()
        ended = time.monotonic()
        states = sorted({answer.state for answer in answers})
        check("32 streamed requests have ended", len(answers) == 32 and states == ["ok"], f"{len(answers)} {states}")
        agree(check, "32 requests", "vllm", shown, metrics, begin)
        if ended - begin < QUANTILES_S - 2:
            agree_on_latency(check, "32 requests", shown, metrics, begin)
        agree_on_totals(check, "32 requests", "vllm", source, first, metrics.samples[-1])
        result["client_ttft_s"] = [round(a.times_s[0] - a.arrival_s, 3) for a in answers if a.times_s]
        result["after_32"] = agree_on_blocks(check, "after 32 requests", source, raw)

        idle = source.hub.read(lambda s: (s.pool.used_blocks, s.pool.resident_blocks))
        check("requests end, the cache remains", idle[0] == 0 and idle[1] > 0, f"{idle[0]} used, {idle[1]} cached")
        source.client.reset()
        source.client.complete("Good morning.", max_tokens=4)  # vLLM tells of the reset with its next batch
        shown.watch(lambda: raw.replayed().cleared > 0 and not source.hub.read(lambda s: s.in_flight), 30, "the reset")
        shown.rest()
        result["after_reset"] = agree_on_blocks(check, "after the reset", source, raw)

        restarted(check, launch, options, source, shown)
    finally:
        source.close()
        raw.close()
        metrics.close()
    result["scrapes"] = len(shown.rows)
    result["scrape_s"] = {"last": source.reading.scrape_s, "bytes": source.reading.bytes}
    return result


def _plain(command: str) -> str:
    """Without this machine's paths."""
    return command.replace(vllm_command.find() or "vllm", "vllm").replace(str(Path.home()), "~")


def restarted(check: Checks, launch: VllmLaunch, options: Options, source: AttachedSource, shown: Shown) -> None:
    """Killed and started again at the same address."""
    port = int(launch.url.rpartition(":")[2])
    before, epoch = len(shown.rows), source.hub.read(lambda state: state.epoch)
    server = next(p for p in psutil.process_iter(["cmdline"]) if str(port) in (p.info["cmdline"] or ()) and
                  "serve" in p.info["cmdline"] and "leash.py" not in " ".join(p.info["cmdline"]))  # fmt: skip
    server.send_signal(signal.SIGKILL)
    shown.watch(lambda: source.status.phase == "dead", LOST_S, "the loss is noticed")
    check("a killed server is a state with words", "127.0.0.1" in source.status.message, source.status.message)
    launch.stop()
    launch.start(options, port=port)
    until(lambda: launch.url or not launch.running, START_S, "vLLM's second start")
    shown.watch(lambda: source.status.phase == "ready", LOST_S, "attached again")
    seen = len(shown.rows)
    source.client.complete(f"{SHARED}Hello.", max_tokens=48, ignore_eos=True)
    shown.watch(lambda: not source.hub.read(lambda s: s.in_flight) and len(shown.rows) > seen + 3, 60, "a request")
    shown.rest()
    check("attached again by itself", source.hub.read(lambda state: state.epoch) != epoch, "a new epoch")
    numbers = [
        value.value for _, _, values in shown.rows[before:] for value in values.values() if value.value is not None
    ]
    check(
        "no number is negative", all(number >= 0 for number in numbers), f"{len(numbers)} numbers, least {min(numbers)}"
    )
    check("the restart is counted", source.reading.restarts == 1, source.reading.restarts)
    said = httpx.get(f"{launch.url}/kv_event_sources").json()["0"]
    raw = Events(said["endpoint"], said["replay_endpoint"])
    try:
        agree_on_blocks(check, "after the restart", source, raw)
    finally:
        raw.close()


def follow_llamacpp(check: Checks, python: str, gguf: str) -> dict:
    server = LlamaCpp(python, gguf)
    metrics = source = None
    try:
        url = until(server.url, 60, "llama.cpp's start")
        metrics = Metrics(f"{url}/metrics")
        source = AttachedSource(TargetConfig(url=url, interval_s=INTERVAL_S))
        shown = Shown(source)
        shown.watch(lambda: source.status.phase == "ready" and len(shown.rows) >= 2, 30, "attached")
        first = _nearest(metrics.samples, shown.rows[0][0])
        check("what it is", source.found.kind == "llamacpp", f"{source.found.title} {source.found.version}")
        result: dict[str, Any] = {"capabilities": {view.view: view.quality for view in source.found.capabilities}}
        begin = time.monotonic()
        result["own_requests"] = own_requests(source, shown, 8, prefix="", tokens=24)
        shown.rest()
        check("8 own requests have ended", result["own_requests"]["output_tokens"] == [24], result["own_requests"])
        agree(check, "8 requests", "llamacpp", shown, metrics, begin)
        agree_on_totals(check, "8 requests", "llamacpp", source, first, metrics.samples[-1])
        absent = {name: value.note for name, value in shown.rows[-1][2].items() if value.value is None}
        check(
            "what it does not tell has a reason",
            all(absent.values()) and "kv_usage" in absent,
            f"{len(absent)} numbers",
        )
        result["told"] = {name: value.name for name, value in shown.rows[-1][2].items() if value.value is not None}
        server.close()
        shown.watch(lambda: source.status.phase == "dead", LOST_S, "the loss is noticed")
        check("a server that is gone is a state with words", bool(source.status.message), source.status.message)
        return result
    finally:
        if source is not None:
            source.close()
        if metrics is not None:
            metrics.close()
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", choices=["vllm", "llamacpp"], default="vllm")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--python", default=sys.executable, help="of the environment with xllamacpp")
    parser.add_argument("--gguf", default="", help="model for llama.cpp")
    parser.add_argument("--json", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--keep-log", type=Path, help="write the server's log there")
    given = parser.parse_args()
    check, launch = Checks(), VllmLaunch()
    load = machine.load_average()
    try:
        if given.kind == "llamacpp":
            if not (given.gguf and LlamaCpp.installed(given.python)):
                print("skipped: name a Python that has xllamacpp with --python, and a GGUF file with --gguf")
                return SKIPPED
            found = follow_llamacpp(check, given.python, given.gguf)
        else:
            if vllm_command.find() is None:
                print(f"skipped: vLLM is not installed here (no program vllm on PATH, {vllm_command.VLLM} is not set)")
                return SKIPPED
            os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
            options = Options(
                model=str(find.path(given.model)),
                name=given.model,
                block_size=BLOCK_SIZE,
                num_blocks=BLOCKS,
                max_model_len=CONTEXT,
                enforce_eager=True,
            )
            found = follow_vllm(check, launch, options)
    finally:
        if given.keep_log:
            given.keep_log.write_text("\n".join(launch.status.lines) + "\n")
        launch.stop()
    failed = [row["check"] for row in check.rows if not row["ok"]]
    result = {
        "what": f"attach_{given.kind}",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "load_average": [load, machine.load_average()],
        "checks": check.rows,
        "failed": failed,
        **found,
    }
    if given.json:
        path = ROOT / "benchmarks" / "results" / f"attach-{given.kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"kept as {path.relative_to(ROOT)}")
    print(f"{len(check.rows) - len(failed)} of {len(check.rows)} checks hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
