"""This project's engine, driven in-process as a library."""

import time

import protocol
import torch
import transformers

from backend.engine.build import build
from backend.engine.kernels import Kernels
from backend.engine.request import SamplingParams
from backend.events import Step
from backend.models.loader import load

STEP_FIELDS = ("step_s", "schedule_s", "build_s", "forward_s", "sample_s", "output_s")


def main() -> None:
    order = protocol.start()
    torch.set_num_threads(order["threads"])
    events = []
    loaded = load(order["model"], dtype=order["dtype"])
    torch.set_num_threads(order["threads"])  # whatever loading set: all engines get the same
    at_once = max(len(job["requests"]) for job in order["jobs"])
    switches = {"max_running": max(64, at_once), **order.get("options", {})}
    # attention: native or reference, linear: packed or plain, fusion: fused or plain; else what `serve` would take.
    kernels = Kernels(
        **{name: switches.pop(name) for name in ("attention", "linear", "fusion", "cuda_graphs") if name in switches}
    )
    engine = build(loaded, switches, events.append, kernels)
    ready = {"engine": "KVScope", "version": transformers.__version__, "torch": str(torch.__version__)}
    ready |= {"threads": torch.get_num_threads(), "options": order.get("options", {})}
    protocol.say({"ready": ready})
    for job in order["jobs"]:
        times, tokens, steps = run(engine, job["requests"], events)
        protocol.job_done(job["name"], times, tokens, steps)


def run(engine, requests: list[dict], events: list) -> tuple[list, list, list]:
    """Submits all at once and steps until the engine is idle."""
    events.clear()
    steps = []
    start = time.perf_counter()
    numbers = []
    for number, request in enumerate(requests):
        params = SamplingParams(max_tokens=request["output_tokens"], temperature=0.0, ignore_eos=True)
        numbers.append(engine.submit(request["tokens"], params, id=str(number))[0].number)
    times, tokens = {n: [] for n in numbers}, {n: [] for n in numbers}
    while not engine.idle:
        before = time.perf_counter()
        deltas = engine.step()
        after = time.perf_counter()
        now = after - start
        for delta in deltas:
            if delta.finish_reason == "error":
                raise SystemExit(delta.message)
            times[delta.request] += [now] * len(delta.token_ids)
            tokens[delta.request] += delta.token_ids
        steps += [row(event, len(deltas), after - before) for event in events if isinstance(event, Step)]
        events.clear()
    return [times[n] for n in numbers], [tokens[n] for n in numbers], steps


def row(event: Step, rows: int, whole_s: float) -> dict:
    """What the breakdown needs of a step in which `rows` requests got a token; `whole_s`: with events."""
    told = {name: getattr(event, name) for name in STEP_FIELDS}
    return told | {"events_s": max(0.0, whole_s - event.step_s), "prefill": len(event.prefill), "rows": rows}


if __name__ == "__main__":
    main()
