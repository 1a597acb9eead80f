"""The panel that starts vLLM, without a browser and with a program that behaves like it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import psutil
import pytest
from streamlit.testing.v1 import AppTest

from backend.sources.launch import VllmLaunch
from pages.widgets import launch, service
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


def script() -> None:
    from pages.widgets import launch

    launch.panel()


@pytest.fixture
def page(monkeypatch, tmp_path):
    service.close()
    monkeypatch.setenv("KVSCOPE_ENGINE_URL", "http://127.0.0.1:9")  # nobody listens on the discard port
    monkeypatch.delenv("KVSCOPE_VLLM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    attached = []
    monkeypatch.setattr(service.Service, "attach", lambda self, config, **_: attached.append(config.url))
    monkeypatch.setattr(launch, "_launch", VllmLaunch(changed=launch._changed, patience_s=0.3))
    page = AppTest.from_function(script, default_timeout=30).run()
    page.attached = attached
    yield page
    launch.launch().stop()
    service.close()


def shown(page: AppTest) -> list[str]:
    return shlex.split(page.code[0].value.replace("\\\n", " "), comments=True)


def test_without_vllm_the_commands_can_still_be_copied(page):
    assert not page.exception
    assert "not installed here" in page.info[0].value and "launch_start" not in [b.key for b in page.button]
    page.text_input(key="launch_model").set_value("Qwen/Qwen3-0.6B").run()
    command = shown(page)
    assert command[command.index("serve") + 1] == "Qwen/Qwen3-0.6B" and "--enable-mfu-metrics" in command
    page.toggle(key="launch_mfu").set_value(False).run()
    page.number_input(key="launch_tp").set_value(2).run()
    command = shown(page)
    assert "--enable-mfu-metrics" not in command and command[command.index("--tensor-parallel-size") + 1] == "2"
    page.segmented_control(key="launch_place").set_value("Docker").run()
    assert shown(page)[:2] == ["docker", "run"]
    page.text_input(key="launch_extra").set_value("--port 1").run()
    assert "--port is set here already" in page.error[0].value.replace("\\", "") and not page.exception


def test_it_starts_turns_to_it_and_stops_it(page, monkeypatch, tmp_path):
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests/sources/fake_vllm.py"}" "$@"\n')
    program.chmod(0o755)
    page.text_input(key="launch_model").set_value("some/good").run()
    page.button(key="launch_start").click().run()
    assert not page.exception and not page.error
    url = eventually(lambda: launch.launch().url, "ready")
    eventually(lambda: page.attached == [url], "all pages turn to it")
    page.run()
    assert "all pages show it" in page.success[0].value
    leash = launch.launch()._run._process.pid
    started = [process.pid for process in psutil.Process(leash).children(recursive=True)]
    page.button(key="launch_stop").click().run()
    assert not page.exception and started
    assert not any(psutil.pid_exists(pid) for pid in started)
    assert "launch_start" in [button.key for button in page.button]


def test_why_it_failed_is_said(page, tmp_path):
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests/sources/fake_vllm.py"}" "$@"\n')
    program.chmod(0o755)
    page.text_input(key="launch_model").set_value("some/crash").run()
    page.button(key="launch_start").click().run()
    eventually(lambda: not launch.launch().running)
    page.run()
    assert "no memory for 8 GiB" in page.error[0].value.replace("\\", "")
    assert not page.exception
