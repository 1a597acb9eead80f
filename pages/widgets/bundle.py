"""Puts JavaScript modules of `assets/live` together into one inline module for `st.components.v2`.

Each module keeps its own scope: it becomes a function that returns what it exports, and an import becomes a
destructuring of that. Only the forms that our own modules use are understood, one statement a line:

    import { a, b as c } from "./x.js";
    export function f …   export class C …   export const n = …   export default function …
"""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.{1,2}/[^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|class|const|let) (\w+))", re.MULTILINE)
_DEFAULT = re.compile(r"^export default ", re.MULTILINE)
_OTHER = re.compile(r"^\s*(?:import|export)\b[^\n]*", re.MULTILINE)


class BundleError(ValueError):
    """A module uses an import or export form that is not understood, or modules import each other in a circle."""


def bundle(entry: Path, prelude: str = "") -> str:
    """One ES module: `prelude`, then `entry` and all that it imports, dependencies first; its default export last."""
    order: list[Path] = []
    _visit(entry.resolve(), order, ())
    names = {path: f"module{i}" for i, path in enumerate(order)}
    parts = [_wrapped(path, names) for path in order]
    return "\n".join([prelude, *parts, f"export default {names[order[-1]]}.default;", ""])


def _visit(path: Path, order: list[Path], above: tuple[Path, ...]) -> None:
    if path in above:
        raise BundleError("modules import each other: " + " -> ".join(p.name for p in (*above, path)))
    if path in order:
        return
    for _, target in _IMPORT.findall(_source(path)):
        _visit((path.parent / target).resolve(), order, (*above, path))
    order.append(path)


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _wrapped(path: Path, names: dict[Path, str]) -> str:
    def imported(match: re.Match) -> str:
        wanted = ", ".join(name.strip().replace(" as ", ": ") for name in match[1].split(",") if name.strip())
        return f"const {{ {wanted} }} = {names[(path.parent / match[2]).resolve()]};"

    source = _source(path)
    exports = _EXPORT.findall(source)
    body = _EXPORT.sub("", _IMPORT.sub(imported, source))
    if _DEFAULT.search(body):
        body = _DEFAULT.sub("const defaultExport = ", body)
        exports.append("default: defaultExport")
    left = _OTHER.search(body)
    if left:
        raise BundleError(f"{path.name}: this import or export form is not understood: {left[0].strip()}")
    return f"const {names[path]} = (() => {{ // {path.name}\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();"
