"""A check in a process of its own: what ends, hangs or poisons a CUDA context there costs the others nothing.

    python -m benchmarks.gpu.alone MODULE:FUNCTION DEVICE SECONDS FILE

calls `FUNCTION(device)` and writes what it returns to FILE as JSON. Rows that it has noted until then are kept when it
fails or its time is over.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_end = float("inf")
_file: Path | None = None


def run(check: Callable[[str], dict[str, Any]], device: str, seconds: float) -> dict[str, Any]:
    """What `check`, a module's function, found within `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        file, said = Path(folder) / "found.json", Path(folder) / "said.txt"
        words = [f"{check.__module__}:{check.__qualname__}", device, f"{seconds:.0f}", str(file)]
        with said.open("w") as out:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.alone", *words], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
            )
            try:
                code = child.wait(seconds)
                ended = f"its process ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                ended = f"it took more than {seconds:.0f} s"
            finally:
                child.kill()
                child.wait()
        found = json.loads(file.read_text()) if file.exists() else {}
        if ended and "failed" not in found:
            found |= {"failed": ended, "where": said.read_text(errors="replace")[-1500:]}
        return found


def left_s() -> float:
    """Seconds until this process is ended."""
    return _end - time.monotonic()


def rows(cases: Iterable[dict[str, Any]], measure: Callable[..., dict[str, Any]], each_s: float = 5.0) -> list[dict]:
    """`measure(**case)` for each case while there is time for it; a case that fails is a row that says so."""
    made: list[dict] = []
    for case in cases:
        if left_s() < each_s:
            made.append({**case, "skipped": f"{left_s():.0f} s are left"})
            continue
        try:
            made.append({**case, **measure(**case)})
        except Exception as error:  # the next case may well be possible
            made.append({**case, "failed": f"{type(error).__name__}: {error}"[:400]})
        note({"rows": made})
    return made


def note(found: dict[str, Any]) -> None:
    """Keeps what has been found so far; in the process that a check shares with others, does nothing."""
    if _file is not None:
        partial = _file.with_suffix(".partial")
        partial.write_text(json.dumps(found, default=str), encoding="utf-8")
        os.replace(partial, _file)


def main(words: list[str]) -> int:
    global _end, _file
    name, device, seconds, file = words
    # Time to write down what there is, before it is ended.
    _end, _file = time.monotonic() + float(seconds) - 3, Path(file)
    module, _, function = name.partition(":")
    try:
        found, code = getattr(importlib.import_module(module), function)(device), 0
    except Exception as error:
        found = json.loads(_file.read_text()) if _file.exists() else {}
        found |= {"failed": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:]}
        code = 1
    note(found)
    sys.stdout.flush()
    # Not through the interpreter's own end, which may wait for threads and for a GPU that no longer answers.
    os._exit(code)


if __name__ == "__main__":
    # Under its own name: a check that imports this module means this process.
    from benchmarks.gpu import alone

    alone.main(sys.argv[1:])
