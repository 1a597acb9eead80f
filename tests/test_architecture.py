"""The import rules of docs/architecture.md, read from the code itself."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def offenders(room: str, forbidden: tuple[str, ...]) -> list[str]:
    files = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    assert files, room
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if any(name == f or name.startswith(f + ".") for f in forbidden)
    ]


RULES = {
    "backend": ("streamlit", "pages", "app"),
    "backend/events.py": ("backend",),
    "backend/fold.py": ("backend.engine", "backend.server", "backend.sources", "backend.hub"),
    "backend/hub.py": ("backend.engine", "backend.server", "backend.sources"),
    "backend/planner": ("backend.engine", "backend.server", "backend.models", "torch", "transformers", "httpx"),
    "backend/telemetry": ("backend.engine", "backend.server", "backend.models"),
    "backend/phases.py": ("backend.engine", "backend.server", "backend.sources", "torch"),
    "backend/what_if.py": ("backend.engine", "backend.server", "backend.hub", "torch"),
    "backend/engine": ("backend.server", "backend.sources", "backend.hub", "backend.workload"),
    "backend/models": ("backend.server", "backend.sources", "backend.hub"),
    "backend/sources": ("backend.engine", "torch", "transformers"),
    "backend/experiments": ("backend.engine", "backend.server", "torch", "transformers"),
    "backend/workload": ("backend.engine", "torch", "transformers"),
    "pages": ("torch", "transformers", "backend.engine"),
    "app.py": ("torch", "transformers", "backend.engine"),
}


@pytest.mark.parametrize("room", RULES)
def test_imports_run_one_way(room):
    assert offenders(room, RULES[room]) == []


def test_only_one_module_talks_to_nvml():
    users = [file.name for file in (ROOT / "backend").rglob("*.py") if "pynvml" in imports(file)]
    assert users == ["nvml.py"]


def test_the_ui_process_never_loads_torch():
    """Not even through a third module: torch's objects would make every rerun's garbage collection slow."""
    widgets = [f"pages.widgets.{p.stem}" for p in (ROOT / "pages" / "widgets").glob("*.py") if p.stem != "__init__"]
    modules = ["backend.hub", "backend.sources", "backend.workload.users", "backend.server.live", *widgets]
    modules += ["backend.experiments.load", "backend.experiments.imports"]
    modules += ["backend.telemetry.sampler", "backend.telemetry.join", "backend.telemetry.peaks"]
    code = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def test_a_command_starts_without_what_other_commands_need():
    """Each of these takes seconds, and `serve` is up before its model is."""
    heavy = ("torch", "transformers", "pandas", "httpx")
    code = f"""
import sys
from typer.main import get_command
from backend.cli import app
assert get_command(app).get_command(None, "serve")
assert not set({heavy!r}) & set(sys.modules), set({heavy!r}) & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
