"""Compiling kernels.cpp for exactly this machine, once. Imports no torch: asking whether it is done is quick."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from backend.models.cache import root

SOURCE = Path(__file__).with_name("kernels.cpp")  # with the headers beside it
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi", "-Wno-unknown-pragmas"]
COMPILE_TIMEOUT_S = 600


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why, in words."""


def build() -> Path:
    """The shared library, compiled if it is not there yet (up to a minute or two). Raises BuildError.

    Two processes that compile at the same time do the same work twice and disturb each other in nothing: each renames
    a finished file into place.
    """
    library = path()
    if library.exists():
        return library
    torch = _torch()
    libraries = torch / "lib"
    # The OpenMP library that torch itself runs on: with another one there would be two pools of threads.
    openmp = sorted([*libraries.glob("libgomp*.so*"), *torch.with_name("torch.libs").glob("libgomp*.so*")])[:1]
    include = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as folder:
            made = Path(folder) / library.name
            command = [
                *_compiler(), *FLAGS, _for_this_cpu(), *(f"-I{i}" for i in include), str(SOURCE), "-o", str(made),
                "-Wl,--as-needed", *map(str, openmp), f"-L{libraries}", "-ltorch_cpu", "-lc10",
                f"-Wl,-rpath,{libraries}",
            ]  # fmt: skip
            _run(command, COMPILE_TIMEOUT_S)
            made.replace(library)
    except OSError as error:
        raise BuildError(f"{library.parent} cannot be written: {error.strerror or error}") from error
    return library


def path() -> Path:
    """Where the library for this source, torch, processor and compiler is, or will be. Raises BuildError."""
    if sys.platform != "linux":
        raise BuildError(f"they are built on Linux only, not on {sys.platform}")
    version = _run([*_compiler(), "--version"], 30)
    sources = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    parts = [*sources, importlib.metadata.version("torch"), str(_torch()), _cpu(), version, *FLAGS]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return root() / "native" / f"kernels-{key}.so"


def _compiler() -> list[str]:
    """The C++ compiler as words of a command: $CXX, or the first that is installed."""
    for candidate in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    raise BuildError("no C++ compiler was found")


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise BuildError("torch is not installed")
    return Path(found.submodule_search_locations[0])


def _cpu() -> str:
    """The processor and what it can do: code for another one may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), *sorted(told)])


def _for_this_cpu() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _run(command: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or [f"it ended with {done.returncode}"]
        raise BuildError(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0]).strip()}")
    return done.stdout
