"""Published numbers (cases.csv, with their sources) that the planner must reproduce, through the one runner."""

from pathlib import Path

import pytest

from tests.planner import run_cases

HERE = Path(__file__).parent
CASES = run_cases.read(HERE / "cases.csv")


@pytest.mark.parametrize("row", CASES, ids=lambda row: f"{row['id']}-{row['kind']}")
def test_published_number(row):
    assert run_cases.check(row) is None, row["source"]


def test_the_runner_names_what_fails(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    lines = (HERE / "cases.csv").read_text(encoding="utf-8").splitlines()
    good = next(line for line in lines if line.startswith("P343,"))
    file.write_text("\n".join([lines[0], good]), encoding="utf-8")
    assert run_cases.main(file) == 0
    wrong = good.replace("0.5556", "0.7").replace("P343", "X1")
    unknown = "X2,nobody_knows,{},1,s,0,approx,none,none"
    inputs = '"{""gpu"":""h100-sxm-80gb"",""dtype"":""bf16""}"'
    silent = f"X3,dtype_error,{inputs},UnsupportedDtype,exception,0,raises,none,none"
    file.write_text("\n".join([lines[0], good, wrong, unknown, silent]), encoding="utf-8")
    capsys.readouterr()
    assert run_cases.main(file) == 1
    said = capsys.readouterr().out
    assert "X1 cost_per_million_tokens: approx: expected 0.7" in said
    assert "X2 nobody_knows: no answer to the kind" in said
    assert "X3 dtype_error: expected UnsupportedDtype" in said
    assert "1 of 4 rows hold" in said
