"""Bytes of the weights: stored in a file, held by a GPU, read by a step."""

from __future__ import annotations

import math
from functools import lru_cache

from backend.planner.arch import Architecture
from backend.planner.formats import MATRICES, PARTS, WeightFormat
from backend.planner.results import Result, Term, count, total

_SPLIT = (*MATRICES, "head", "embedding", "positions")  # what tensor parallelism divides; the rest every GPU holds


@lru_cache(maxsize=1024)
def part_bytes(arch: Architecture, form: WeightFormat) -> dict[str, float]:
    form = form.for_model(arch)
    return {part: elements * form.of(part) / 8 for part, elements in arch.elements.items()}


def checkpoint(arch: Architecture, form: WeightFormat, *, head_twice: bool = False, extra_bytes: int = 0) -> Result:
    """Bytes of the published files. `head_twice`: a tied head is stored a second time; `extra_bytes`: of buffers."""
    stored = form.for_model(arch)
    terms = [
        Term(part, size, "B", f"{count(arch.elements[part])} × {stored.of(part):g} bit / 8")
        for part, size in part_bytes(arch, form).items()
        if size
    ]
    if head_twice and arch.tied:
        bits = stored.of("head")
        terms.append(Term("head, stored again", arch.head * bits / 8, "B", f"{count(arch.head)} × {bits:g} bit / 8"))
    if extra_bytes:
        terms.append(Term("buffers", extra_bytes, "B"))
    return total("B", "exact", terms)


def effective_bits(arch: Architecture, form: WeightFormat) -> Result:
    """Bits for each parameter that a decode step reads (the input embedding is a gather)."""
    elements = arch.parameters - arch.gathered
    bits = 8 * read_bytes(arch, form, math.inf) / elements
    return Result(bits, "bit", "exact", formula=f"8 × bytes read / {count(elements)} parameters", note=form.words)


@lru_cache(maxsize=4096)
def read_bytes(arch: Architecture, form: WeightFormat, tokens: float, tp: int = 1) -> float:
    """Weight bytes that each of `tp` GPUs reads in a step of `tokens`: everything once but looked-up tables and the
    experts that nobody is routed to (expected number, uniform routing)."""
    parts, stored = part_bytes(arch, form), form.for_model(arch)
    split = sum(parts[part] for part in _SPLIT if part not in ("embedding", "positions"))
    whole = parts["router"] + parts["vectors"]
    for mixture, layers in arch.mixture_counts:
        idle = layers * (mixture.experts - mixture.touched(tokens))
        split -= idle * mixture.expert_matrices * stored.of("experts") / 8
        whole -= idle * mixture.expert_vectors * stored.of("vectors") / 8
    return split / tp + whole


def step_read(arch: Architecture, form: WeightFormat, tokens: float) -> Result:
    """`read_bytes` with its working."""
    stored, parts = form.for_model(arch), part_bytes(arch, form)
    terms = []
    for part in PARTS:
        if part in ("embedding", "positions", "experts") or not parts[part]:
            continue
        terms.append(Term(part, parts[part], "B", f"{count(arch.elements[part])} × {stored.of(part):g} bit / 8"))
    if arch.mixtures:
        touched = sum(mixture.touched(tokens) for mixture in arch.mixtures) / len(arch.mixtures)
        routed = read_bytes(arch, form, tokens) - sum(term.value for term in terms)
        one = arch.mixtures[0]
        terms.append(
            Term(
                "experts touched",
                routed,
                "B",
                f"{len(arch.mixtures)} layers × {touched:.1f} of {one.experts} experts × "
                f"{count(one.expert_matrices)} × {stored.of('experts'):g} bit / 8 (expected, uniform routing)",
            )
        )
    note = "the input embedding is a gather and is not read"
    return total("B", "exact", terms, note)


def per_gpu(arch: Architecture, form: WeightFormat, tp: int = 1, pp: int = 1) -> Result:
    """Bytes that the fullest GPU holds: matrices and tables divided by `tp`, norms and routers whole, layers in `pp`
    stages (the first has the embedding, the last the head)."""
    parts = part_bytes(arch, form)
    stage = math.ceil(len(arch.layers) / pp) / len(arch.layers)
    if pp > 1:
        tables = max(parts["embedding"] + parts["positions"], parts["head"])
        formula = f"largest of embedding and head / {tp}"
    else:
        tables = parts["embedding"] + parts["positions"] + parts["head"]
        formula = f"(embedding + head) / {tp}"
    layers = sum(parts[part] for part in MATRICES)
    whole = parts["router"] + parts["vectors"]
    share = f"{math.ceil(len(arch.layers) / pp)} of {len(arch.layers)} layers"
    return total(
        "B",
        "exact",
        [
            Term("layers", layers * stage / tp, "B", f"{count(layers)} B × {share} / {tp}"),
            Term("tables", tables / tp, "B", formula),
            Term("norms and routers", whole * stage, "B", f"{count(whole)} B × {share}, on every GPU"),
        ],
    )
