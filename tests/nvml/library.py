"""The fake NVML library: built from fake_nvml.c with the C compiler that is here, and told what to be by a script.

os.environ | variables("h100", folder)            is what another process must find in its environment
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MACHINES = HERE / "machines"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
NO_COMPILER = "no C compiler (cc, gcc, clang) is here to build the fake NVML library"
FLAGS = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]


@functools.cache
def build() -> Path:
    """The library, built once for a source; whole or not at all."""
    source = HERE / "fake_nvml.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kvscope-fake-nvml-{os.getuid()}-{digest}"
    path = folder / "libnvidia-ml.so.1"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        partial = folder / f"{os.getpid()}.so"
        soname = "-Wl,-soname,libnvidia-ml.so.1"
        subprocess.run([COMPILER, *FLAGS, soname, "-o", partial, source, "-lpthread", "-lm"], check=True)
        os.replace(partial, path)
    return path


def variables(machine: str, folder: Path) -> dict[str, str]:
    """What a process must find in its environment to see `machine`. The script is copied: a test may change it."""
    script = folder / f"{machine}.txt"
    script.write_text((MACHINES / f"{machine}.txt").read_text())
    return {"KVSCOPE_NVML_LIBRARY": str(build()), "FAKE_NVML_SCRIPT": str(script)}


class Script:
    """The hardware as a test wants it, line by line; every change counts from the next call on."""

    def __init__(self, path: Path):
        self.path = path
        lines = [line.partition(" ") for line in path.read_text().splitlines() if line and line[0] != "#"]
        self.lines = {key: value for key, _, value in lines}

    def update(self, lines: dict[str, object]) -> None:
        """None takes a line away."""
        self.lines = {k: v for k, v in (self.lines | lines).items() if v is not None}
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in self.lines.items()))
        os.replace(new, self.path)  # a reader never sees half a file
