"""A folder of the cache is whole or absent, and made once."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from backend.models import cache
from backend.models.errors import ModelError


def test_it_lies_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "kvscope"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/void")
    assert cache.root() == Path.home() / ".cache" / "kvscope"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.root() == Path.home() / ".cache" / "kvscope"


def test_it_is_built_once(own_cache):
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "x").write_text("whole")

    first, second = cache.build_once("m", build), cache.build_once("m", build)
    assert first == second == own_cache / "m"
    assert len(calls) == 1
    assert (first / "x").read_text() == "whole"


def test_a_build_that_fails_leaves_nothing(own_cache):
    def build(folder: Path) -> None:
        (folder / "half").write_text("…")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        cache.build_once("m", build)
    assert [p.name for p in own_cache.iterdir() if p.is_dir()] == []


def _build_and_hang(ready) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("…")
        ready.set()
        time.sleep(600)

    cache.build_once("m", build)


def test_a_build_that_is_killed_is_swept_up_by_the_next(own_cache):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_build_and_hang, args=(ready,))
    process.start()
    assert ready.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    assert not (own_cache / "m").exists()
    made = cache.build_once("m", lambda folder: (folder / "x").write_text("whole") and None)
    assert [p.name for p in made.iterdir()] == ["x"]
    assert [p.name for p in own_cache.iterdir() if p.is_dir()] == ["m"]


def _build_slowly(started, count) -> None:
    def build(folder: Path) -> None:
        with count.get_lock():
            count.value += 1
        (folder / "x").write_text("whole")

    started.wait(60)
    cache.build_once("m", build)


def test_processes_that_start_together_build_it_once(own_cache):
    context = multiprocessing.get_context("spawn")
    started, count = context.Barrier(3), context.Value("i", 0)
    processes = [context.Process(target=_build_slowly, args=(started, count)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert count.value == 1


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write the model cache .*file/kvscope.*XDG_CACHE_HOME"):
        cache.build_once("m", lambda folder: None)
