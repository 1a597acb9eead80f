"""`python -m backend load`, against a server without a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend.workload.cli import app
from tests.sources.fake_engine import Serving
from tests.waiting import eventually
from tests.workload.talker import Talker

ROOT = Path(__file__).parents[2]
QUICK = ["--requests", "10", "--min-seconds", "0", "--output-tokens", "3", "--input-tokens", "20"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Talker, str]]:
    talker = Talker()
    talker.token_s = 0.002
    with Serving(talker) as url:
        yield talker, url


def test_json_has_every_rate_and_every_request(served):
    ran = CliRunner().invoke(app, ["--url", served[1], "--rate", "40,20", *QUICK, "--slo-ttft-ms", "60000", "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert [row["offered_rate_per_s"] for row in told["rates"]] == [20, 40] and told["complete"]
    assert len(told["requests"]) == 20 and {request["state"] for request in told["requests"]} == {"ok"}
    assert all(row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["ttft_p99_s"] for row in told["rates"])
    assert [row["good_share"] for row in told["goodput"]] == [1, 1]
    assert told["machine"]["model"] == "talker" and told["settings"]["requests"] == 10


def test_a_trace_is_played(served, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time_s,input_tokens,output_tokens\n" + "".join(f"{i / 50},20,{1 + i % 3}\n" for i in range(12)))
    ran = CliRunner().invoke(app, ["--url", served[1], "--trace", str(path), "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert sorted(request["output_tokens"] for request in told["requests"]) == [1] * 4 + [2] * 4 + [3] * 4


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--rate", "-1"], "-1 requests/s cannot be sent"),
        (["--rate", "fast"], "give numbers, such as 1,2,4"),
        (["--rate", "1e6"], "more than one client sends on time"),
        (["--requests", "3"], "give at least 10"),
        (["--input-tokens", "5000"], "takes 1,000"),
        (["--trace", "/nowhere/trace.csv"], "cannot be read"),
        (["--api-key-file", "/nowhere/key"], "cannot be read"),
        (["--url", "nonsense"], "no address of a server"),
    ],
)
def test_bad_input_is_a_message_and_status_2(served, arguments, words):
    ran = CliRunner().invoke(app, ["--url", served[1], *arguments])
    assert ran.exit_code == 2 and words in ran.output and "Traceback" not in ran.output


def test_ctrl_c_prints_what_was_kept(served):
    """In a process of its own, as the signal goes to a process."""
    talker, url = served
    before = len(talker.came)
    process = subprocess.Popen(
        [sys.executable, "-m", "backend", "load", "--url", url, "--rate", "40", "--requests", "2000", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    eventually(lambda: len(talker.came) > before + 120 or process.poll() is not None, "three seconds of load")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    told = json.loads(out)
    assert not told["complete"] and told["rates"][0]["ok"] >= 1
