"""The accelerator catalogue: `assets/catalogue/accelerators.csv`, checked when it is read.

Rates are dense, with a multiply-add counted as two, as data sheets do; sparse headline numbers have no place here.
A file of your own with the same columns (`KVSCOPE_CATALOGUE`, a folder) adds rows and replaces those of the same key.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from backend.planner.errors import CatalogueError, UnknownName, UnsupportedDtype
from backend.planner.names import choose
from backend.planner.units import GB, GIB, TFLOPS

FOLDER = Path(__file__).parents[2] / "assets" / "catalogue"
OWN_FOLDER = "KVSCOPE_CATALOGUE"
RATE_COLUMNS = {
    "bf16": "bf16_tflops",
    "fp16": "fp16_tflops",
    "fp8": "fp8_tflops",
    "int8": "int8_tops",
    "fp4": "fp4_tflops",
}
ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "fp8_e4m3": "fp8", "fp8_block": "fp8",
    "mxfp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4",
}  # fmt: skip
DOUBLE = {"fp8": 2.0, "int8": 2.0}  # of the bf16 rate, within 2 %, unless the row lists the exception
TOLERANCE = 0.02
PRINTED_SIZE = re.compile(r"\b\d+ ?GB\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    key: str
    name: str
    vendor: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: dict[str, float] = field(hash=False)  # format of the arithmetic -> dense rate
    memory_basis: str = ""  # where memory_bytes comes from
    architecture: str = ""
    device_level: str = ""  # compute capability or gfx target
    tdp_w: float | None = None
    link: str = "none"
    link_bytes_per_s: float | None = None  # one direction
    pcie_bytes_per_s: float | None = None  # one direction
    kind: str = "data sheet"  # data sheet | measured | what if
    source: str = ""
    verified: str = "no"  # yes: read in the source | partly | no: from memory
    notes: str = ""

    def rate(self, dtype: str) -> float:
        """Dense FLOP/s of arithmetic in `dtype`. Raises UnsupportedDtype."""
        name = ALIASES.get(dtype, dtype)
        if name not in self.flops_per_s:
            known = ", ".join(self.flops_per_s) or "none at all"
            raise UnsupportedDtype(f"{self.name} has no {dtype} arithmetic in the catalogue; it has {known}")
        return self.flops_per_s[name]

    def ridge_flop_per_byte(self, dtype: str = "bf16") -> float:
        """Arithmetic intensity at which memory and arithmetic take equally long."""
        return self.rate(dtype) / self.bandwidth_bytes_per_s

    def scaled(self, *, bandwidth: float = 1.0, flops: float = 1.0, memory: float = 1.0) -> Accelerator:
        """The same part with more of something: for what-if questions."""
        return dataclasses.replace(
            self,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * bandwidth,
            flops_per_s={dtype: rate * flops for dtype, rate in self.flops_per_s.items()},
            memory_bytes=int(self.memory_bytes * memory),
            kind="what if",
        )


def measured(
    name: str, *, memory_bytes: int, read_bytes_per_s: float, flops_per_s: dict[str, float], source: str
) -> Accelerator:
    """A machine by its own measured ceilings: it plans like any row of the catalogue, and says that it is measured."""
    return Accelerator(
        key="this-machine",
        name=name,
        vendor="this machine",
        memory_bytes=memory_bytes,
        memory_basis="reported by the system",
        bandwidth_bytes_per_s=read_bytes_per_s,
        flops_per_s={ALIASES.get(dtype, dtype): rate for dtype, rate in flops_per_s.items()},
        kind="measured",
        source=source,
        verified="yes",
    )


@cache
def load() -> dict[str, Accelerator]:
    """Key -> accelerator, in the order of the file. Raises CatalogueError."""
    own = os.environ.get(OWN_FOLDER)
    found = read(FOLDER / "accelerators.csv")
    if own and (path := Path(own) / "accelerators.csv").is_file():
        found = found | read(path)
    return found


def find(name: str) -> Accelerator:
    """By key, by name, or by the beginning or words of one ("h100-sxm", "80 GB H100"). A size that is printed but not
    what the driver reports ("48 GB L40S") does not stand in the way. Raises UnknownName."""
    rows = load()
    called = {key: [row.name, f"{row.name} {row.memory_bytes / GIB:.0f} GB"] for key, row in rows.items()}
    try:
        return choose(name, rows, called, "accelerator")
    except UnknownName:
        if (rest := PRINTED_SIZE.sub("", name).strip()) in ("", name):
            raise
        return choose(rest, rows, called, "accelerator")


def read(path: Path) -> dict[str, Accelerator]:
    """The rows of one file, each checked. Raises CatalogueError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CatalogueError(f"{path.name} cannot be read: {error}") from error
    found: dict[str, Accelerator] = {}
    for number, row in enumerate(rows, 2):
        where = f"{path.name}, line {number} ({row.get('key') or 'no key'})"
        accelerator = _parsed(row, where)
        if accelerator.key in found:
            raise CatalogueError(f"{where}: this key stands there twice")
        found[accelerator.key] = accelerator
    return found


