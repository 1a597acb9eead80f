"""The bundler: what it puts together runs, and what it does not understand it refuses."""

import json
import shutil
import subprocess

import pytest

from pages.widgets.bundle import BundleError, bundle


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    return folder / "entry.js"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_modules_keep_their_own_scope_and_share_what_they_import(tmp_path):
    entry = write(
        tmp_path,
        counter="""
const HEIGHT = 1;
export const state = { n: 0 };
export function count() { state.n += HEIGHT; return state.n; }
""",
        left="""
import { count as up } from "./counter.js";
const HEIGHT = 100;
export class Left { go() { return up() + HEIGHT; } }
""",
        entry="""
import { Left } from "./left.js";
import { state, count } from "./counter.js";
export default function () { count(); return [new Left().go(), state.n, PRELUDE]; }
""",
    )
    code = bundle(entry, "const PRELUDE = 'p';")
    out = tmp_path / "out.mjs"
    out.write_text(code + "\n", encoding="utf-8")
    run = tmp_path / "run.mjs"
    run.write_text('import run from "./out.mjs"; console.log(JSON.stringify(run()));', encoding="utf-8")
    result = subprocess.run(["node", run], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(result.stdout) == [102, 2, "p"]


def test_a_module_comes_once_and_before_those_that_need_it(tmp_path):
    entry = write(
        tmp_path,
        base="export const b = 1;\n",
        one='import { b } from "./base.js";\nexport const o = b;\n',
        two='import { b } from "./base.js";\nexport const t = b;\n',
        entry='import { o } from "./one.js";\nimport { t } from "./two.js";\nexport default o + t;\n',
    )
    code = bundle(entry)
    assert code.count("// base.js") == 1
    assert code.index("// base.js") < code.index("// one.js") < code.index("// entry.js")


@pytest.mark.parametrize(
    "line",
    ['import x from "./base.js";', 'import * as x from "./base.js";', "export { x };", "export * from './base.js';"],
)
def test_other_forms_are_refused_by_name(tmp_path, line):
    entry = write(tmp_path, base="export const x = 1;\n", entry=f"{line}\nexport default 1;\n")
    with pytest.raises(BundleError, match="entry.js"):
        bundle(entry)


def test_circles_are_refused(tmp_path):
    entry = write(
        tmp_path,
        a='import { b } from "./b.js";\nexport const a = 1;\n',
        b='import { a } from "./a.js";\nexport const b = 1;\n',
        entry='import { a } from "./a.js";\nexport default a;\n',
    )
    with pytest.raises(BundleError, match=r"a\.js -> b\.js -> a\.js"):
        bundle(entry)
