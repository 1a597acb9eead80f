"""The model catalogue: `assets/catalogue/models.json`. A row is a `config.json` with a name, a source and what was
published about it; everything else is counted from the configuration.

A file of your own with the same fields (`KVSCOPE_CATALOGUE`, a folder) adds rows and replaces those of the same key.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from backend.planner.accelerators import FOLDER, OWN_FOLDER
from backend.planner.arch import Architecture
from backend.planner.config import parse
from backend.planner.errors import CatalogueError, PlannerError
from backend.planner.names import choose

MAX_FILE_BYTES = 5_000_000


@dataclass(frozen=True, kw_only=True)
class CatalogueModel:
    key: str
    name: str
    source: str
    verified: str  # yes: read in the source | partly | no: from memory
    config: dict = field(hash=False)
    notes: str = ""
    published: dict = field(default_factory=dict, hash=False)  # what its makers say: counts, sizes of files
    file_stores_tied_head: bool = False  # the published file has the head a second time
    file_extra_bytes: int = 0  # of buffers that the published files hold beside the parameters

    @cached_property
    def architecture(self) -> Architecture:
        """Raises UnsupportedArchitecture."""
        return parse(self.config)


@cache
def models() -> dict[str, CatalogueModel]:
    """Key -> model, in the order of the file. Raises CatalogueError."""
    found = read(FOLDER / "models.json")
    own = os.environ.get(OWN_FOLDER)
    if own and (path := Path(own) / "models.json").is_file():
        found = found | read(path)
    return found


def find(name: str) -> CatalogueModel:
    """By key, by name, or by the beginning or words of one. Raises UnknownName."""
    rows = models()
    return choose(name, rows, {key: [row.name] for key, row in rows.items()}, "model")


def read(path: Path) -> dict[str, CatalogueModel]:
    """The rows of one file, each checked and counted once. Raises CatalogueError."""
    rows = load_json(path)
    if not isinstance(rows, list):
        raise CatalogueError(f"{path.name} must hold a list of models")
    found: dict[str, CatalogueModel] = {}
    for number, row in enumerate(rows):
        where = f"{path.name}, model {number + 1}"
        if not isinstance(row, dict):
            raise CatalogueError(f"{where} must be an object")
        for column in ("key", "name", "source", "verified"):
            if not isinstance(row.get(column), str) or not row[column]:
                raise CatalogueError(f"{where}: {column} is missing")
        where = f"{path.name}, {row['key']}"
        if row["verified"] not in ("yes", "partly", "no"):
            raise CatalogueError(f"{where}: verified must be yes, partly or no")
        if row["key"] in found:
            raise CatalogueError(f"{where}: this key stands there twice")
        try:
            model = CatalogueModel(**row)
            _ = model.architecture
        except TypeError as error:
            raise CatalogueError(f"{where}: {error}") from error
        except PlannerError as error:
            raise CatalogueError(f"{where}: {error}") from error
        found[model.key] = model
    return found


def load_json(path: Path) -> object:
    """Raises CatalogueError, also for a file that no configuration would ever fill."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CatalogueError(f"{path.name} is larger than {MAX_FILE_BYTES:,} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CatalogueError(f"{path.name} cannot be read: {error}") from error
