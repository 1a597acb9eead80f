"""Measured ceilings of a device: how fast it copies, how fast it reads weights, how fast it multiplies.

"% of the roof" is only honest when the roof is the best this machine can do. So each ceiling is the best of several
ways of doing the same work, tried in turn, round after round, over arrays far larger than any cache; the median of the
best way is the ceiling, its slowest and fastest round the spread. Nothing here looks at a data sheet.

Copy counts bytes read and bytes written (the STREAM rule; the read that a write-allocating cache does is not counted).
Never measure while a request runs: that is the caller's to see to. torch is imported when a measurement starts.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil

from backend.telemetry.host import cpu_name
from backend.telemetry.peaks import Peak

if TYPE_CHECKING:
    import torch

GIB = 2**30
METHOD = 2  # another number where another way of measuring gives other numbers: what was kept before is not used
PATIENCE_S, LEAST_ROUNDS = 8.0, 3  # on a slow or busy machine rounds stop after this time, but not before these many
Progress = Callable[[float, str], None]  # share done, what is being done
Work = Callable[[], object]


class Ceiling(msgspec.Struct, kw_only=True, frozen=True):
    """`value` is the median over `rounds` of the best way; `low` and `high` its slowest and fastest round."""

    value: float
    low: float
    high: float
    unit: str  # B/s | FLOP/s
    way: str  # the way of doing it that was fastest
    ways: dict[str, float]  # every way tried -> its median
    rounds: int
    evidence: str = "measured"


class Conditions(msgspec.Struct, kw_only=True, frozen=True):
    device: str  # cpu | cuda:0 …
    device_name: str
    host: str
    dtype: str
    threads: int  # torch's intra-op threads; 0 on a GPU
    torch: str
    driver: str = ""
    uuid: str = ""  # of a GPU
    date: str = ""  # ISO 8601, UTC
    load_average: float = 0.0  # of the last minute, before measuring
    cores: int = 0
    working_set_bytes: int = 0  # of the weights that one round reads
    notes: list[str] = []


class Ceilings(msgspec.Struct, kw_only=True, frozen=True):
    copy: Ceiling
    read: Ceiling
    matmul: Ceiling
    conditions: Conditions
    beside: list[Peak] = []  # theoretical and data-sheet figures; not kept, for they are looked up anew


def data_sheet(name: str, dtype: str, bandwidth_bytes_per_s: float, flops_per_s: float) -> Ceilings:
    """The roofs of a device that is not here, as its maker states them."""

    def stated(value: float, unit: str) -> Ceiling:
        return Ceiling(
            value=value, low=value, high=value, unit=unit, way="data sheet", ways={}, rounds=0, evidence="data sheet"
        )

    bandwidth = stated(bandwidth_bytes_per_s, "B/s")
    return Ceilings(
        copy=bandwidth,
        read=bandwidth,
        matmul=stated(flops_per_s, "FLOP/s"),
        conditions=Conditions(device="modelled", device_name=name, host="", dtype=dtype, threads=0, torch=""),
    )


def measure(
    device: str = "cpu",
    dtype: str = "float32",
    *,
    rounds: int = 7,
    working_set_bytes: int | None = None,
    progress: Progress = lambda share, text: None,
) -> Ceilings:
    """Measures now, in this thread, with torch's current number of threads; a few seconds.

    `working_set_bytes`: how many bytes of weights a round reads, by default 1 GiB on a CPU and 4 GiB on a GPU, less
    where memory is short. Raises ValueError for a dtype that torch does not have or a device that is not there.
    """
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"'{dtype}' is no floating-point dtype of torch; try float32, bfloat16 or float16")
    try:
        where = torch.device(device)
        if where.type not in ("cpu", "cuda"):
            raise ValueError(f"'{device}' cannot be measured; cpu or cuda can")
        if where.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("no CUDA device can be used here (torch.cuda.is_available() is false)")
    except RuntimeError as error:
        raise ValueError(f"'{device}' is no device: {error}") from None
    probe = _Probe(torch, where, kind)
    before = conditions(device, dtype)
    weights, notes = _working_set(torch, where, working_set_bytes)
    if before.load_average > before.cores:
        notes.append(
            f"load average {before.load_average:.1f} on {before.cores} cores: other work ran, the ceilings are higher"
        )
    with torch.inference_mode():
        progress(0.0, "allocating")
        copy_and_read = probe.bandwidth_ways(weights)
        times = probe.rounds(copy_and_read, rounds, lambda share, name: progress(0.1 + 0.6 * share, name))
        copy = _best({name: t for name, t in times.items() if name.startswith("copy")}, copy_and_read, "B/s")
        read = _best({name: t for name, t in times.items() if not name.startswith("copy")}, copy_and_read, "B/s")
        del copy_and_read
        products = probe.matmul_ways()
        times = probe.rounds(products, rounds, lambda share, name: progress(0.7 + 0.3 * share, name))
        matmul = _best(times, products, "FLOP/s")
    progress(1.0, "done")
    return Ceilings(
        copy=copy,
        read=read,
        matmul=matmul,
        conditions=msgspec.structs.replace(before, working_set_bytes=weights, notes=notes),
    )


def conditions(device: str, dtype: str) -> Conditions:
    """What a measurement made now would hold for."""
    import torch

    where = torch.device(device)
    on_gpu = where.type == "cuda"
    return Conditions(
        device=device,
        device_name=torch.cuda.get_device_name(where) if on_gpu else cpu_name(),
        host=platform.node(),
        dtype=dtype,
        threads=0 if on_gpu else torch.get_num_threads(),
        torch=str(torch.__version__),
        driver=_driver(torch) if on_gpu else "",
        uuid=str(getattr(torch.cuda.get_device_properties(where), "uuid", "")) if on_gpu else "",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        load_average=os.getloadavg()[0],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _driver(torch) -> str:
    """The toolkit torch was built with, and the driver that runs."""
    try:
        told = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        told = None
    return f"CUDA {torch.version.cuda}" + (f", driver {told[0]}" if told else "")


# ---- kept between starts ---------------------------------------------------------------------------------------------


def cached(device: str = "cpu", dtype: str = "float32", folder: Path | None = None) -> Ceilings | None:
    """What was measured before on this device with this dtype, thread count and torch; None when nothing was."""
    try:
        return msgspec.json.decode(_file(conditions(device, dtype), folder).read_bytes(), type=Ceilings)
    except (OSError, msgspec.MsgspecError):
        return None


def keep(ceilings: Ceilings, folder: Path | None = None) -> Path:
    """Writes them where `cached` looks, whole or not at all. Raises OSError."""
    path = _file(ceilings.conditions, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    ceilings = msgspec.structs.replace(ceilings, beside=[])
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(ceilings), indent=1))
    partial.replace(path)
    return path


def _file(found: Conditions, folder: Path | None) -> Path:
    same = (
        METHOD,
        found.host,
        found.device,
        found.device_name,
        found.dtype,
        found.threads,
        found.torch,
        found.driver,
        found.uuid,
    )
    key = hashlib.blake2b(repr(same).encode(), digest_size=8).hexdigest()
    return (folder or _cache_folder()) / f"{found.device.replace(':', '-')}-{found.dtype}-{key}.json"


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kvscope" / "ceilings"


# ---- how -------------------------------------------------------------------------------------------------------------


class _Way(msgspec.Struct):
    """One way of doing `amount` (bytes or FLOPs) of work in a call."""

    work: Work
    amount: int


def _working_set(torch, where: torch.device, wanted: int | None) -> tuple[int, list[str]]:
    """Bytes of weights a round reads, and what to say about it. Four times as much is allocated (copy, prepacked)."""
    if where.type == "cuda":
        free, usual = torch.cuda.mem_get_info(where)[0], 4 * GIB
    else:
        free, usual = psutil.virtual_memory().available, GIB
    size = min(wanted or usual, free // 6)
    size = max(size - size % _MATRIX_BYTES, _MATRIX_BYTES)
    if size < min(wanted or usual, usual):
        return size, [f"only {free / GIB:.1f} GiB are free: arrays of {size / 2**20:.0f} MiB, caches may flatter"]
    return size, []


_COLUMNS = 4096
_MATRIX_BYTES = 32 * 2**20  # 32 MiB a matrix: longer than any launch or thread start is worth


class _Probe:
    def __init__(self, torch, where: torch.device, dtype: torch.dtype):
        self.torch, self.where, self.dtype = torch, where, dtype
        self.synchronised = where.type == "cuda"

    def bandwidth_ways(self, size: int) -> dict[str, _Way]:
        """Ways to copy `size` bytes and ways to read them as weights (a matrix-vector product, batch 1)."""
        torch = self.torch
        linear = torch.nn.functional.linear
        source, target = (self._large(size).fill_(number) for number in (1, 2))
        rows = _MATRIX_BYTES // self.dtype.itemsize // _COLUMNS
        weights = source.view(self.dtype).fill_(1 / 64).view(-1, rows, _COLUMNS)
        matrices = list(weights)
        x = torch.full((_COLUMNS,), 1 / 64, dtype=self.dtype, device=self.where)
        row = x[None]
        flat = source.view(torch.float32) if self.dtype.itemsize == 4 else source.view(self.dtype)
        ways = {
            "copy": _Way(lambda: target.copy_(source), 2 * size),
            "linear, batch 1": _Way(lambda: [linear(row, w) for w in matrices], size),
            "matrix times vector": _Way(lambda: [torch.mv(w, x) for w in matrices], size),
            "sum": _Way(flat.sum, size),
        }
        if (packed := self._prepacked(matrices)) is not None:
            ways["linear, batch 1, prepacked by oneDNN"] = _Way(lambda: [apply(row) for apply in packed], size)
        return ways

    def _large(self, size: int) -> torch.Tensor:
        """[size] bytes, on a CPU from numpy, which asks Linux for huge pages: a tenth faster to read."""
        if self.where.type == "cpu":
            return self.torch.from_numpy(np.empty(size, np.uint8))
        return self.torch.empty(size, dtype=self.torch.uint8, device=self.where)

    def matmul_ways(self) -> dict[str, _Way]:
        """Ways to multiply square matrices, large enough that a product takes 20 ms or more where that is possible."""
        torch = self.torch
        n = 512
        while n < 16_384:
            a = torch.full((n, n), 1 / 64, dtype=self.dtype, device=self.where)
            self._time(lambda a=a: a @ a)
            if self._time(lambda a=a: a @ a) > 0.02:
                break
            n *= 2
        a = torch.full((n, n), 1 / 64, dtype=self.dtype, device=self.where)
        b = torch.full_like(a, 1 / 32)
        flops = 2 * n**3
        ways = {
            "matrix product": _Way(lambda: a @ b, flops),
            "linear": _Way(lambda: torch.nn.functional.linear(a, b), flops),
        }
        if (packed := self._prepacked([b])) is not None:
            ways["linear, prepacked by oneDNN"] = _Way(lambda: packed[0](a), flops)
        return ways

    def _prepacked(self, matrices: list[torch.Tensor]) -> list[Callable] | None:
        """Linear layers over weights in oneDNN's own layout; None where this torch or CPU has no such thing."""
        torch = self.torch
        if self.where.type != "cpu" or not torch.backends.mkldnn.is_available():
            return None
        if self.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        if self.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
            return None
        try:
            packed = [torch.ops.mkldnn._reorder_linear_weight(w) for w in matrices]
            apply = torch.ops.mkldnn._linear_pointwise
            apply(matrices[0][:1], packed[0], None, "none", [], "")
        except (AttributeError, RuntimeError, NotImplementedError):
            return None
        return [lambda x, w=w: apply(x, w, None, "none", [], "") for w in packed]

    def rounds(self, ways: dict[str, _Way], rounds: int, progress: Progress) -> dict[str, list[float]]:
        """Seconds of each way in each round; the ways take turns, so that a slow moment hits all of them.

        Fewer rounds where they take longer than `PATIENCE_S` in all.
        """
        times: dict[str, list[float]] = {name: [] for name in ways}
        start = time.perf_counter()
        for number in range(rounds + 1):
            if number > LEAST_ROUNDS and time.perf_counter() - start > PATIENCE_S:
                break
            for name, way in ways.items():
                progress(number / (rounds + 1), name)
                seconds = self._time(way.work)
                if number:  # the first round warms up
                    times[name].append(seconds)
        return times

    def _time(self, work: Work) -> float:
        if not self.synchronised:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _best(times: dict[str, list[float]], ways: dict[str, _Way], unit: str) -> Ceiling:
    rates = {name: [ways[name].amount / t for t in seconds] for name, seconds in times.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(medians, key=medians.__getitem__)
    return Ceiling(
        value=medians[best],
        low=min(rates[best]),
        high=max(rates[best]),
        unit=unit,
        way=best,
        ways=medians,
        rounds=len(rates[best]),
    )
