"""The user's cache: built once, whole or not at all, however many processes start at the same time."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.models.errors import ModelError

Say = Callable[[str], None]


def say_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def root() -> Path:
    """$XDG_CACHE_HOME/kvscope, or ~/.cache/kvscope (a relative XDG_CACHE_HOME is void, as its rules say)."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kvscope"


def build_once(name: str, build: Callable[[Path], None], say: Say = say_to_stderr) -> Path:
    """The folder models/<name> of the cache; `build` fills it when it is not there yet.

    `build` gets an empty folder beside the final place, which is renamed when it returns: a process killed
    half-way leaves nothing that looks finished. A lock makes others wait; the kernel drops it with its holder.
    Raises ModelError when the cache cannot be written, and whatever `build` raises.
    """
    final = root() / "models" / name
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / f".{name}.lock", say):
            if final.is_dir():  # the one we waited for has built it
                return final
            for leftover in final.parent.glob(f".{name}.*.partial"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=final.parent))
            try:
                build(partial)
                partial.chmod(0o755)
                partial.rename(final)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {final.parent}: {error.strerror or error}. "
            "Free some space, or set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return final


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is preparing this model; waiting for it …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
