"""A decoder as a list of layers, each a mixer (attention, latent attention, a recurrent state) and a feed-forward part.

Whatever the planner says of a model is a fold over this list; only the parsers of `config.json` know model families.
All counts are elements. "Matrices" multiply; "vectors" are what is left (norms, biases, sinks, short convolutions).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from backend.planner.shape import AttentionLayer, ModelShape, UnsupportedArchitecture


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Keys and values of `kv_heads` heads are kept for each token; a window keeps the last ones only."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    matrices: int = 0
    vectors: int = 0
    window: int | None = None

    @property
    def kv_elements(self) -> int:
        return self.kv_heads * (self.k_dim + self.v_dim)

    def kv_elements_per_gpu(self, tp: int) -> int:
        """With more GPUs than KV heads each keeps one head: the group then stores copies."""
        return max(1, math.ceil(self.kv_heads / tp)) * (self.k_dim + self.v_dim)

    def flops_per_pair(self, decode: bool) -> int:
        return 2 * self.heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """MLA: one compressed row a token, from which all heads read; every GPU of a tensor-parallel group keeps it."""

    heads: int
    latent: int  # kv_lora_rank
    rope: int
    nope: int
    v_dim: int
    matrices: int = 0
    vectors: int = 0
    index: int = 0  # elements of an indexer's key for each token
    window: None = None

    @property
    def kv_elements(self) -> int:
        return self.latent + self.rope + self.index

    def kv_elements_per_gpu(self, tp: int) -> int:
        return self.kv_elements

    def flops_per_pair(self, decode: bool) -> int:
        """Decoding works on the latent itself (absorbed); a prompt expands it to heads first, which is cheaper."""
        expanded = self.nope + self.rope + self.v_dim
        return 2 * self.heads * (2 * self.latent + self.rope if decode else expanded)


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """Linear attention or a state-space layer: a state of fixed size for each sequence, whatever its length."""

    state_elements: int
    conv_elements: int
    state_bytes: int = 4  # an element; engines keep it in float32
    conv_bytes: int = 2
    matrices: int = 0
    vectors: int = 0

    @property
    def bytes_per_sequence(self) -> int:
        return self.state_elements * self.state_bytes + self.conv_elements * self.conv_bytes

    @property
    def flops_per_token(self) -> int:
        """At least one multiply-add an element to write the state and one to read it."""
        return 4 * self.state_elements


@dataclass(frozen=True, kw_only=True)
class Dense:
    width: int
    matrices: int
    vectors: int = 0


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture: of `experts` routed ones each token uses `per_token`; shared ones see every token."""

    experts: int
    per_token: int
    width: int
    expert_matrices: int  # of one
    expert_vectors: int = 0  # of one
    router: int = 0
    shared_matrices: int = 0
    vectors: int = 0

    def touched(self, tokens: float) -> float:
        """Expected distinct experts that `tokens` use, routing uniform (real routing touches fewer)."""
        return self.experts * (1.0 - (1.0 - self.per_token / self.experts) ** tokens)


