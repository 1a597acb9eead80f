"""From a bound to what servers reach: measured / bound over public measurements of vLLM, SGLang and TensorRT-LLM.

A bound stays a bound; what is made here is an estimate, with the range in which 8 of 10 measurements lay. The table is
1,970 rows of measured TPOT and TTFT (Llama 8B and 70B, Qwen3-32B and 235B, gpt-oss-120b, DeepSeek-R1 on H100, H200,
B200 and GB200) divided by the bounds of this planner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backend.planner.results import Result


@dataclass(frozen=True)
class Band:
    """Measured / bound: the middle and the range of 8 in 10."""

    median: float
    low: float
    high: float
    words: str


SOURCE = "measured / bound over 1,970 public measurements (vLLM, SGLang, TensorRT-LLM on H100, H200, B200, GB200)"
# Dense, batch up to 8, by GPUs in the tensor-parallel group: median, 10 % and 90 %.
_DENSE_SMALL = {1: (1.74, 1.44, 2.35), 2: (2.16, 1.64, 3.58), 4: (3.0, 2.2, 5.1), 8: (4.8, 3.4, 8.8)}
# For the others only medians were recorded.
_DENSE_LARGE = {1: 2.2, 2: 2.6, 4: 3.7, 8: 5.8}  # batch 16 to 64, prompts of others in between
_MIXTURE_SMALL = {1: 2.6, 8: 4.3}  # batch up to 8
_MIXTURE_LARGE = {1: 1.6, 8: 2.6}  # batch 32 to 128
_PREFILL = (3.7, 2.2)  # median and 10 % of TTFT / bound at batch ≤ 4 and 8,192 prompt tokens
SMALL_BATCH = 8
# Arithmetic of prompt tokens in a step of their own: 54 to 72 % of the data sheet's rate in a matrix product (kipply,
# transformer inference arithmetic), 57 % end to end (Qwen2.5-72B on two H100, prompts of 8,192 tokens).
_MATRIX_SHARE = (0.57, 0.72)


def decode_band(mixture: bool, batch: int, tp: int) -> Band:
    """Where no range was recorded, the one of the dense small-batch rows is laid around the median."""
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


def prefill_band() -> Band:
    """Of a prompt that waits for nobody. A busy server's TTFT is its queue's, and no factor on a bound tells it."""
    middle, low = _PREFILL
    words = (
        "TTFT at batch up to 4 and 8,192 prompt tokens, not waiting for other prompts; short prompts and mixtures pay "
        "more for fixed costs. Upper end mirrored, only the lower one was recorded"
    )
    return Band(middle, low, middle * middle / low, words)


def played_decode_band(mixture: bool, batch: int, tp: int) -> Band:
    """For an engine that plays every step: what was recorded at large batch has other people's prompts in it, which are
    steps of their own there, so dense models keep the small batch's band."""
    return decode_band(mixture, batch if mixture else 1, tp)


def played_prompt_band() -> Band:
    """The same for the arithmetic of prompts: waiting is played too, so TTFT's band would count it twice. Its slow end
    is the middle of what servers' TTFT showed."""
    typical, fast = _MATRIX_SHARE
    words = "share of the data sheet's rate in matrix products, 57 % end to end, 72 % at best"
    return Band(1 / typical, 1 / fast, _PREFILL[0], words)


def time_estimate(bound: Result, band: Band) -> Result:
    """Bound × experience."""
    value = bound.value * band.median
    formula = f"bound {bound.value:.4g} {bound.unit} × {band.median:.3g} ({band.low:.3g} … {band.high:.3g})"
    return Result(
        value, bound.unit, "estimate", bound.terms, formula, f"{SOURCE}: {band.words}",
        low=bound.value * band.low, high=bound.value * band.high,
    )  # fmt: skip


def rate_estimate(bound: Result, band: Band) -> Result:
    """A ceiling / experience: slow machines are at the low end."""
    formula = f"ceiling {bound.value:,.4g} {bound.unit} / {band.median:.3g} ({band.low:.3g} … {band.high:.3g})"
    return Result(
        bound.value / band.median, bound.unit, "estimate", bound.terms, formula, f"{SOURCE}: {band.words}",
        low=bound.value / band.high, high=bound.value / band.low,
    )  # fmt: skip
