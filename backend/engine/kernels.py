"""Which kernels compute: compiled ones where they can, torch's else. Fixed at start; switches show what they buy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from backend.engine import native
from backend.engine.config import ConfigError

if TYPE_CHECKING:
    from backend.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Kernels:
    """What is wanted. auto: the compiled ones when they have been built and the model is one for them."""

    attention: str = "auto"  # native | reference: attention of single tokens
    linear: str = "auto"  # packed | plain: linear layers
    fusion: str = "auto"  # fused | plain: norms, gated MLPs and attention projections in one operation each


VALUES = {
    "attention": ("auto", "native", "reference"),
    "linear": ("auto", "packed", "plain"),
    "fusion": ("auto", "fused", "plain"),
}


@dataclass(frozen=True, slots=True)
class Chosen:
    native_attention: bool
    packed_linear: bool
    fused: bool
    reason: str  # why a kernel that was left to us is not used; "" when there is nothing to say

    def apply(self, model: torch.nn.Module) -> list[str]:
        """Replaces the model's layers that are to be replaced, and says in plain words what computes."""
        packed = fused = 0
        if self.fused:
            from backend.engine.native.fused import fuse

            fused = fuse(model)
        if self.packed_linear:
            from backend.engine.native.linear import pack_linears

            packed = pack_linears(model)
        used = (
            ["packed weights"] * (packed > 0)
            + ["fused layers"] * (fused > 0)
            + ["native paged attention"] * self.native_attention
        )
        if used:
            return [f"{', '.join(used)}: compiled here for this CPU"]
        return [f"reference kernels: {self.reason}"] if self.reason else []


def choose(wanted: Kernels, loaded: LoadedModel) -> Chosen:
    """Raises ConfigError for an unknown value, and for a kernel asked for by name that cannot be had, with the fix."""
    for switch, values in VALUES.items():
        if getattr(wanted, switch) not in values:
            raise ConfigError(f"{switch} '{getattr(wanted, switch)}': one of {', '.join(values)}", switch)
    # Fused layers are made of packed weights: whoever asks for plain ones gets no others by the way.
    fusion = "plain" if (wanted.fusion, wanted.linear) == ("auto", "plain") else wanted.fusion
    if (wanted.attention, wanted.linear, fusion) == ("reference", "plain", "plain"):
        return Chosen(False, False, False, "as asked for")
    reason = _obstacle(loaded)
    for switch, name in (("attention", "native"), ("linear", "packed"), ("fusion", "fused")):
        if reason and getattr(wanted, switch) == name:
            raise ConfigError(f"{switch} '{name}' cannot be had: {reason}", switch)
    if reason:
        return Chosen(False, False, False, reason if loaded.device.type == "cpu" else "")
    return Chosen(wanted.attention != "reference", wanted.linear != "plain", fusion != "plain", "as asked for")


def _obstacle(loaded: LoadedModel) -> str:
    """Why the compiled kernels cannot compute this model, or ""."""
    if loaded.device.type != "cpu":
        return f"the compiled kernels are for the CPU, and the model is on {loaded.device}; start with --device cpu"
    if loaded.dtype != torch.float32:
        dtype = str(loaded.dtype).removeprefix("torch.")
        return f"the compiled kernels are for float32, and the weights are {dtype}; start with --dtype float32"
    return native.load()