@dataclass(frozen=True, kw_only=True)
class Layer:
    mixer: Attention | Latent | Recurrent | None
    ffn: Dense | Experts | None
    norms: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """Compared and hashed by identity: one is made once and asked often."""

    model_type: str
    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    tied: bool  # the head is the input embedding
    final_vectors: int = 0  # norm before the head, and what else is outside of the layers
    positions: int = 0  # learned position table: looked up, never multiplied
    context: int | None = None  # tokens that the model was made for
    notes: tuple[str, ...] = ()

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def kv_layers(self) -> tuple[Attention | Latent, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention | Latent))

    @cached_property
    def states(self) -> tuple[Recurrent, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Recurrent))

    @cached_property
    def mixtures(self) -> tuple[Experts, ...]:
        return tuple(layer.ffn for layer in self.layers if isinstance(layer.ffn, Experts))

    @cached_property
    def mixture_counts(self) -> tuple[tuple[Experts, int], ...]:
        return tuple(Counter(self.mixtures).items())

    @cached_property
    def kv_counts(self) -> tuple[tuple[Attention | Latent, int], ...]:
        return tuple(Counter(self.kv_layers).items())

    @cached_property
    def elements(self) -> dict[str, int]:
        """Distinct parameters by the part they play; their sum is the parameter count."""
        found = dict.fromkeys(("attention", "mlp", "experts", "shared", "router", "vectors"), 0)
        for layer in self.layers:
            found["vectors"] += layer.norms
            if layer.mixer:
                found["attention"] += layer.mixer.matrices
                found["vectors"] += layer.mixer.vectors
            if isinstance(layer.ffn, Dense):
                found["mlp"] += layer.ffn.matrices
                found["vectors"] += layer.ffn.vectors
            elif layer.ffn:
                found["experts"] += layer.ffn.experts * layer.ffn.expert_matrices
                found["shared"] += layer.ffn.shared_matrices
                found["router"] += layer.ffn.router
                found["vectors"] += layer.ffn.vectors + layer.ffn.experts * layer.ffn.expert_vectors
        found["vectors"] += self.final_vectors
        found["positions"] = self.positions
        found["head"] = self.head
        found["embedding"] = 0 if self.tied else self.head
        return found

    @cached_property
    def parameters(self) -> int:
        return sum(self.elements.values())

    @cached_property
    def matmul_parameters(self) -> int:
        """Elements of every matrix that multiplies, all experts and the head included."""
        parts = self.elements
        return sum(parts[name] for name in ("attention", "mlp", "experts", "shared", "router", "head"))

    @cached_property
    def active_matmul_parameters(self) -> int:
        """Matrix elements that one token meets."""
        idle = sum(n * (mix.experts - mix.per_token) * mix.expert_matrices for mix, n in self.mixture_counts)
        return self.matmul_parameters - idle

    @cached_property
    def active_parameters(self) -> int:
        """All that one token meets, as published "active" counts have it: norms, biases and both tables included."""
        idle = sum(
            (mixture.experts - mixture.per_token) * (mixture.expert_matrices + mixture.expert_vectors)
            for mixture in self.mixtures
        )
        return self.parameters - idle

    @property
    def gathered(self) -> int:
        """Tables that are only looked up."""
        return self.elements["embedding"] + self.positions

    def shape(self, dtype_bytes: int, kv_dtype_bytes: int) -> ModelShape:
        """The engine's compact form, for decoders whose layers are alike and keep keys and values.

        Raises UnsupportedArchitecture for the others: there a single rate a token does not hold.
        """
        reasons = []
        if len(self.kv_layers) != len(self.layers) or any(isinstance(mixer, Latent) for mixer in self.kv_layers):
            reasons.append("some layers keep a latent or a state instead of keys and values")
        mixtures = set(self.mixtures)
        if self.mixtures and (len(mixtures) != 1 or len(self.mixtures) != len(self.layers)):
            reasons.append("dense and mixture-of-experts layers are mixed")
        if any(mixture.shared_matrices or mixture.expert_vectors for mixture in mixtures):
            reasons.append("experts are shared or have biases")
        if reasons:
            raise UnsupportedArchitecture(self.model_type, reasons)
        mixture = next(iter(mixtures), None)
        width = mixture.width * mixture.per_token if mixture else self.layers[0].ffn.width
        return ModelShape(
            attention=tuple(AttentionLayer(m.heads, m.kv_heads, m.k_dim, m.v_dim, m.window) for m in self.kv_layers),
            hidden=self.hidden,
            mlp=width,
            vocab=self.vocab,
            parameters=self.parameters,
            matmul_parameters=self.matmul_parameters,
            head_parameters=self.head,
            gathered_parameters=self.gathered,
            dtype_bytes=dtype_bytes,
            kv_dtype_bytes=kv_dtype_bytes,
            moe_layers=len(self.mixtures),
            experts=mixture.experts if mixture else 0,
            experts_per_token=mixture.per_token if mixture else 0,
            expert_parameters=mixture.expert_matrices if mixture else 0,
        )
