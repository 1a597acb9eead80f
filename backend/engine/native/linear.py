"""nn.Linear on the CPU with its weight packed once, in the order in which the kernel reads it."""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """y = x Wᵀ + b in float32, inference only. Needs torch.ops.kvscope."""

    def __init__(self, plain: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_buffer("packed", torch.ops.kvscope.pack(plain.weight.detach()), persistent=False)
        self.register_buffer("bias", None if plain.bias is None else plain.bias.detach(), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """[N, K], unpacked into a copy: for model code that asks its layers for their weight's dtype or device."""
        return self.packed.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.kvscope.linear(x, self.packed, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def release(plain: nn.Linear) -> None:
    """Its weight is in memory a second time now."""
    plain.weight, plain.bias = None, None


@torch.no_grad()
def pack_linears(model: nn.Module) -> int:
    """Replaces the model's float32 nn.Linear modules, one after another, and returns how many.

    The packed weight takes the plain one's place in memory; only a head tied to the embedding is then there twice,
    since the table is still looked up. Subclasses stay as they are: they may compute something else.
    """
    packed: dict[int, PackedLinear] = {}
    kept: list[nn.Linear] = []  # shared modules are met again, and an id must not be used anew meanwhile
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype != torch.float32 or child.weight.device.type != "cpu":
                continue
            if id(child) not in packed:
                packed[id(child)] = PackedLinear(child)
                release(child)
                kept.append(child)
            setattr(parent, name, packed[id(child)])
    return len(packed)
