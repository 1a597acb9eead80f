"""What one engine step must compute and move, counted from the model's shape and the step's spans.

Pure integers, no torch: the engine calls this after every step, pages call it to draw a step that never ran.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from backend.planner.shape import ModelShape


class StepCost(NamedTuple):
    linear_flops: int
    attention_flops: int
    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    activation_bytes: int

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes

    @property
    def flop_per_byte(self) -> float:
        """Arithmetic intensity; 0 for an empty step."""
        return self.flops / self.bytes if self.bytes else 0.0


class Costs(Protocol):
    """What knows how much a step computes and moves: a `ModelShape`, or what stands for one."""

    @property
    def kv_bytes_per_token(self) -> int: ...

    def step_cost(self, spans: Iterable[tuple[int, int]], sampled_rows: int) -> StepCost: ...


NOTHING = StepCost(0, 0, 0, 0, 0, 0)


def step_cost(shape: ModelShape, spans: Iterable[tuple[int, int]], sampled_rows: int) -> StepCost:
    """FLOPs and bytes of one step. `spans`: (new tokens ≥ 1, tokens of that sequence already in the cache), one for
    each sequence; `sampled_rows`: rows that the head turns into logits.

    Rules (with T new tokens in all; c new tokens after o cached ones in a span):
    - a multiply-add is 2 FLOPs; linear = 2·(matrices without head)·T + 2·head·rows; biases and norms are left out;
    - attention is causal: new token i sees o+i+1 tokens, at most `window`; c·o + c(c+1)/2 pairs without a window;
    - weights are read once a step, whatever T (of experts: those that T tokens are expected to touch);
    - K and V of every token that a span attends are read once for the span and the step, the new ones included, also
      where sequences share blocks; a windowed layer reads the last c + window - 1 at most;
    - K and V of the new tokens are written once; activations as in `ModelShape.token_activation_elements`, and for a
      sampled row its hidden state read and its logits written.
    """
    tokens = doubled_pairs = attended = 0
    spans = spans if isinstance(spans, (list, tuple)) else list(spans)
    for new, before in spans:
        tokens += new
        attended += before + new
        doubled_pairs += new * (before + before + new + 1)
    if not tokens:
        return NOTHING
    attention_flops = kv_read_bytes = 0
    for window, flops_per_pair, bytes_per_token in shape.by_window:
        if window is None:
            attention_flops += flops_per_pair * doubled_pairs // 2
            kv_read_bytes += bytes_per_token * attended
        else:
            pairs, read = _windowed(spans, window)
            attention_flops += flops_per_pair * pairs
            kv_read_bytes += bytes_per_token * read
    head = shape.head_parameters
    rows_elements = sampled_rows * (shape.hidden + shape.vocab)
    return StepCost(
        2 * (shape.active_matmul_parameters - head) * tokens + 2 * head * sampled_rows,
        attention_flops,
        shape.weight_bytes(tokens),
        kv_read_bytes,
        shape.kv_bytes_per_token * tokens,
        (shape.token_activation_elements * tokens + rows_elements) * shape.dtype_bytes,
    )


def _windowed(spans: Iterable[tuple[int, int]], window: int) -> tuple[int, int]:
    """(query-key pairs, tokens read) when a query sees at most `window` tokens, itself included."""
    pairs = read = 0
    full = window * (window + 1) // 2
    for new, before in spans:
        end = before + new
        if before >= window:
            pairs += new * window
            read += new + window - 1
            continue
        read += end
        if end <= window:
            pairs += new * (before + end + 1) // 2
        else:
            pairs += full + (end - window) * window - before * (before + 1) // 2
    return pairs, read
