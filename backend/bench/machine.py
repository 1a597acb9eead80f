"""The machine and the software, as far as they explain a figure."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import psutil

from backend.telemetry.ceiling import cpu_name


def describe() -> dict:
    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""

    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def load_average() -> float:
    return os.getloadavg()[0]
