"""How long prompts and answers are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

from backend.workload.arrivals import LoadError

MAX_TOKENS = 131_072  # of a prompt or an answer
MAX_OUTPUT_TOKENS = 5_000_000  # of a whole run: the time of each is kept


class Lengths(StrEnum):
    """fixed: all the same. uniform: up to twice as long, from one token on. sharegpt: people's first questions."""

    fixed = "fixed"
    uniform = "uniform"
    sharegpt = "sharegpt"


# (prompt, answer) in tokens of SmolLM2: one conversation of each percentile of prompt length, drawn from 6,000 of the
# first 17,400 in ShareGPT_V3_unfiltered_cleaned_split.json. First question and first answer, and the limits of
# `vllm bench serve`: 4 to 1,024 in, at least 4 out, at most 2,048 together. Means 238 and 217 (of all: 238 and 214),
# correlation -0.31 (-0.30). The vLLM paper's Figure 11 has means of 161 and 338 with OPT's tokenizer.
SHAREGPT = (
    (4, 118), (5, 303), (6, 251), (6, 651), (7, 559), (8, 216), (9, 232), (9, 341), (10, 183), (10, 377), (11, 74),
    (12, 108), (12, 163), (13, 162), (13, 247), (14, 32), (14, 439), (15, 67), (15, 480), (16, 745), (17, 455),
    (17, 457), (18, 584), (20, 29), (20, 528), (21, 170), (22, 228), (23, 297), (25, 62), (26, 278), (28, 81),
    (29, 374), (30, 134), (33, 178), (35, 363), (38, 20), (41, 124), (43, 154), (44, 194), (49, 624), (54, 52),
    (55, 667), (61, 34), (65, 491), (70, 21), (79, 298), (85, 425), (92, 198), (105, 390), (108, 61), (120, 462),
    (126, 13), (133, 516), (149, 36), (161, 151), (187, 122), (191, 608), (202, 259), (221, 38), (225, 993), (243, 9),
    (255, 4), (257, 661), (275, 334), (283, 49), (299, 9), (307, 271), (317, 121), (326, 37), (332, 25), (352, 280),
    (358, 41), (368, 11), (372, 14), (383, 22), (394, 15), (411, 13), (432, 16), (434, 48), (448, 39), (465, 11),
    (486, 29), (509, 133), (517, 62), (541, 19), (562, 18), (577, 1007), (608, 49), (628, 119), (642, 727), (680, 341),
    (706, 17), (737, 9), (749, 56), (793, 95), (828, 5), (846, 21), (897, 5), (918, 4), (982, 8),
)  # fmt: skip


def draw(kind: Lengths, count: int, input_tokens: int, output_tokens: int, seed: int = 0) -> list[tuple[int, int]]:
    """`count` pairs (prompt tokens, answer tokens), the same for the same seed.

    For `sharegpt` the pairs come from the table, and `input_tokens` and `output_tokens` are the most that one may have.
    Raises LoadError.
    """
    for name, tokens in (("input", input_tokens), ("output", output_tokens)):
        if not 1 <= tokens <= MAX_TOKENS:
            raise LoadError(f"{tokens:,} {name} tokens: give 1 to {MAX_TOKENS:,}")
    lots = random.Random(f"{seed} lengths")
    if kind is Lengths.fixed:
        pairs = [(input_tokens, output_tokens)] * count
    elif kind is Lengths.uniform:
        pairs = [(lots.randint(1, 2 * input_tokens - 1), lots.randint(1, 2 * output_tokens - 1)) for _ in range(count)]
    else:
        pairs = [(min(i, input_tokens), min(o, output_tokens)) for i, o in lots.choices(SHAREGPT, k=count)]
    check_work(pairs)
    return pairs


def check_work(pairs: Sequence[tuple[int, int]]) -> None:
    """Raises LoadError for a run with more output tokens than times can be kept of."""
    tokens = sum(output for _, output in pairs)
    if tokens > MAX_OUTPUT_TOKENS:
        raise LoadError(
            f"this run would ask for {tokens:,} output tokens, and the time of each is kept; at most "
            f"{MAX_OUTPUT_TOKENS:,}: fewer requests or shorter answers"
        )
