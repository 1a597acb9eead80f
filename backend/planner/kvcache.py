"""Memory of a sequence: keys and values that grow, windows that stop growing, states that never grow."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from backend.planner.arch import Architecture, Attention, Latent, Layer, Recurrent
from backend.planner.formats import KvFormat
from backend.planner.results import Result, Term, count, total


@dataclass(frozen=True)
class KvModel:
    """Of one GPU. `grouped`: (window or None, bytes a token) over layers of that window."""

    grouped: tuple[tuple[int | None, float], ...]
    state_bytes: float

    @property
    def bytes_per_token(self) -> float:
        """The growing part: of layers that see everything."""
        return sum(size for window, size in self.grouped if window is None)

    @property
    def slot_bytes_per_token(self) -> float:
        """Of all layers: what a pool takes that keeps every token of every layer."""
        return sum(size for _, size in self.grouped)

    def kv_bytes(self, tokens: float) -> float:
        """Keys and values that a sequence of `tokens` must keep."""
        return sum(size * (tokens if window is None else min(tokens, window)) for window, size in self.grouped)

    def bytes(self, tokens: float) -> float:
        return self.kv_bytes(tokens) + self.state_bytes


@lru_cache(maxsize=4096)
def kv_model(arch: Architecture, form: KvFormat, tp: int = 1, pp: int = 1) -> KvModel:
    """Of the fullest GPU among `tp` in each of `pp` stages."""
    size = math.ceil(len(arch.layers) / pp)
    stages = [_of(arch.layers[start : start + size], form, tp) for start in range(0, len(arch.layers), size)]
    return max(stages, key=lambda stage: (stage.kv_bytes(1 << 40), stage.bytes(1)))


def _of(layers: tuple[Layer, ...], form: KvFormat, tp: int) -> KvModel:
    grouped: dict[int | None, float] = {}
    state = 0.0
    for mixer, number in Counter(layer.mixer for layer in layers if layer.mixer).items():
        if isinstance(mixer, Recurrent):
            state += number * mixer.bytes_per_sequence / tp
            continue
        size = number * form.layer_bytes(mixer, mixer.kv_elements_per_gpu(tp))
        grouped[mixer.window] = grouped.get(mixer.window, 0.0) + size
    return KvModel(tuple(grouped.items()), state)


def per_token(arch: Architecture, form: KvFormat) -> Result:
    """Bytes that one more token costs once every window is full."""
    return total("B", "exact", [*_terms(arch, form, 1, only_growing=True)])


def per_sequence(arch: Architecture, form: KvFormat, tokens: int) -> Result:
    """Bytes of one sequence of `tokens`: keys and values, and the states of recurrent layers."""
    terms = _terms(arch, form, tokens)
    for state, number in Counter(arch.states).items():
        formula = (
            f"{number} layers × ({count(state.state_elements)} × {state.state_bytes} B state + "
            f"{count(state.conv_elements)} × {state.conv_bytes} B convolution)"
        )
        terms.append(Term("states", number * state.bytes_per_sequence, "B", formula))
    return total("B", "exact", terms)


def _terms(arch: Architecture, form: KvFormat, tokens: int, *, only_growing: bool = False) -> list[Term]:
    terms = []
    for mixer, number in arch.kv_counts:
        if only_growing and mixer.window is not None:
            continue
        size = form.layer_bytes(mixer, mixer.kv_elements)
        kept = tokens if mixer.window is None else min(tokens, mixer.window)
        if isinstance(mixer, Latent):
            name, what = "latent", f"({mixer.latent} latent + {mixer.rope} rotary{_index(mixer)})"
        else:
            name = "full attention" if mixer.window is None else f"window of {mixer.window:,}"
            what = _heads(mixer)
        each = f"{form.bits / 8:g} B" if not form.latent_split else f"= {size:g} B ({form.words})"
        terms.append(Term(name, number * size * kept, "B", f"{count(kept)} tokens × {number} layers × {what} × {each}"))
    return terms


def _heads(mixer: Attention) -> str:
    if mixer.k_dim == mixer.v_dim:
        return f"2 × {mixer.kv_heads} KV heads × {mixer.k_dim}"
    return f"{mixer.kv_heads} KV heads × ({mixer.k_dim} + {mixer.v_dim})"


def _index(mixer: Latent) -> str:
    return f" + {mixer.index} index" if mixer.index else ""


def blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def block_waste(tokens: int, block_size: int) -> Result:
    """Slots of the last block that hold nothing; (block size - 1) / 2 on average."""
    used = blocks(tokens, block_size)
    return Result(
        used * block_size - tokens,
        "tokens",
        "exact",
        formula=f"ceil({tokens:,} / {block_size}) × {block_size} - {tokens:,} = {used * block_size - tokens}",
    )


def tokens_from_bytes(kv_bytes: float, bytes_per_token: float, block_size: int = 1) -> Result:
    """Whole blocks of tokens that fit; what an engine logs as its capacity."""
    number = int(kv_bytes // (bytes_per_token * block_size)) * block_size
    formula = f"floor({count(kv_bytes)} B / ({block_size} × {count(bytes_per_token)} B)) × {block_size}"
    return Result(number, "tokens", "exact", formula=formula)
