"""How the benchmark talks to a peer: one JSON object on stdin, one JSON object a line on stdout.

Imports nothing of ours, so that a peer can live in an environment of its own.

In:  {"model": folder, "dtype": "float32", "threads": 2, "options": {…},
      "jobs": [{"name": "8", "requests": [{"tokens": [ids], "output_tokens": n}, …]}, …]}
Out: {"ready": {"engine": …, "version": …, …}}                        once, when loaded
     {"job": name, "requests": [{"times": [seconds], "tokens": [ids]}, …], "steps": […], "note": ""}  one a job

All requests of a job arrive together at time 0, just before the first call into the engine; `times` says when each
output token was there, on that clock. No job may stop at an end-of-sequence token: everyone does the same work.
"""

import json
import os
import sys


def start() -> dict:
    """Reads the order. From here on whatever libraries print goes to stderr, stdout carries only `say`."""
    global _out
    _out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return json.load(sys.stdin)


def say(line: dict) -> None:
    _out.write(json.dumps(line) + "\n")
    _out.flush()


def job_done(name: str, times: list, tokens: list, steps: list = (), note: str = "") -> None:
    requests = [{"times": t, "tokens": ids} for t, ids in zip(times, tokens, strict=True)]
    say({"job": name, "requests": requests, "steps": list(steps), "note": note})
