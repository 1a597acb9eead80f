"""The courses that lanes are run on: the same requests, engines that differ in one switch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from backend.experiments.bench import Ask, prompts

Kind = Literal["cache", "memory", "preemption", "prefix"]
Size = Literal["small", "full"]

PLAIN = {
    "policy": "continuous",
    "allocator": "paged",
    "kv_cache": True,
    "prefix_cache": False,
    "preemption": "recompute",
    "block_size": 16,
    "max_running": 64,
    "max_waiting": 1024,
    "chunk_size": 256,
    "token_budget": 512,
}


@dataclass(frozen=True)
class Course:
    title: str
    question: str
    odometer: str  # column of the lanes' table that the race is about
    unit: str
    lanes: dict[str, dict[str, Any]]  # name -> switches
    asks: Callable[[Sequence[int], int], list[Ask]]  # (token ids to write with, seed) -> requests
    one_by_one: bool = False  # each waits for the one before; the first only warms up
    expected: dict[str, int] | None = None  # what the odometers must end on, computed
    facts: tuple[str, ...] = ()  # computed, for the screen


def course(kind: Kind, size: Size) -> Course:
    return {"cache": _cache, "memory": _memory, "preemption": _preemption, "prefix": _prefix}[kind](size == "full")


def computations(prompt: int, new: int) -> tuple[int, int]:
    """Token computations for `new` tokens after a prompt, (without, with) a KV cache.

    Without: step i computes all prompt + i - 1 tokens again. With: the prompt once, then one token a step; the last
    token that is said is never computed.
    """
    return new * prompt + new * (new - 1) // 2, prompt + new - 1


def _cache(full: bool) -> Course:
    prompt, new = (100, 1000) if full else (100, 60)
    longest = prompt + new
    without, with_cache = computations(prompt, new)
    at_full = computations(100, 1000)
    return Course(
        "No KV cache against a KV cache",
        f"{new} new tokens after a prompt of {prompt}: how many tokens must be computed?",
        "tokens computed",
        "tokens",
        {
            "no cache": {
                **PLAIN, "kv_cache": False, "max_running": 1, "num_blocks": 16 + longest // 16,
                "max_model_len": longest + 1, "token_budget": max(256, longest + 1),
            },
            "cache": {
                **PLAIN, "max_running": 1, "num_blocks": 16 + longest // 16, "max_model_len": longest + 1,
                "token_budget": max(256, longest + 1),
            },
        },
        lambda alphabet, seed: [Ask(text, new) for text in prompts(alphabet, 1, prompt, seed)],
        expected={"no cache": without, "cache": with_cache},
        facts=(
            f"Computed: without a cache n·S + n(n − 1)/2 = {without:,} for S = {prompt}, n = {new}; with one "
            f"S + n − 1 = {with_cache:,}; {without / with_cache:.0f} × less.",
            f"The same formula for 1,000 new tokens after 100: {at_full[0]:,} against {at_full[1]:,}, "
            f"{at_full[0] / at_full[1]:.0f} × less.",
        ),
    )  # fmt: skip


def _memory(full: bool) -> Course:
    longest, block = (2048, 16) if full else (256, 2)
    count = 24
    switches = {**PLAIN, "num_blocks": 4 * longest // block, "block_size": block, "max_model_len": longest}

    def asks(alphabet: Sequence[int], seed: int) -> list[Ask]:
        lots = random.Random(f"memory {seed}")
        totals = [lots.randint(longest // 5, 2 * longest // 5) for _ in range(count)]
        starts = prompts(alphabet, count, longest // 32, seed)
        return [Ask(text, total - len(text)) for text, total in zip(starts, totals, strict=True)]

    return Course(
        "Reserve the longest, first fit, or pages",
        f"{count} answers of 20–40 % of the {longest} tokens that a request may have, in memory for 4 of the longest: "
        "how much of what is given out is filled?",
        "wasted so far (%)",
        "% of what is given out",
        {
            "reserve": {**switches, "allocator": "reserve"},
            "first fit": {**switches, "allocator": "first-fit"},
            "paged": switches,
        },
        asks,
        facts=(
            f"Computed: 500 tokens in a reservation of 32,768 waste {1 - 500 / 32768:.1%} of it.",
            "Computed: reserving 2,048 tokens for answers of 410–820 wastes 80–60 %; blocks of 16 waste 7.5 slots a "
            "request on average: 1.5 % at 500 tokens, below 4 % only above about 180 tokens.",
            f"Here {block} tokens a block and {longest} in a reservation: the same ratio as 16 and 2,048.",
            "First fit is told the length of each answer beforehand (max_tokens), which real traffic does not tell.",
        ),
    )


def _preemption(full: bool) -> Course:
    prompt, new, count = (512, 256, 8) if full else (96, 64, 8)
    each = -(-(prompt + new) // 16)
    switches = {
        **PLAIN, "num_blocks": count * each * 6 // 10, "max_running": count, "max_model_len": prompt + new + 1,
        "token_budget": 512,
    }  # fmt: skip
    return Course(
        "Preemption: compute again, or swap",
        f"{count} requests of {prompt} + {new} tokens in 60 % of the memory they need: what does giving way cost?",
        "tokens computed",
        "tokens",
        {"recompute": switches, "swap": {**switches, "preemption": "swap"}},
        lambda alphabet, seed: [Ask(text, new) for text in prompts(alphabet, count, prompt, seed)],
        facts=(
            "The prefix cache is off in both lanes: it would keep some blocks of a preempted request alive by chance.",
        ),
    )


def _prefix(full: bool) -> Course:
    shared, own = (1500, 200) if full else (375, 50)
    longest = shared + own + 8
    switches = {**PLAIN, "num_blocks": 8 * -(-longest // 16), "max_running": 8, "max_model_len": longest}

    def asks(alphabet: Sequence[int], seed: int) -> list[Ask]:
        (head,) = prompts(alphabet, 1, shared, seed)
        return [Ask(head + tail, 4) for tail in prompts(alphabet, 5, own, seed + 1)]

    kept = shared // 16 * 16
    return Course(
        "Prefix cache off against on",
        f"Prompts of {shared + own} tokens that begin with the same {shared}: what is left of the prefill?",
        "tokens computed",
        "tokens",
        {"off": switches, "on": {**switches, "prefix_cache": True}},
        asks,
        one_by_one=True,
        facts=(
            f"Computed: whole blocks of the shared prompt, {kept} of {shared + own} tokens, are skipped: "
            f"{kept / (shared + own):.1%}; {1488 / 1700:.1%} for 1,500 of 1,700.",
            "The first request fills the cache; what is compared are the four after it.",
        ),
    )
