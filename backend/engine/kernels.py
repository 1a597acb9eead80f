"""Which kernels compute: compiled ones where they can (for the CPU, or Triton's for a GPU), torch's else. Fixed at
start; switches show what they buy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from backend.engine import gpu, native
from backend.engine.config import ConfigError
from backend.models.dtype import cpu_has_bf16

if TYPE_CHECKING:
    from backend.models.loader import LoadedModel


PACKABLE_SHARE = 0.9  # of the weights, at least: what is not packed would take twice its bytes


@dataclass(frozen=True, slots=True)
class Kernels:
    """What is wanted. auto: the compiled ones when they have been built and the model is one for them."""

    attention: str = "auto"  # native (CPU) | triton (GPU) | reference: attention of single tokens
    linear: str = "auto"  # packed | plain: linear layers
    fusion: str = "auto"  # fused | plain: norms, gated MLPs and attention projections in one operation each
    cuda_graphs: bool = True  # decode steps as graphs, where Triton's attention computes


VALUES = {
    "attention": ("auto", "native", "triton", "reference"),
    "linear": ("auto", "packed", "plain"),
    "fusion": ("auto", "fused", "plain"),
}


@dataclass(frozen=True, slots=True)
class Chosen:
    native_attention: bool
    packed_linear: bool
    fused: bool
    reason: str  # why a kernel that was left to us is not used; "" when there is nothing to say
    half: bool = False  # weights, K and V in bfloat16
    triton_attention: bool = False
    cuda_graphs: bool = False

    @property
    def widens(self) -> bool:
        """Is what is stored in bfloat16 computed in float32?"""
        return self.half and not native.multiplies_bfloat16()

    def paths(self) -> dict[str, Any]:
        """What TorchRunner is told."""
        capture = None
        if self.cuda_graphs:
            from backend.engine.gpu.graphs import CudaGraphs

            capture = CudaGraphs()
        return {
            "native_attention": self.native_attention,
            "triton_attention": self.triton_attention,
            "capture": capture,
        }

    @contextmanager
    def widened(self, model: torch.nn.Module) -> Iterator[None]:
        """The model that is to be reproduced: what is stored in bfloat16 is computed as the kernels do here already."""
        if not self.half:
            yield
            return
        from backend.engine.native.linear import LinearInFloat32, widen

        widen(model)
        with LinearInFloat32(rounded=not self.widens):
            yield

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
            [f"packed {'bfloat16 ' * self.half}weights"] * (packed > 0)
            + ["fused layers"] * (fused > 0)
            + ["native paged attention"] * self.native_attention
        )
        if used:
            return [f"{', '.join(used)}: compiled here for this CPU"]
        if self.triton_attention:
            return ["Triton's paged attention, compiled for this GPU"]
        return [f"reference kernels: {self.reason}"] if self.reason else []


def narrow(wanted: Kernels, loaded: LoadedModel) -> None:
    """Stores the weights in bfloat16 where that was left to us and the compiled kernels widen them in registers: the
    arithmetic stays float32, and a step reads half the bytes."""
    if loaded.dtype_asked or loaded.device.type != "cpu" or loaded.dtype != torch.float32:
        return
    if _obstacle(replace(loaded, dtype=torch.bfloat16), wanted):
        return
    for parameter in loaded.model.parameters():  # not the buffers: frequencies of positions need their digits
        parameter.data = parameter.data.to(torch.bfloat16)
    loaded.dtype = torch.bfloat16
    loaded.notes[:1] = ["bfloat16: half the bytes of float32 to read; widened in registers, computed in float32"]


def choose(wanted: Kernels, loaded: LoadedModel) -> Chosen:
    """Raises ConfigError for an unknown value, and for a kernel asked for by name that cannot be had, with the fix."""
    for switch, values in VALUES.items():
        if getattr(wanted, switch) not in values:
            raise ConfigError(f"{switch} '{getattr(wanted, switch)}': one of {', '.join(values)}", switch)
    if loaded.device.type == "cuda":
        return _choose_on_gpu(wanted, loaded)
    if wanted.attention == "triton":
        raise ConfigError(f"attention 'triton' is for NVIDIA GPUs, and the model is on {loaded.device}", "attention")
    # Fused layers are made of packed weights: whoever asks for plain ones gets no others by the way.
    fusion = "plain" if (wanted.fusion, wanted.linear) == ("auto", "plain") else wanted.fusion
    if (wanted.attention, wanted.linear, fusion) == ("reference", "plain", "plain"):
        return Chosen(False, False, False, "as asked for")
    reason = _obstacle(loaded, wanted)
    for switch, name in (("attention", "native"), ("linear", "packed"), ("fusion", "fused")):
        if reason and getattr(wanted, switch) == name:
            raise ConfigError(f"{switch} '{name}' cannot be had: {reason}", switch)
    if reason:
        return Chosen(False, False, False, reason)
    half = loaded.dtype == torch.bfloat16
    return Chosen(wanted.attention != "reference", wanted.linear != "plain", fusion != "plain", "as asked for", half)


def _choose_on_gpu(wanted: Kernels, loaded: LoadedModel) -> Chosen:
    for switch, name in (("attention", "native"), ("linear", "packed"), ("fusion", "fused")):
        if getattr(wanted, switch) == name:
            raise ConfigError(
                f"{switch} '{name}' cannot be had: the kernels compiled here are for the CPU, and the model is on "
                f"{loaded.device}; start with --device cpu",
                switch,
            )
    if wanted.attention == "reference":
        return Chosen(False, False, False, "as asked for")
    reason = gpu.obstacle()
    if reason and wanted.attention == "triton":
        raise ConfigError(f"attention 'triton' cannot be had: {reason}", "attention")
    if reason:
        return Chosen(False, False, False, reason)
    return Chosen(False, False, False, "", triton_attention=True, cuda_graphs=wanted.cuda_graphs)


def _obstacle(loaded: LoadedModel, wanted: Kernels) -> str:
    """Why the compiled kernels cannot compute this model, or ""."""
    if loaded.dtype not in (torch.float32, torch.bfloat16):
        dtype = str(loaded.dtype).removeprefix("torch.")
        return f"the compiled kernels are for float32 and bfloat16 weights, not for {dtype}; choose one with --dtype"
    if loaded.dtype == torch.bfloat16:
        if wanted.linear == "plain":
            return "bfloat16 is widened to float32 in packed layers only; leave --linear to auto"
        if (share := _packable_share(loaded.model)) < PACKABLE_SHARE:
            return (
                f"only {share:.0%} of the weights are in linear layers that can be packed; start with --dtype float32"
            )
    if missing := native.load():
        return missing
    if (
        loaded.dtype == torch.bfloat16
        and wanted.linear != "packed"
        and cpu_has_bf16()
        and not native.multiplies_bfloat16()
    ):
        return "this CPU multiplies bfloat16 in a way that they do not know; --linear packed takes them all the same"
    return ""


def _packable_share(model: torch.nn.Module) -> float:
    """Of the model's weights, those that keep their two bytes: linear layers, and tables that are looked up."""
    keep = {
        id(m.weight): m.weight.numel()
        for m in model.modules()
        if type(m) is torch.nn.Linear or isinstance(m, torch.nn.Embedding)
    }
    return sum(keep.values()) / max(1, sum(p.numel() for p in model.parameters()))
