"""What limits a step: memory, arithmetic, or neither. Pure; the rule is stated in words beside every verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

MEMORY, COMPUTE, OVERHEAD, UNKNOWN = "memory", "compute", "overhead", "unknown"
FAR = 2.0  # times the greater bound: more than half of the step is then explained by neither

RULE = (
    "bytes ÷ measured read bandwidth and FLOPs ÷ measured multiply rate are the least times that memory and arithmetic "
    "need; the greater one is the bound. Up to "
    f"{FAR:g} × the bound a step is memory- or compute-bound, by the greater one; above that it is overhead-bound: "
    "launches, Python, sampling, waiting"
)


class Verdict(msgspec.Struct, kw_only=True, frozen=True):
    regime: str  # memory | compute | overhead | unknown
    bound_s: float  # the greater of the two least times
    memory_s: float  # bytes / read ceiling
    compute_s: float  # FLOPs / matmul ceiling
    measured_s: float
    mbu: float  # share of the bandwidth ceiling that was reached
    mfu: float  # share of the arithmetic ceiling that was reached
    words: str
    rule: str = RULE


def verdict(flops: float, bytes_moved: float, measured_s: float, ceilings: Any) -> Verdict:
    """`ceilings`: a `ceiling.Ceilings`, or the same as JSON gives it. Bytes and FLOPs may be sums over many steps."""
    read, matmul = ceiling_of(ceilings, "read"), ceiling_of(ceilings, "matmul")
    memory_s, compute_s = bytes_moved / read, flops / matmul
    bound_s = max(memory_s, compute_s)
    if measured_s <= 0 or bound_s <= 0:
        return Verdict(
            regime=UNKNOWN, bound_s=bound_s, memory_s=memory_s, compute_s=compute_s, measured_s=measured_s,
            mbu=0.0, mfu=0.0, words="nothing was measured yet",
        )  # fmt: skip
    mbu, mfu = memory_s / measured_s, compute_s / measured_s
    regime = MEMORY if memory_s >= compute_s else COMPUTE
    reached, ceiling = (mbu, "bandwidth") if regime == MEMORY else (mfu, "arithmetic")
    share = f"{reached * 100:.0f} % of the {ceiling} ceiling"
    if measured_s > FAR * bound_s:
        needed = "memory" if regime == MEMORY else "arithmetic"
        regime, words = OVERHEAD, f"overhead-bound: {measured_s / bound_s:.1f} × the time that {needed} needs ({share})"
    else:
        words = f"{regime}-bound: {share}"
        if measured_s < bound_s:
            words += ", more than was measured as the ceiling: caches helped, or other work ran while it was measured"
    return Verdict(
        regime=regime, bound_s=bound_s, memory_s=memory_s, compute_s=compute_s, measured_s=measured_s,
        mbu=mbu, mfu=mfu, words=words,
    )  # fmt: skip


def ceiling_of(ceilings: Any, name: str) -> float:
    """The value of one ceiling (copy, read, matmul), from the object or from its JSON."""
    found = ceilings[name] if isinstance(ceilings, Mapping) else getattr(ceilings, name)
    return float(found["value"] if isinstance(found, Mapping) else found.value)
