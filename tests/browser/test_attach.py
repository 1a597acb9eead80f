"""Attaching to a server that is not ours: the dialog, what pages show of it, the way back, and a fleet of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.pages import accessible, click, count, no_traceback, number, picture, until, users
from tests.browser.vllm_server import VllmServer
from tests.sources.attach.replicas import Replicas
from tests.sources.attach.wire import Publisher, payload, stored
from tests.sources.fake_engine import Serving

SECRET = "a-key-that-nobody-may-see"
ATTACHED = re.compile(r"ATTACHED: vLLM 0\.32\.0 at 127\.0\.0\.1")


@pytest.fixture(scope="module")
def serving() -> Iterator[tuple[VllmServer, str]]:
    server = VllmServer()
    with Serving(server) as url:
        yield server, url


@pytest.fixture
def vllm(serving) -> tuple[VllmServer, str]:
    serving[0].how_metrics, serving[0].key = "well", ""
    return serving


@pytest.fixture
def kv_events(vllm) -> Iterator[None]:
    """The server publishes two blocks of a prompt, and tells the prompt's tokens with each answer."""
    server, ids = vllm[0], list(range(300))
    server.kv, server.prompt_ids = Publisher(), ids
    server.kv.send(payload(stored(1, 2, tokens=ids[:256], size=128)))
    yield
    publisher, server.kv, server.prompt_ids = server.kv, None, []
    publisher.close()


@pytest.fixture
def page(stub, open_page) -> Iterator[Page]:
    """A page on our own engine, which all tabs show again afterwards: they share one source."""
    page = open_page(stub)
    yield page
    page.goto(stub)
    back = page.get_by_role("button", name="Back to the own engine")
    expect(page.get_by_role("button", name="Connect…")).to_be_visible()
    if back.is_visible():
        users(page, "0")
        click(back)
        expect(page.get_by_text(ATTACHED)).to_have_count(0)
    no_traceback(page)


def dialog(page: Page, url: str) -> None:
    if not page.get_by_role("dialog").is_visible():
        click(page.get_by_role("button", name="Connect…"))
    page.get_by_role("textbox", name="Address", exact=True).fill(url)


def connect(page: Page, url: str) -> None:
    dialog(page, url)
    click(page.get_by_role("dialog").get_by_role("button", name="Connect", exact=True))
    expect(page.get_by_text(ATTACHED).first).to_be_visible()


def test_a_connection_is_tried_and_what_is_wrong_is_said(page, vllm):
    server, url = vllm
    for address, words in (
        ("http://127.0.0.1:9", "127.0.0.1:9"),
        ("nonsense", "nonsense"),
    ):
        dialog(page, address)
        click(page.get_by_role("button", name="Test connection"))
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text(words)

    server.how_metrics, server.key = "key", SECRET
    dialog(page, url)
    click(page.get_by_role("button", name="Test connection"))
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("401")

    click(page.get_by_text("Key, certificates, paths"))
    page.get_by_role("textbox", name="API key").fill(SECRET)
    click(page.get_by_role("button", name="Test connection"))
    found = page.get_by_role("dialog")
    expect(found.get_by_text(re.compile(r"vLLM 0\.32\.0$"))).to_be_visible()
    expect(found.get_by_role("table")).to_contain_text("--kv-events-config")  # what is missing, and what would give it
    assert server.headers[-1] == f"Bearer {SECRET}"
    assert SECRET not in page.url and SECRET not in page.get_by_role("dialog").inner_text()
    accessible(page)

    server.how_metrics, server.key = "html", ""
    click(page.get_by_role("button", name="Test connection"))
    expect(found.get_by_role("alert").first).to_contain_text(re.compile("web page|HTML", re.IGNORECASE))
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    no_traceback(page)


