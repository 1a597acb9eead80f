"""What only a GPU can show, in one prepared run of at most eight minutes.

    python -m benchmarks.gpu_check [--out FOLDER] [--only NAME …] [--minutes 8] [--device cuda] [--list]

This script has never run on a GPU: what stands here was rehearsed on a CPU with the fake NVML library (`--device cpu`
with KVSCOPE_NVML_LIBRARY set), which shows that it runs and says nothing about hardware.

It needs torch with CUDA (2.11 or newer), transformers (5.17 or newer), nvidia-ml-py, psutil and msgspec; no network, no
Streamlit, no weights: models are random ones of a real shape. Every check stands alone: one that fails says so in the
result and the others go on. The result is written again after each check, so a run that is cut off keeps what it had.

A part is a module with `CHECKS`, a list of `Check`; PARTS names them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import alone, table

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("benchmarks.gpu.sensors", "benchmarks.gpu.right", "benchmarks.gpu.speed", "benchmarks.gpu.decode")


@dataclass(frozen=True)
class Check:
    """`run(device)` returns what it found, as JSON knows it. `seconds`: what it is expected to take, on a GPU.
    `alone`: in a process of its own, which is ended after three times that and then leaves what it had found."""

    name: str
    question: str
    seconds: float
    run: Callable[[str], dict[str, Any]]
    alone: bool = False


def checks() -> list[Check]:
    return [check for part in PARTS for check in importlib.import_module(part).CHECKS]


def describe(device: str) -> dict[str, Any]:
    import torch
    import transformers

    found = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "device": device,
        "fake": bool(os.environ.get("KVSCOPE_NVML_LIBRARY")),
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found["properties"] = {
            name: str(getattr(properties, name, ""))
            for name in ("name", "uuid", "total_memory", "major", "minor", "multi_processor_count", "memory_clock_rate",
                         "memory_bus_width", "L2_cache_size")
        }  # fmt: skip
    return found


def run(wanted: list[Check], device: str, minutes: float, out: Path) -> dict[str, Any]:
    """Each check in turn, while there is time for it."""
    end = time.monotonic() + 60 * minutes
    result: dict[str, Any] = {"machine": describe(device), "checks": {}}
    for check in wanted:
        left = end - time.monotonic()
        print(f"{check.name}: {check.question}", flush=True)
        start = time.monotonic()
        if left < check.seconds:
            found: dict[str, Any] = {"skipped": f"{left:.0f} s are left and it takes {check.seconds:.0f} s"}
        else:
            try:
                found = alone.run(check.run, device, min(left, 3 * check.seconds)) if check.alone else check.run(device)
            except Exception as error:  # one check must not cost the others their machine time
                found = {"failed": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:]}
        found["took_s"] = round(time.monotonic() - start, 2)
        result["checks"][check.name] = {"question": check.question, **found}
        print(f"  {found.get('failed') or found.get('skipped') or found.get('in_words', 'done')}", flush=True)
        write(result, out)
    return result


def write(result: dict[str, Any], out: Path) -> None:
    """Whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    partial = out / "gpu_check.json.partial"
    partial.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(partial, out / "gpu_check.json")
    (out / "gpu_check.md").write_text(table.markdown(result), encoding="utf-8")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results"))
    parser.add_argument("--only", nargs="*", help="names of checks")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true", help="print the checks and what they take")
    options = parser.parse_args(words)
    wanted = [check for check in checks() if not options.only or check.name in options.only]
    if options.list:
        for check in wanted:
            print(f"{check.name:16} {check.seconds:4.0f} s  {check.question}")
        return
    if options.device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device can be used here; --device cpu rehearses with the fake NVML library")
    result = run(wanted, options.device, options.minutes, options.out)
    bad = [name for name, found in result["checks"].items() if "failed" in found]
    print(table.markdown(result))
    print(f"kept in {options.out / 'gpu_check.json'}" + (f"; failed: {', '.join(bad)}" if bad else ""))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
