"""Money and energy of tokens. The price of a GPU-hour is the reader's own number."""

from __future__ import annotations

from backend.planner.accelerators import Accelerator
from backend.planner.napkin import positive
from backend.planner.results import Kind, Result


def per_million(usd_per_gpu_hour: float, gpus: int, tokens_per_s: float, kind: Kind = "estimate") -> Result:
    """USD for a million tokens at `tokens_per_s`; the same kind of statement as that rate."""
    positive(tokens_per_s=tokens_per_s, gpus=gpus)
    value = usd_per_gpu_hour * gpus / 3600 / tokens_per_s * 1e6
    formula = f"{usd_per_gpu_hour:g} $/h × {gpus} / 3,600 s / {tokens_per_s:,.4g} tok/s × 1e6"
    return Result(value, "$/M tokens", kind, formula=formula)


def per_thousand_in(usd_per_gpu_hour: float, gpus: int, seconds: float, tokens: float) -> Result:
    """USD for a thousand tokens when `tokens` took `seconds`."""
    positive(seconds=seconds, tokens=tokens)
    value = per_million(usd_per_gpu_hour, gpus, tokens / seconds, "exact").value / 1e3
    return Result(
        value, "USD", "exact", formula=f"{usd_per_gpu_hour:g} × {gpus} / 3,600 × {seconds:g} s / {tokens:g} × 1e3"
    )


def joules_per_token(accelerator: Accelerator, gpus: int, tokens_per_s: float) -> Result:
    """As if each GPU drew its rated power all the time: a rule of thumb, not a reading."""
    positive(tokens_per_s=tokens_per_s)
    if not accelerator.tdp_w:
        return Result(None, "J/token", "estimate", note=f"no rated power in the catalogue for {accelerator.name}")
    formula = f"{accelerator.tdp_w:g} W × {gpus} / {tokens_per_s:,.4g} tok/s"
    note = "from rated power (TDP), not from a sensor"
    return Result(accelerator.tdp_w * gpus / tokens_per_s, "J/token", "estimate", formula=formula, note=note)