def _parsed(row: dict[str, str | None], where: str) -> Accelerator:
    def number(column: str) -> float | None:
        text = (row.get(column) or "").strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise CatalogueError(f"{where}: {column} must be a number, found {text!r}") from None
        if not 0 < value < 1e18:
            raise CatalogueError(f"{where}: {column} must be positive, found {text}")
        return value

    def required(column: str) -> str:
        text = (row.get(column) or "").strip()
        if not text:
            raise CatalogueError(f"{where}: {column} is missing")
        return text

    reported, printed = number("memory_bytes_reported"), number("memory_gb_printed")
    bandwidth = number("bandwidth_gb_per_s")
    if bandwidth is None or (reported is None and printed is None):
        raise CatalogueError(f"{where}: bandwidth_gb_per_s and a memory size are needed")
    rates = {dtype: value * TFLOPS for dtype, column in RATE_COLUMNS.items() if (value := number(column)) is not None}
    check_rates(rates, (row.get("ratio_exceptions") or "").split(), where)
    verified = required("verified")
    if verified not in ("yes", "partly", "no"):
        raise CatalogueError(f"{where}: verified must be yes, partly or no, found {verified!r}")
    link, pcie = number("link_gb_per_s_per_direction"), number("pcie_gb_per_s_per_direction")
    return Accelerator(
        key=required("key"),
        name=required("name"),
        vendor=required("vendor"),
        architecture=(row.get("architecture") or "").strip(),
        device_level=(row.get("device_level") or "").strip(),
        memory_bytes=int(reported or printed * GIB),
        memory_basis="as the driver reports it" if reported else "printed GB taken as GiB, as memory chips are made",
        bandwidth_bytes_per_s=bandwidth * GB,
        flops_per_s=rates,
        tdp_w=number("tdp_w"),
        link=(row.get("link") or "none").strip(),
        link_bytes_per_s=link * GB if link else None,
        pcie_bytes_per_s=pcie * GB if pcie else None,
        source=required("source"),
        verified=verified,
        notes=(row.get("notes") or "").strip(),
    )


def check_rates(rates: dict[str, float], exceptions: Iterable[str], where: str) -> None:
    """Catches a sparse rate beside a dense one: fp8 and int8 are twice bf16, or the row says which is not."""
    base = rates.get("bf16")
    if base is None:
        return
    for dtype, ratio in DOUBLE.items():
        if dtype not in rates or dtype in exceptions:
            continue
        found = rates[dtype] / base
        if abs(found / ratio - 1) > TOLERANCE:
            raise CatalogueError(
                f"{where}: {dtype} is {found:.2f} × bf16, not {ratio:.0f} ×: is one of them a sparse rate? "
                "A part that really is different lists the format under ratio_exceptions"
            )
    if "fp16" in rates and not 0.99 <= rates["fp16"] / base <= 2.01:
        raise CatalogueError(f"{where}: fp16 is {rates['fp16'] / base:.2f} × bf16; one of them is no dense rate")