def test_all_tabs_follow_and_show_what_the_server_tells(page, vllm, kv_events, stub, open_page):
    _, url = vllm
    other = open_page(f"{stub}/blocks")
    connect(page, url)
    expect(other.get_by_text(ATTACHED).first).to_be_visible()

    expect(number(page, "blocks")).to_have_text("6.9 %")  # the recorded gauge
    expect(number(page, "flight")).to_have_text("12")
    expect(number(page, "rate")).to_contain_text("tok/s")
    expect(number(other, "saved")).to_have_text("Not available")
    expect(number(other, "filled")).to_have_text("256 tokens")  # cached, by medium
    pool = picture(other, "Block pool")
    until(lambda: count(pool, "used") == 25 and count(pool, "blocks") == 363, "the gauge in blocks")

    # Requests of our own have bars; those of others, whom the gauge counts too, are a number.
    expect(page.get_by_text("Users and prompts send real load to 127.0.0.1")).to_be_visible()
    users(page, "1")
    gantt = picture(page, "Requests over time")
    until(lambda: count(gantt, "rows") > 0 and gantt.get_attribute("data-others") == "11", "our own request")
    expect(page.locator("article[data-request] .answer").first).to_contain_text("w1 w2")
    users(page, "0")
    accessible(page)

    # Which blocks it holds is told by nobody: concluded from its tokens, and said to be.
    click(other.get_by_role("option").first)
    expect(other.get_by_text("Inferred from its tokens, not told: 2 full cells")).to_be_visible()
    expect(other.get_by_role("region", name="Block table").locator("tbody tr")).to_have_count(2)
    until(lambda: count(pool, "inferred") == 2, "its cells on the map")
    accessible(other)

    click(page.get_by_role("link", name="Phases"))
    expect(number(page, "ridge")).to_contain_text("FLOP/byte")
    roofline = picture(page, "Roofline")
    until(lambda: roofline.get_attribute("data-estimated") is not None, "the point that the server estimates")
    expect(page.get_by_role("button", name="Measure the roofs")).to_be_disabled()
    click(page.get_by_role("link", name="Batching"))
    expect(page.get_by_text("they compare switches of an engine")).to_be_visible()
    click(page.get_by_role("link", name="Load"))
    expect(page.get_by_text("Real load for a server that is not ours")).to_be_visible()
    expect(page.get_by_text("Side by side")).to_be_visible()
    click(page.get_by_role("link", name="Hardware"))
    expect(page.get_by_text("Hardware: not available from this source")).to_be_visible()
    click(page.get_by_role("button", name="What it tells"))
    expect(page.get_by_role("table")).to_contain_text("tokens a step")
    page.keyboard.press("Escape")

    click(page.get_by_role("button", name="Back to the own engine"))
    for tab in (page, other):
        expect(tab.get_by_text(ATTACHED)).to_have_count(0)
        no_traceback(tab)
    until(lambda: count(pool, "blocks") == 256, "the pool of our own engine")


def test_a_fleet_with_a_dead_replica_stands_side_by_side(page, vllm):
    _, url = vllm
    replicas = Replicas(2)
    try:
        click(page.get_by_role("link", name="Fleet"))
        lines = page.get_by_role("textbox", name="Servers, one a line")
        lines.fill("http://127.0.0.1:8000 color=blue")
        click(page.get_by_role("button", name="Watch", exact=True))
        expect(page.get_by_role("alert")).to_contain_text("line 1")
        names = ("left", "right", "big", "gone")
        addresses = [*replicas.urls, url, "http://127.0.0.1:9"]
        lines.fill("\n".join(f"{u} name={n}" for u, n in zip(addresses, names, strict=True)))
        click(page.get_by_role("button", name="Watch", exact=True))

        def value(name: str):
            return page.locator(f"[data-fleet='{name}'] .value")

        expect(value("Replicas live")).to_have_text("3 of 4")
        expect(value("Requests")).to_have_text("15 running")  # 1 + 2 + 12: sums
        usage = (0 * 101 + 100 / 8 * 101 + 100 * 0.06887 * 364) / (101 + 101 + 364)  # of shares, the weighted mean
        until(lambda: abs(float(value("KV usage").inner_text().rstrip(" %")) - usage) < 1, "the mean of the shares")
        gone = page.get_by_role("button", name=re.compile("^gone: "))
        expect(gone).to_contain_text("does not answer")
        expect(gone).not_to_contain_text("0 %")
        accessible(page)

        click(page.get_by_role("button", name=re.compile("^big: ")))
        expect(page.get_by_role("region", name="Values of big")).to_contain_text("vllm:kv_cache_usage_perc")
        click(page.get_by_role("button", name="Attach to big"))
        expect(page.get_by_text(ATTACHED).first).to_be_visible()
        click(page.get_by_text("Servers", exact=True))
        click(page.get_by_role("button", name="Stop watching"))
        expect(page.get_by_text("No fleet is watched")).to_be_visible()
    finally:
        replicas.close()
