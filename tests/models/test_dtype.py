"""The number format follows from what the device has instructions for."""

import pytest
import torch

from backend.models import dtype as dtypes
from backend.models.errors import ModelError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx avx2 avx512f avx512bw avx512_vnni", False),  # oneDNN would emulate
        ("flags\t\t: fpu avx avx2", False),
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),  # Arm
        ("Features\t: fp asimd", False),
        ("", False),
    ],
)
def test_a_cpu_computes_bf16_when_it_has_the_instructions(tmp_path, monkeypatch, flags, expected):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: some CPU\n{flags}\n")
    assert dtypes.cpu_has_bf16(cpuinfo) is expected


def test_instructions_without_kernels_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : avx512_bf16\n")
    assert dtypes.cpu_has_bf16(cpuinfo) is False


def test_a_system_without_cpuinfo_gets_float32(tmp_path):
    assert dtypes.cpu_has_bf16(tmp_path / "none") is False


@pytest.mark.parametrize(
    ("device", "native", "expected"),
    [
        (CPU, True, torch.bfloat16),
        (CPU, False, torch.float32),
        (GPU, True, torch.bfloat16),
        (GPU, False, torch.float16),
    ],
)
def test_the_best_dtype_and_why(monkeypatch, device, native, expected):
    monkeypatch.setattr(dtypes, "cpu_has_bf16", lambda: native)
    monkeypatch.setattr(dtypes, "gpu_has_bf16", lambda: native)
    for asked in (None, "auto"):
        dtype, note = dtypes.choose(device, asked)
        assert dtype == expected
        assert note.startswith(str(expected).removeprefix("torch."))


@pytest.mark.parametrize(
    ("asked", "dtype"), [("bf16", torch.bfloat16), ("torch.float16", torch.float16), ("FP32", torch.float32)]
)
def test_an_asked_for_dtype_is_taken(asked, dtype):
    assert dtypes.choose(CPU, asked)[0] == dtype


def test_a_slow_choice_is_taken_with_a_warning(monkeypatch):
    monkeypatch.setattr(dtypes, "cpu_has_bf16", lambda: False)
    assert "slower" in dtypes.choose(CPU, "bfloat16")[1]
    assert "slower" in dtypes.choose(CPU, "float16")[1]
    assert "slower" not in dtypes.choose(CPU, "float32")[1]


def test_an_unknown_dtype_is_named_with_the_known_ones():
    with pytest.raises(ModelError, match=r"'int3'.*bfloat16"):
        dtypes.choose(CPU, "int3")
