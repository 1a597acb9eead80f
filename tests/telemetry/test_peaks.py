"""Peaks beside what was measured: which are believed, and which device torch computes on."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from backend.events import Device
from backend.telemetry import ceiling, torch_device
from backend.telemetry.ceiling import Ceiling, Ceilings, Conditions
from backend.telemetry.identity import data_sheet
from backend.telemetry.peaks import beside

GIB = 2**30
H100 = Device(
    uuid="GPU-1",
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * GIB,
    peak_bandwidth_bytes_per_s=3.352e12,
    peak_source="theoretical: 2 × 2619 MHz × 5120 bit / 8, both from NVML",
)


def measured(bandwidth: float, rate: float = 6e14, dtype: str = "bfloat16") -> Ceilings:
    value = lambda v: Ceiling(value=v, low=v, high=v, unit="", way="", ways={}, rounds=7)  # noqa: E731
    where = Conditions(device="cuda:0", device_name="", host="", dtype=dtype, threads=0, torch="")
    return Ceilings(copy=value(bandwidth), read=value(bandwidth / 2), matmul=value(rate), conditions=where)


def test_theory_and_data_sheet_stand_beside_the_measurement():
    theory, sheet, arithmetic = beside(measured(2.9e12), H100)
    assert (theory.kind, theory.value, theory.accepted, theory.unit) == ("theoretical", 3.352e12, True, "B/s")
    assert (sheet.kind, sheet.value, sheet.accepted) == ("data sheet", 3.35e12, True)
    assert "H100" in sheet.source
    assert (arithmetic.of, arithmetic.unit, arithmetic.accepted) == ("arithmetic", "FLOP/s", True)
    assert "dense" in arithmetic.source and 0.9e15 < arithmetic.value < 1.1e15


@pytest.mark.parametrize(
    ("bandwidth", "accepted", "words"),
    [
        (3.352e12 * 1.019, True, ""),
        (3.352e12 * 1.03, False, "below what was measured"),
        (3.352e12 / 2.49, True, ""),
        (3.352e12 / 2.6, False, "2.6 × what was measured"),
    ],
)
def test_a_theory_that_is_not_plausible_is_shown_and_not_used(bandwidth, accepted, words):
    theory = beside(measured(bandwidth), H100)[0]
    assert theory.accepted is accepted and words in theory.note


def test_nothing_is_made_up():
    assert beside(measured(5e9), None) == []
    assert beside(measured(5e9), Device(uuid="host", kind="host")) == []
    assert beside(measured(2.9e12), msgspec.structs.replace(H100, fake=True)) == []
    unknown = msgspec.structs.replace(H100, name="NVIDIA Something", peak_source="", peak_bandwidth_bytes_per_s=0.0)
    assert beside(measured(2.9e12), unknown) == []
    assert [p.of for p in beside(measured(2.9e12, dtype="float32"), H100)] == ["bandwidth", "bandwidth"]


def test_peaks_are_looked_up_and_not_kept(tmp_path):
    found = msgspec.structs.replace(measured(2.9e12), beside=beside(measured(2.9e12), H100))
    assert b"theoretical" not in ceiling.keep(found, tmp_path).read_bytes()


@pytest.mark.parametrize(
    ("name", "memory", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie-80gb"),
        ("NVIDIA H200", 141, "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-sxm-80gb"),
        ("NVIDIA A100-PCIE-40GB", 40, "a100-pcie-40gb"),
        ("Tesla T4", 15, "t4"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
        ("NVIDIA A10-4Q", 4, None),
        ("Tesla P4", 8, None),
        ("", 8, None),
    ],
)
def test_a_drivers_name_finds_its_data_sheet_or_none(name, memory, key):
    row = data_sheet(name, memory * GIB)
    assert (row and row.key) == key


def test_torchs_device_is_named_as_nvml_names_it(monkeypatch):
    torch = pytest.importorskip("torch")
    assert torch_device.used(torch.device("cpu")) == ("host",)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"0000-{index}"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert "GPU-0000-1" in torch_device.used(torch.device("cuda:1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-10000000-0000-0000-0000-000000000000")
    assert torch_device.used(torch.device("cuda:0")) == ("MIG-10000000-0000-0000-0000-000000000000",)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert torch_device.used(torch.device("cuda:0")) == ()
