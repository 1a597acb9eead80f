"""nn.Linear on the CPU with its weight packed once, in the order in which the kernel reads it.

A weight in bfloat16 stays so in memory, half the bytes of a step. A CPU without arithmetic for it widens it in
registers and computes in float32. One that has it (AVX512-BF16) multiplies pairs, twice as many in an instruction:
there inputs are rounded to bfloat16 too, products and sums are float32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

ROOM_BYTES = 64 * 2**20  # taken at a time
LINE_BYTES = 64


class PackedLinear(nn.Module):
    """y = x Wᵀ + b, inference only. Needs torch.ops.kvscope."""

    def __init__(self, plain: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_buffer("packed", pack(plain), persistent=False)
        self.register_buffer("bias", None if plain.bias is None else plain.bias.detach().float(), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """[N, K], unpacked into a copy: for model code that asks its layers for their weight's dtype or device."""
        columns = self.packed.transpose(1, 2)  # [panels, columns, K or pairs of it]
        if multiplies_pairs(self.packed):
            columns = columns.flatten(2)  # an odd K has a zero more
        elif self.packed.dtype == torch.bfloat16:  # a column of the first half stands beside one of the second
            columns = columns.unflatten(1, (-1, 2)).transpose(1, 2)
        return columns.flatten(0, -2)[: self.out_features, : self.in_features].contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.kvscope.linear(x, self.packed, self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def multiplies_pairs(packed: torch.Tensor) -> bool:
    """Is it multiplied as it is, with inputs that are rounded to bfloat16?"""
    return packed.dim() == 4


def is_packable(weight: torch.Tensor) -> bool:
    return weight.dtype in (torch.float32, torch.bfloat16) and weight.device.type == "cpu"


def pack(*layers: nn.Linear, half: bool | None = None) -> torch.Tensor:
    """The layers' weights as one, their outputs one after another; `half`: in bfloat16, None: as they are."""
    half = layers[0].weight.dtype == torch.bfloat16 if half is None else half
    return _together(torch.ops.kvscope.pack(torch.cat([layer.weight.detach().float() for layer in layers]), half))


_room = torch.empty(0, dtype=torch.uint8)  # what is left of the last room that was taken


def _together(packed: torch.Tensor) -> torch.Tensor:
    """A copy, one after another in large pieces of memory, for which numpy asks Linux for huge pages.

    A step reads all weights from front to back, and where pages are small each is looked up anew and the processor
    stops reading ahead at its end: 8 to 10 % of a step of one request.
    """
    global _room
    size = -(-packed.nbytes // LINE_BYTES) * LINE_BYTES
    if len(_room) < size:
        _room = torch.from_numpy(np.empty(max(size, ROOM_BYTES) + LINE_BYTES, np.uint8))
        _room = _room[-_room.data_ptr() % LINE_BYTES :]
    place, _room = _room[: packed.nbytes], _room[size:]
    return place.view(packed.dtype).view(packed.shape).copy_(packed)


def release(plain: nn.Linear) -> None:
    """Its weight is in memory a second time now."""
    plain.weight, plain.bias = None, None


@torch.no_grad()
def pack_linears(model: nn.Module) -> int:
    """Replaces the model's nn.Linear modules in float32 or bfloat16, one after another, and returns how many.

    The packed weight takes the plain one's place in memory; only a head tied to the embedding is then there twice,
    since the table is still looked up. Subclasses stay as they are: they may compute something else.
    """
    packed: dict[int, PackedLinear] = {}
    kept: list[nn.Linear] = []  # shared modules are met again, and an id must not be used anew meanwhile
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or not is_packable(child.weight):
                continue
            if id(child) not in packed:
                packed[id(child)] = PackedLinear(child)
                release(child)
                kept.append(child)
            setattr(parent, name, packed[id(child)])
    return len(packed)


@torch.no_grad()
def widen(model: nn.Module) -> None:
    """All but linear layers computes in float32 from now on; tables that are only looked up keep their bytes."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, ids, rows: rows.float())
        elif type(module) is not nn.Linear:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()


class LinearInFloat32(TorchFunctionMode):
    """Under it linear layers compute in float32, whatever their weights are stored in; one is widened at a time.

    `rounded`: inputs of those in bfloat16 are rounded to it first, as kernels that multiply pairs do.
    """

    def __init__(self, rounded: bool = False):
        super().__init__()
        self.rounded = rounded

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (self._linear if function is nn.functional.linear else function)(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.rounded and weight.dtype == torch.bfloat16:
            input = input.bfloat16()
        return nn.functional.linear(input.float(), weight.float(), None if bias is None else bias.float())
