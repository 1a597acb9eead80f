"""From a bound to what servers reach: measured / bound over public measurements of vLLM, SGLang and TensorRT-LLM.

A bound stays a bound; what is made here is an estimate, with the range in which 8 of 10 measurements lay. The table is
1,970 rows of measured TPOT and TTFT (Llama 8B and 70B, Qwen3-32B and 235B, gpt-oss-120b, DeepSeek-R1 on H100, H200,
B200 and GB200) divided by the bounds of this planner. What an engine's single steps take, prompts and waiting apart,
is in `served`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backend.planner.results import Result, Term


@dataclass(frozen=True)
class Band:
    """Measured / bound: the middle and the range of 8 in 10."""

    median: float
    low: float
    high: float
    words: str

    @property
    def source(self) -> str:
        return f"{SOURCE}: {self.words}"

    def stretched(self, terms: tuple[Term, ...]) -> float:
        """What the factors are of, as a multiple of the bound that has these terms."""
        return 1.0


class OwnBand(Band):
    """Against ceilings that were measured, not printed: no data sheet and no server is in it. Of reading and arithmetic
    one after the other, where the bound lets them overlap: two cores fetch and multiply by turns."""

    @property
    def source(self) -> str:
        return self.words

    def stretched(self, terms: tuple[Term, ...]) -> float:
        *read_s, arithmetic_s = (term.value for term in terms)
        return (sum(read_s) + arithmetic_s) / max(sum(read_s), arithmetic_s)


SOURCE = "measured / bound over 1,970 public measurements (vLLM, SGLang, TensorRT-LLM on H100, H200, B200, GB200)"
# Dense, batch up to 8, by GPUs in the tensor-parallel group: median, 10 % and 90 %.
_DENSE_SMALL = {1: (1.74, 1.44, 2.35), 2: (2.16, 1.64, 3.58), 4: (3.0, 2.2, 5.1), 8: (4.8, 3.4, 8.8)}
# For the others only medians were recorded.
_DENSE_LARGE = {1: 2.2, 2: 2.6, 4: 3.7, 8: 5.8}  # batch 16 to 64, prompts of others in between
_MIXTURE_SMALL = {1: 2.6, 8: 4.3}  # batch up to 8
_MIXTURE_LARGE = {1: 1.6, 8: 2.6}  # batch 32 to 128
_PREFILL = (3.7, 2.2)  # median and 10 % of TTFT / bound at batch ≤ 4 and 8,192 prompt tokens
SMALL_BATCH = 8
# This engine's steps, by ceilings of the same machine and hour: SmolLM2-135M on two cores of an AMD EPYC, bfloat16
# stored and float32 computed, batches 1 to 32, contexts 128 to 1,024, prompts up to 2,048 tokens: 0.96 to 1.45 in hours
# of different noise (`benchmarks/modelled_against_engine.py`, `python -m backend bench`). A tenth is left for others.
_OWN = OwnBand(
    1.2,
    0.9,
    1.6,
    "measured / (bytes / bandwidth + FLOPs / rate) of KVScope's own engine on a CPU, by measured ceilings",
)


def decode_band(mixture: bool, batch: int, tp: int, *, measured: bool = False) -> Band:
    """Where no range was recorded, the one of the dense small-batch rows is laid around the median. `measured`: the
    bound is by ceilings that were measured on the machine itself."""
    if measured:
        return _OWN
    known = min((1, 2, 4, 8), key=lambda n: abs(math.log(n / tp)))
    middle, low, high = _DENSE_SMALL[known]
    if not mixture and batch <= SMALL_BATCH:
        return Band(middle, low, high, f"dense models, batch up to 8, {known} GPU{'s' * (known > 1)}")
    if mixture:
        table = _MIXTURE_SMALL if batch <= SMALL_BATCH else _MIXTURE_LARGE
        median = table[1] * (table[8] / table[1]) ** (math.log2(known) / 3)
        what = f"mixtures of experts, batch {'up to 8' if batch <= SMALL_BATCH else '32 to 128'}"
    else:
        median, what = _DENSE_LARGE[known], "dense models, batch 16 to 64"
    words = f"{what}, {known} GPU{'s' * (known > 1)}; range as of dense models at small batch"
    return Band(median, median * low / middle, median * high / middle, words)


def prefill_band(*, measured: bool = False) -> Band:
    """Of a prompt that waits for nobody. A busy server's TTFT is its queue's, and no factor on a bound tells it."""
    if measured:
        return _OWN
    middle, low = _PREFILL
    words = (
        "TTFT at batch up to 4 and 8,192 prompt tokens, not waiting for other prompts; short prompts and mixtures pay "
        "more for fixed costs. Upper end mirrored, only the lower one was recorded"
    )
    return Band(middle, low, middle * middle / low, words)


def time_estimate(bound: Result, band: Band) -> Result:
    """Bound × experience."""
    stretched = band.stretched(bound.terms)
    base = bound.value * stretched
    what = "bound" if stretched == 1 else f"{' + '.join(term.name for term in bound.terms)}, one after the other,"
    formula = f"{what} {base:.4g} {bound.unit} × {band.median:.3g} ({band.low:.3g} … {band.high:.3g})"
    return Result(
        base * band.median, bound.unit, "estimate", bound.terms, formula, band.source,
        low=max(bound.value, base * band.low), high=base * band.high,
    )  # fmt: skip


def rate_estimate(bound: Result, band: Band) -> Result:
    """A ceiling / experience: slow machines are at the low end."""
    stretched = band.stretched(bound.terms)
    base = bound.value / stretched
    what = "ceiling" if stretched == 1 else "reading and arithmetic one after the other:"
    formula = f"{what} {base:,.4g} {bound.unit} / {band.median:.3g} ({band.low:.3g} … {band.high:.3g})"
    return Result(
        base / band.median, bound.unit, "estimate", bound.terms, formula, band.source,
        low=base / band.high, high=min(bound.value, base / band.low),
    )  # fmt: skip
