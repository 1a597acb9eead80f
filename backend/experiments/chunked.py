"""A long prompt arrives among decoders: what it does to their inter-token latency, whole or in chunks."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from backend.events import Step
from backend.experiments import Experiment, ExperimentError, Number, Partial, Progress, Result
from backend.experiments.bench import Ask, Bench, Run, prompts
from backend.sources.remote import EngineClient

NAME = "chunked prefill"
WHOLE = 0  # as a chunk size: the prompt in one step
WARM_STEPS = 16  # decode steps before the newcomer arrives
AFTER_STEPS = 16  # and after it said its first token
ITL_RULE = (
    "ITL: time from one token of a decoder to its next, read off the engine's steps; each decoder says one token in "
    "every step, so all have the same. Worst: the largest from the newcomer's arrival to its first token. "
    "The engine waits for it between two steps; that pause is left out."
)


@dataclass(frozen=True)
class Settings:
    chunks: tuple[int, ...] = (WHOLE, 512, 128)
    decoders: int = 8
    prompt_tokens: int = 1024  # of the newcomer
    seed: int = 0

    def check(self) -> None:
        if not 1 <= self.decoders <= 256:
            raise ExperimentError(f"decoders must be between 1 and 256, not {self.decoders}")
        if not 16 <= self.prompt_tokens <= 100_000:
            raise ExperimentError(f"the newcomer's prompt must have 16 to 100,000 tokens, not {self.prompt_tokens}")
        if not self.chunks or not all(chunk == WHOLE or chunk >= 8 for chunk in self.chunks):
            raise ExperimentError("chunks must have 8 tokens or more")


@dataclass
class _Lane:
    gaps: list[tuple[float, float, int]] = field(default_factory=list)  # (time since arrival, ITL, prompt tokens in it)
    ttft_s: float | None = None


def chunked(client: EngineClient, settings: Settings) -> Experiment:
    settings.check()
    lanes: dict[int, _Lane] = {}
    chunks = list(dict.fromkeys(settings.chunks))
    with Bench(client, _switches(settings, chunks[0])) as bench:
        alphabet = bench.alphabet
        started = time.monotonic()
        for index, chunk in enumerate(chunks):
            left = (time.monotonic() - started) / index * (len(chunks) - index) if index else None
            note = f"{_words(chunk)} into {settings.decoders} decoders"
            yield Progress(index, len(chunks), left, note)
            bench.configure(_switches(settings, chunk))
            lane = _Lane()
            for share in _run(bench, alphabet, settings, chunk, lane):
                yield Progress(index + share, len(chunks), left, note)
            lanes[chunk] = lane
            yield Partial(_result(settings, lanes, bench))
    return _result(settings, lanes, bench)


def _switches(settings: Settings, chunk: int) -> dict[str, Any]:
    chunk = chunk or settings.prompt_tokens
    output = _decode_steps(settings)
    longest = max(settings.prompt_tokens + 2, 8 + output)
    return {
        "policy": "continuous",
        "allocator": "paged",
        "kv_cache": True,
        "prefix_cache": False,
        "preemption": "recompute",
        "block_size": 16,
        "num_blocks": (settings.decoders + 1) * -(-(longest + 1) // 16) + 1,
        "max_running": settings.decoders + 1,
        "chunk_size": chunk,
        # Room for the chunk beside the decoders, so that the chunk size alone decides.
        "token_budget": max(chunk, 8 * settings.decoders) + settings.decoders,
        "max_model_len": longest + 1,
    }


def _decode_steps(settings: Settings) -> int:
    """Tokens a decoder says: enough for the longest way of bringing the prompt in."""
    smallest = min((chunk for chunk in settings.chunks if chunk), default=settings.prompt_tokens)
    return WARM_STEPS + -(-settings.prompt_tokens // smallest) + AFTER_STEPS + 4


def _run(bench: Bench, alphabet: list[int], settings: Settings, chunk: int, lane: _Lane):
    """Fills `lane`; yields the share done."""
    output = _decode_steps(settings)
    texts = prompts(alphabet, settings.decoders, 8, settings.seed)
    (long,) = prompts(alphabet, 1, settings.prompt_tokens, settings.seed + 1)
    decoders = [Ask(text, output, user=f"decoder {i + 1}") for i, text in enumerate(texts)]
    run = bench.start(decoders, pause_after=WARM_STEPS)  # the newcomer comes after the same step in every run
    newcomer: Run | None = None
    arrived = before = None
    steps = 0
    for event in bench.watch(run):
        if isinstance(event, Step):
            steps += 1
            if before is not None:
                lane.gaps.append((event.t, event.t - before, sum(tokens for _, tokens, _ in event.prefill)))
            before = event.t
            if steps == WARM_STEPS:
                newcomer = bench.send([Ask(long, 2, user="newcomer")])
            yield steps / (output + 1)
        elif event is None:
            yield steps / (output + 1)
        if newcomer is not None and newcomer.index_of and arrived is None:
            arrived = event.t  # of "queued"
            bench.hold(0)
    # The step that was held waited for the newcomer to be sent, which is not the engine's doing.
    if newcomer is None or arrived is None:
        raise ExperimentError("the decoders ended before the newcomer came")
    for _ in bench.watch(newcomer):
        pass
    lane.ttft_s = newcomer.finished[0].ttft_s
    waited = min((gap for gap in lane.gaps if gap[0] > arrived), default=None)
    lane.gaps = [(t - arrived, itl, tokens) for t, itl, tokens in lane.gaps if (t, itl, tokens) != waited]
    if waited is not None:  # from its arrival, not from the step before
        lane.gaps.append((waited[0] - arrived, waited[0] - arrived, waited[2]))
    lane.gaps.sort()


def _words(chunk: int) -> str:
    return f"chunks of {chunk}" if chunk else "the whole prompt"


def _result(settings: Settings, lanes: dict[int, _Lane], bench: Bench) -> Result:
    rows, gaps = [], []
    for chunk, lane in lanes.items():
        quiet = statistics.median(itl for t, itl, _ in lane.gaps if t < 0)
        disturbed = [itl for t, itl, tokens in lane.gaps if t >= 0 and tokens]
        rows.append(
            {
                "prefill": _words(chunk),
                "chunk (tokens)": chunk or settings.prompt_tokens,
                "median ITL before (ms)": quiet * 1e3,
                "worst ITL (ms)": max(disturbed) * 1e3,
                "worst ÷ before": max(disturbed) / quiet,
                "steps with prompt tokens": len(disturbed),
                "newcomer's TTFT (ms)": lane.ttft_s * 1e3,
            }
        )
        gaps += [
            {
                "prefill": _words(chunk),
                "time since arrival (ms)": t * 1e3,
                "ITL (ms)": itl * 1e3,
                "prompt tokens in the step": tokens,
            }
            for t, itl, tokens in lane.gaps
        ]
    notes = [ITL_RULE, "TTFT of the newcomer: from its arrival to its first token."]
    if bench.strangers:
        notes.append(f"{bench.strangers} requests of others came in meanwhile: these numbers are not clean.")
    return Result(
        NAME, pd.DataFrame(rows), _numbers(rows), notes, {"tokens": pd.DataFrame(gaps)}, asdict(settings),
        dict(bench.machine),
    )  # fmt: skip


def _numbers(rows: list[dict[str, Any]]) -> list[Number]:
    if len(rows) < 2:
        return []
    whole, finest = max(rows, key=lambda r: r["chunk (tokens)"]), min(rows, key=lambda r: r["chunk (tokens)"])
    return [
        Number(f"worst ITL, {whole['prefill']}", whole["worst ITL (ms)"], "ms", "measured", ITL_RULE),
        Number(f"worst ITL, {finest['prefill']}", finest["worst ITL (ms)"], "ms", "measured", ITL_RULE),
        Number(
            "the spike is cut by",
            whole["worst ITL (ms)"] / finest["worst ITL (ms)"],
            "×",
            "measured",
            f"worst ITL, {whole['prefill']} ÷ {finest['prefill']}",
        ),
        Number(
            "newcomer's TTFT grows by",
            finest["newcomer's TTFT (ms)"] / whole["newcomer's TTFT (ms)"],
            "×",
            "measured",
            f"TTFT, {finest['prefill']} ÷ {whole['prefill']}",
        ),
    ]
