"""What every engine is asked: fixed random token ids, so that all of them do the same work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = {
    "decode": "requests at once, as many as --concurrency says",
    "long": "one request with a prompt 8 times as long",
    "shared": "twice the most at once, of mixed length, after one common prefix",
    "prefill": "one prompt 16 times as long, one token of answer",
}
LOWEST_ID = 256  # below it stand special tokens and single bytes in most vocabularies


@dataclass(frozen=True)
class Workload:
    """One job: requests that arrive together."""

    name: str
    kind: str
    title: str
    requests: list[dict]  # [{"tokens": [ids], "output_tokens": n}]
    prefix_tokens: int = 0  # that all prompts begin with

    @property
    def job(self) -> dict:
        return {"name": self.name, "requests": self.requests, "shared_prefix": self.prefix_tokens}

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r["tokens"]) for r in self.requests)

    def prefills(self) -> list[tuple[int, int]]:
        """(new tokens, tokens computed before) of every piece of prompt that must be computed; a common prefix once."""
        common = self.prefix_tokens
        own = [(len(r["tokens"]) - common, common) for r in self.requests]
        return [(common, 0), *own] if common else own

    def decodes(self) -> list[list[tuple[int, int]]]:
        """The same for each step after the prompts: those who still speak, one token each."""
        longest = max(r["output_tokens"] for r in self.requests)
        return [
            [(1, len(r["tokens"]) + step) for r in self.requests if r["output_tokens"] > step + 1]
            for step in range(longest - 1)
        ]


def tokens(rng: random.Random, count: int, vocab: int) -> list[int]:
    lowest = min(LOWEST_ID, vocab // 2)
    return [rng.randrange(lowest, vocab) for _ in range(count)]


def requests(rng: random.Random, count: int, input_tokens: int, output_tokens: int, vocab: int) -> list[dict]:
    """`count` prompts that share no prefix."""
    return [{"tokens": tokens(rng, input_tokens, vocab), "output_tokens": output_tokens} for _ in range(count)]


def workloads(
    kinds: Sequence[str], concurrency: Sequence[int], input_tokens: int, output_tokens: int, vocab: int, seed: int = 1
) -> list[Workload]:
    """No prompt occurs twice: a prefix cache must not answer for an engine, but where the workload is about it."""
    rng = random.Random(seed)
    made = []
    if "decode" in kinds:
        made += [
            Workload(str(n), "decode", f"{n} at once", requests(rng, n, input_tokens, output_tokens, vocab))
            for n in concurrency
        ]
    if "long" in kinds:
        long = 8 * input_tokens
        made.append(Workload("long", "long", f"1 after {long} tokens", requests(rng, 1, long, output_tokens, vocab)))
    if "shared" in kinds:
        count, prefix = 2 * max(concurrency), tokens(rng, 4 * input_tokens, vocab)
        mixed = [
            {
                "tokens": prefix + tokens(rng, rng.randint(max(1, input_tokens // 8), input_tokens), vocab),
                "output_tokens": rng.randint(max(2, output_tokens // 4), output_tokens),
            }
            for _ in range(count)
        ]
        title = f"{count} mixed, {len(prefix)} shared"
        made.append(Workload("shared", "shared", title, mixed, len(prefix)))
    if "prefill" in kinds:
        long = 16 * input_tokens
        made.append(Workload("prefill", "prefill", f"prefill of {long}", requests(rng, 1, long, 1, vocab)))
    return made


def jobs(wanted: Sequence[Workload], input_tokens: int, vocab: int, seed: int = 1) -> list[dict]:
    """A warm-up, whose figures are thrown away, then the workloads."""
    most = max(len(w.requests) for w in wanted if w.kind != "shared" or len(wanted) == 1)
    warm_up = requests(random.Random(seed + 1000), most, input_tokens, 4, vocab)
    return [{"name": "warm-up", "requests": warm_up, "shared_prefix": 0}] + [w.job for w in wanted]
