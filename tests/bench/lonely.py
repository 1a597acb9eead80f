"""Checks for a process of their own: what a GPU check may do to it."""

from __future__ import annotations

import os
import threading

from benchmarks.gpu.alone import note, rows


def dies(device: str) -> dict:
    note({"rows": [{"kept": device}]})
    print("illegal memory access", flush=True)
    os._exit(3)


def hangs(device: str) -> dict:
    note({"rows": [{"kept": device}]})
    threading.Event().wait()
    return {}


def raises(device: str) -> dict:
    def measure(batch: int) -> dict:
        if batch == 8:
            raise MemoryError("no room for 8")
        return {"tokens_per_s": 10.0 * batch}

    found = rows([{"batch": batch} for batch in (1, 8, 32)], measure)
    raise RuntimeError(f"after {len(found)} rows")


def answers(device: str) -> dict:
    return {"rows": [], "in_words": f"fine on {device}"}
