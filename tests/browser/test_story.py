"""The whole way, from a keystroke to a pixel, on the bundled model: what the first page of the README promises."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest
from playwright.sync_api import expect

from tests.browser.pages import (
    READY,
    ask,
    click,
    count,
    no_traceback,
    number,
    picture,
    quiet,
    stop_all,
    toggle,
    until,
    users,
)

LOADING_S = 120  # on a busy machine
ANSWER_S = 90

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_story(real, open_page):
    page = open_page(real.url)
    expect(page.get_by_text(re.compile(r"\b(ready|busy)$"))).to_be_visible(timeout=LOADING_S * 1000)
    quiet(page)  # a try before this one may have left users behind
    expect(page.get_by_text(READY)).to_be_visible(timeout=LOADING_S * 1000)

    # A prompt: its text streams, its blocks appear, and stay as cached ones when it has finished.
    click(page.get_by_role("button", name="Sampling"))
    page.get_by_role("spinbutton", name="Max tokens").fill("24")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    ask(page, "Name three colours of the rainbow, please.")
    pane = page.locator("article[data-request]").first
    gantt, strip = picture(page, "Requests over time"), picture(page, "Block pool, small")
    until(lambda: count(strip, "used") > 0, "its blocks", ANSWER_S)
    until(lambda: len(pane.locator(".answer").inner_text()) > 10, "its text", ANSWER_S)
    expect(pane.locator(".prompt")).to_contain_text("Name three colours of the rainbow, please.")
    until(lambda: count(gantt, "live") == 0, "its end", ANSWER_S)
    until(lambda: count(strip, "used") == 0, "its blocks to be given back", ANSWER_S)
    expect(number(page, "ttft")).to_contain_text(re.compile("ms|s"))

    # 32 users with a shared prompt: blocks with many holders.
    click(page.get_by_role("link", name="KV blocks"))
    pool = picture(page, "Block pool")
    until(lambda: count(pool, "cached") > 0, "cached blocks of the finished request")
    users(page, "32")
    until(lambda: count(pool, "saved") > 60, "blocks with several holders", ANSWER_S)
    stop_all(page)
    until(lambda: count(pool, "used") == 0, "all to stop", ANSWER_S)

    # The prefix broken: nobody shares any more.
    toggle(page, "Break the prefix")
    users(page, "8")
    until(lambda: count(pool, "used") > 60, "users with a line of their own on top", ANSWER_S)
    assert count(pool, "saved") == 0

    # A small pool: somebody is preempted.
    click(page.get_by_role("button", name="Engine switches"))
    page.get_by_role("spinbutton", name="Pool size (blocks)").fill("64")
    click(page.get_by_role("button", name="Apply", exact=True))
    page.keyboard.press("Escape")
    click(page.get_by_role("button", name="Stop users and apply"))
    until(lambda: count(pool, "blocks") == 64, "the small pool", ANSWER_S)
    users(page, "8")
    until(lambda: count(pool, "preemptions") > 0, "a preemption", 3 * ANSWER_S)
    no_traceback(page)


def test_a_killed_engine_is_said_and_restarts(real, open_page):
    page = open_page(real.url)
    expect(page.get_by_text(re.compile(r"\b(ready|busy)$"))).to_be_visible(timeout=LOADING_S * 1000)
    (engine,) = [child for child in psutil.Process(real.pid).children() if "serve" in child.cmdline()]
    os.kill(engine.pid, signal.SIGKILL)
    alert = page.get_by_role("alert").filter(has_text="The engine is not running")
    expect(alert).to_be_visible(timeout=90_000)
    expect(alert).to_contain_text("signal 9")
    no_traceback(page)
    click(page.get_by_role("button", name="Restart the engine"))
    expect(page.get_by_text(re.compile(r"\b(ready|busy)$"))).to_be_visible(timeout=LOADING_S * 1000)
    expect(alert).to_have_count(0)
    users(page, "0")
    ask(page, "Are you there again?")
    pane = page.locator("article[data-request]").filter(has_text="Are you there again?")
    until(lambda: len(pane.locator(".answer").inner_text()) > 0, "an answer of the new engine", ANSWER_S)
    no_traceback(page)
