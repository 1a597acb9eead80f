"""What a host's GPUs do, from a DCGM exporter that runs there: one reading a GPU, in our units.

Names and units as in NVIDIA's dcgm-exporter (`etc/dcp-metrics-included.csv`, `etc/default-counters.csv`). DCGM marks
"no value" by numbers around 2^47 and more: such are dropped.
"""

from __future__ import annotations

import msgspec

from backend.sources.attach.exposition import Reader

BLANK = 2.0**46
MIB = 2**20

# DCGM's name -> (ours, factor)
FIELDS = {
    "DCGM_FI_DEV_GPU_UTIL": ("busy", 0.01),  # share of time with any kernel running: not how full the GPU is
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_active", 1.0),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_active", 1.0),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active", 1.0),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", 1.0),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_c", 1.0),
    "DCGM_FI_DEV_FB_USED": ("memory_used_bytes", MIB),
    "DCGM_FI_DEV_FB_FREE": ("memory_free_bytes", MIB),
}
SHARES = {"busy", "sm_active", "dram_active", "tensor_active"}


class NodeGpu(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are 0 to 1. What the exporter does not tell is None."""

    uuid: str
    index: str
    name: str
    busy: float | None = None
    sm_active: float | None = None
    dram_active: float | None = None
    tensor_active: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: float | None = None
    memory_free_bytes: float | None = None


def reader() -> Reader:
    return Reader(frozenset(FIELDS))


def gpus(reader: Reader, body: bytes) -> list[NodeGpu]:
    """Whole GPUs in the order of their index, without slices of a GPU (MIG). `reader`: the one of this exporter."""
    found: dict[str, dict] = {}
    for name, series in reader.read(body).series.items():
        field, factor = FIELDS[name]
        for pairs, value in series.items():
            labels = dict(pairs)
            uuid = labels.get("UUID") or labels.get("gpu", "")
            if not uuid or labels.get("GPU_I_ID"):
                continue
            index, model = labels.get("gpu", ""), labels.get("modelName", "GPU")
            told = found.setdefault(uuid, {"uuid": uuid, "index": index, "name": model})
            scaled = value * factor
            if 0 <= value < BLANK and not (field in SHARES and scaled > 1):
                told[field] = scaled
    order = sorted(found.values(), key=lambda told: (len(told["index"]), told["index"], told["uuid"]))
    return [NodeGpu(**told) for told in order]
