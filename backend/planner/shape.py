"""The shape of a decoder-only transformer: what one step must compute and move follows from these counts alone.

Two ways to get one. `ModelShape.from_config` reads a Hugging Face `config.json` and knows a list of families; what it
does not know it refuses (`UnsupportedArchitecture`), for a guessed cache size is worse than none.
`ModelShape.from_measured` takes counts made on a live model, and works for any architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from backend.planner.errors import PlannerError
from backend.planner.step import StepCost, step_cost


class UnsupportedArchitecture(PlannerError):
    """This configuration cannot be counted with certainty; `reasons` says why, one sentence each, and `closest` names
    the known kinds that are nearest."""

    def __init__(self, model_type: str, reasons: Sequence[str], closest: Sequence[str] = ()):
        self.model_type = model_type
        self.reasons = list(reasons)
        self.closest = list(closest)
        super().__init__(f"cannot count a '{model_type}' model: {'; '.join(self.reasons)}")


class AttentionLayer(NamedTuple):
    """Attention of one layer. `window`: tokens a query sees, itself included; None: all before it."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None

    @property
    def flops_per_pair(self) -> int:
        """FLOPs for one query token attending one key token: scores (2·k_dim a head) and values (2·v_dim a head)."""
        return 2 * self.heads * (self.k_dim + self.v_dim)

    @property
    def kv_elements(self) -> int:
        """K and V elements kept for one token."""
        return self.kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Counts of parameters (elements), widths (elements) and element sizes (bytes)."""

    attention: tuple[AttentionLayer, ...]  # one a layer
    hidden: int
    mlp: int  # width a token passes through: routed experts a token uses, times theirs
    vocab: int
    parameters: int  # distinct ones: a tied head counts once
    matmul_parameters: int  # of all weight matrices that multiply, the head too (tied or not), all experts
    head_parameters: int
    gathered_parameters: int = 0  # tables only looked up (an untied input embedding, learned positions)
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    moe_layers: int = 0
    experts: int = 0  # routed experts in each of these layers
    experts_per_token: int = 0
    expert_parameters: int = 0  # of one expert

    @classmethod
    def from_config(cls, config: dict, dtype_bytes: int, kv_dtype_bytes: int | None = None) -> ModelShape:
        """From the content of a `config.json`, weights stored with `dtype_bytes` each.

        Raises UnsupportedArchitecture.
        """
        from backend.planner.config import parse

        if isinstance(config, dict) and config.get("quantization_config"):
            reason = "the checkpoint is quantised, so one size an element does not hold"
            raise UnsupportedArchitecture(str(config.get("model_type")), [reason])
        return parse(config).shape(dtype_bytes, kv_dtype_bytes or dtype_bytes)

    @classmethod
    def from_measured(
        cls,
        *,
        attention: Sequence[AttentionLayer],
        hidden: int,
        vocab: int,
        parameters: int,
        matmul_parameters: int,
        head_parameters: int,
        gathered_parameters: int,
        dtype_bytes: int,
        kv_dtype_bytes: int,
        mlp: int = 0,
    ) -> ModelShape:
        """From counts made on a live dense model: `matmul_parameters` are the elements of every weight that a linear
        layer multiplies with, the head's included (also when it shares storage with the input embedding);
        `gathered_parameters` the elements of tables that are only looked up; `attention` one entry a layer, as seen in
        the cache. With `mlp` unknown (0) activations are counted without the MLP's inner width.
        Experts cannot be told from the outside: a mixture-of-experts model counted this way reads all of them.
        """
        return cls(
            attention=tuple(attention),
            hidden=hidden,
            mlp=mlp,
            vocab=vocab,
            parameters=parameters,
            matmul_parameters=matmul_parameters,
            head_parameters=head_parameters,
            gathered_parameters=gathered_parameters,
            dtype_bytes=dtype_bytes,
            kv_dtype_bytes=kv_dtype_bytes,
        )

    def __post_init__(self) -> None:
        if not self.attention:
            raise ValueError("a model shape needs at least one layer")
        if not 0 <= self.head_parameters <= self.matmul_parameters:
            raise ValueError(
                f"head_parameters ({self.head_parameters}) are part of matmul_parameters ({self.matmul_parameters})"
            )

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def heads(self) -> int:
        return self.attention[0].heads

    @property
    def kv_heads(self) -> int:
        return self.attention[0].kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention[0].k_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One a layer; None: full attention."""
        return tuple(layer.window for layer in self.attention)

    def step_cost(self, spans: Iterable[tuple[int, int]], sampled_rows: int) -> StepCost:
        return step_cost(self, spans, sampled_rows)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers: what a slot of the pool takes."""
        return sum(layer.kv_elements for layer in self.attention) * self.kv_dtype_bytes

    def kv_bytes(self, tokens: int) -> int:
        """K and V that a sequence of `tokens` must keep: a windowed layer needs only its last `window` tokens."""
        kept = sum(
            layer.kv_elements * (tokens if layer.window is None else min(tokens, layer.window))
            for layer in self.attention
        )
        return kept * self.kv_dtype_bytes

    @cached_property
    def active_matmul_parameters(self) -> int:
        """Matrix elements that one token is multiplied with: all but the experts it is not routed to."""
        idle = self.moe_layers * (self.experts - self.experts_per_token) * self.expert_parameters
        return self.matmul_parameters - idle

    @cached_property
    def _always_read(self) -> int:
        """Parameters that every step reads: all but looked-up tables and routed experts."""
        return self.parameters - self.gathered_parameters - self.moe_layers * self.experts * self.expert_parameters

    def experts_touched(self, tokens: int) -> float:
        """Expected distinct experts of a layer that `tokens` use, routing uniform (real routing touches fewer)."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)

    def weight_bytes(self, tokens: int) -> int:
        """Weight bytes that a step of `tokens` reads, each once."""
        if not self.moe_layers:
            return self._always_read * self.dtype_bytes
        routed = self.moe_layers * self.experts_touched(tokens) * self.expert_parameters
        return (self._always_read + round(routed)) * self.dtype_bytes

    @property
    def step_weight_bytes(self) -> int:
        """Weight bytes that a step of one token reads; for a dense model, that any step reads."""
        return self.weight_bytes(1)

    @property
    def stored_weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @cached_property
    def token_activation_elements(self) -> int:
        """Elements that a token moves through memory between the matrices, in a fused implementation.

        Each matrix product reads its input and writes its output once: q, k, v (in: hidden; out: q; k and v are
        counted as KV), attention (q in, heads out), output projection, MLP (hidden in, its inner width out and in,
        hidden out). Norms, rotation, residual sums and the activation function ride along; scores never leave the
        chip. Plus the embedding row, read and written.
        """
        queries = sum(layer.heads * (layer.k_dim + layer.v_dim) for layer in self.attention)
        return 2 * queries + self.layers * (4 * self.hidden + 2 * self.mlp) + 2 * self.hidden

    @cached_property
    def by_window(self) -> tuple[tuple[int | None, int, int], ...]:
        """(window, FLOPs for one query-key pair, KV bytes of one token), summed over the layers with that window."""
        sums: dict[int | None, tuple[int, int]] = {}
        for layer in self.attention:
            flops, kv = sums.get(layer.window, (0, 0))
            sums[layer.window] = (
                flops + layer.flops_per_pair,
                kv + layer.kv_elements * self.kv_dtype_bytes,
            )
        return tuple((window, flops, kv) for window, (flops, kv) in sums.items())
