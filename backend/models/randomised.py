"""`--weights random`: a model of a given shape without its weights, to look at speed and memory at real sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

SEED = 20240607
_NOISE = 1_000_003  # prime, so that rows of a matrix do not line up with it and repeat


class FastNoise(TorchFunctionMode):
    """While active, tensors are filled with noise by copying a block of it, at the speed of memory.

    Drawing 8e9 normal numbers takes minutes on a CPU. A model's own initialisation still decides what is noise and
    with which spread, what is zero and what is one; only the generator behind it is replaced. The noise is made on
    the CPU from a fixed seed, so that every device and run gets the same weights.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self._normal = torch.randn(_NOISE, generator=generator).to(device)
        self._uniform = torch.rand(_NOISE, generator=generator).to(device)
        self._at = 0

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.normal_, init.normal_):
            return self._fill(self._normal, *_numbers(args, kwargs, mean=0.0, std=1.0))
        if func is torch.Tensor.uniform_:
            return self._between(*_numbers(args, kwargs, **{"from": 0.0, "to": 1.0}))
        if func is init.uniform_:
            return self._between(*_numbers(args, kwargs, a=0.0, b=1.0))
        if func is init.kaiming_uniform_:  # torch's default for a linear layer; mostly overwritten by the model's own
            tensor = args[0] if args else kwargs["tensor"]
            bound = tensor[0].numel() ** -0.5
            return self._between(tensor, -bound, bound)
        return func(*args, **kwargs)

    def _between(self, tensor: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return self._fill(self._uniform, tensor, low, high - low)

    def _fill(self, noise: torch.Tensor, tensor: torch.Tensor, shift: float, scale: float) -> torch.Tensor:
        if tensor.device.type == "meta" or tensor.numel() == 0:
            return tensor
        if noise.device != tensor.device:
            noise = noise.to(tensor.device)
        block = (noise * scale + shift).to(tensor.dtype)
        flat = tensor.view(-1) if tensor.is_contiguous() else torch.empty_like(tensor).contiguous().view(-1)
        done = 0
        while done < flat.numel():
            count = min(flat.numel() - done, _NOISE - self._at)
            flat[done : done + count].copy_(block[self._at : self._at + count])
            done += count
            self._at = (self._at + count) % _NOISE
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        return tensor


def _numbers(args: tuple, kwargs: dict, **defaults: float) -> tuple:
    """(tensor, first, second) of a call like `tensor.normal_(mean, std, generator=…)`."""
    given = dict(zip(defaults, args[1:], strict=False))
    tensor = args[0] if args else kwargs["tensor"]
    return tensor, *(kwargs.get(name, given.get(name, value)) for name, value in defaults.items())


def build(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A transformers causal language model with random weights, on `device`, attention "eager"."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad(), device, FastNoise(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def count_parameters(config: Any) -> int:
    """Parameters of the model, found without allocating them."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
