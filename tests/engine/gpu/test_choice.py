"""Which kernels a model on a GPU gets, and what is said when they cannot be had. No GPU is needed to choose."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from backend.engine import gpu
from backend.engine.config import ConfigError
from backend.engine.kernels import Chosen, Kernels, choose

ON_GPU = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
ON_CPU = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def usable(monkeypatch):
    monkeypatch.setattr(gpu, "obstacle", lambda: "")


def said(chosen: Chosen) -> list[str]:
    return chosen.apply(torch.nn.Module())


def test_a_gpu_gets_triton_and_graphs_and_each_can_be_switched_off(usable):
    both = choose(Kernels(), ON_GPU)
    assert both.triton_attention and both.cuda_graphs and not both.packed_linear
    assert said(both) == ["Triton's paged attention, compiled for this GPU"]
    launched = choose(Kernels(cuda_graphs=False), ON_GPU)
    assert launched.triton_attention and not launched.cuda_graphs
    assert launched.paths()["capture"] is None
    plain = choose(Kernels(attention="reference"), ON_GPU)
    assert not plain.triton_attention and not plain.cuda_graphs
    assert said(plain) == ["reference kernels: as asked for"]


def test_what_is_for_the_other_device_is_refused(usable):
    for wanted in (Kernels(attention="native"), Kernels(linear="packed"), Kernels(fusion="fused")):
        with pytest.raises(ConfigError, match="are for the CPU, and the model is on cuda; start with --device cpu"):
            choose(wanted, ON_GPU)
    with pytest.raises(ConfigError, match="'triton' is for NVIDIA GPUs, and the model is on cpu"):
        choose(Kernels(attention="triton"), ON_CPU)


@pytest.mark.parametrize("why", ["not installed", "cannot be loaded", "interpret"])
def test_without_usable_kernels_the_reference_serves_and_says_why(monkeypatch, why):
    if why == "not installed":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    elif why == "cannot be loaded":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
        monkeypatch.setitem(sys.modules, "backend.engine.gpu.kernels", None)
    else:
        pytest.importorskip("triton")  # in the tests it is interpreted
    assert said(choose(Kernels(), ON_GPU))[0].startswith("reference kernels: ")
    assert why in said(choose(Kernels(), ON_GPU))[0].lower()
    with pytest.raises(ConfigError, match="attention 'triton' cannot be had"):
        choose(Kernels(attention="triton"), ON_GPU)
