"""What a person sees and does on both pages, on a real engine server whose model is a list of words."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.browser.pages import (
    READY,
    accessible,
    ask,
    click,
    count,
    no_traceback,
    number,
    opened,
    picture,
    quiet,
    stop_all,
    toggle,
    until,
    users,
)
from tests.browser.processes import dashboard, free_port, stub_engine


def test_a_prompt_streams_fills_blocks_and_leaves_them_cached(stub, open_page):
    page = open_page(stub)
    quiet(page)
    ask(page, "Where do the keys and values go?")
    pane = page.locator("article[data-request]").first
    expect(pane.locator(".prompt")).to_contain_text("Where do the keys and values go?")
    expect(pane.locator(".answer")).to_contain_text("block")
    expect(pane.locator(".who")).to_have_text("you")
    gantt, strip = picture(page, "Requests over time"), picture(page, "Block pool, small")
    until(lambda: count(gantt, "live") == 1, "a live row in the request chart")
    until(lambda: count(strip, "used") > 0, "used blocks")
    expect(number(page, "rate")).to_contain_text("tok/s")
    until(lambda: count(gantt, "live") == 0, "the request to finish")
    until(lambda: count(strip, "used") == 0 and count(strip, "cached") > 0, "its blocks to stay as cached ones")
    expect(pane.locator(".state")).to_contain_text("256 out")
    expect(number(page, "rate")).to_have_text("No traffic")
    expect(number(page, "ttft")).to_contain_text("ms")
    no_traceback(page)


def test_pictures_move_with_the_steps_and_a_row_is_chosen_by_key_or_click(stub, open_page):
    page = open_page(stub)
    quiet(page)
    users(page, "32")
    for name in ("Requests over time", "Tokens per step", "Block pool, small"):
        canvas = picture(page, name)
        until(lambda canvas=canvas: count(canvas, "step") > 0, f"{name} to be drawn")
        first = count(canvas, "step")
        until(lambda canvas=canvas, first=first: count(canvas, "step") > first + 20, f"{name} to move")
    panes = page.locator(".panes")
    expect(panes).to_have_attribute("data-panes", "4")  # nobody chose: some that run
    gantt = page.locator("canvas.sticky")
    gantt.focus()
    gantt.press("ArrowDown")
    expect(gantt).to_have_attribute("aria-label", re.compile("^Request [A-Z]+:"))
    gantt.press("Enter")
    expect(panes).to_have_attribute("data-panes", "1")
    gantt.press("Escape")
    expect(panes).to_have_attribute("data-panes", "4")
    gantt.click(position={"x": 300, "y": 10})
    expect(panes).to_have_attribute("data-panes", "1")
    quiet(page)


def test_shared_blocks_appear_and_break(stub, open_page):
    page = open_page(f"{stub}/blocks")
    quiet(page)
    users(page, "32")
    pool = picture(page, "Block pool")
    until(lambda: count(pool, "saved") > 40, "shared blocks")
    until(lambda: _share(page) > 0.7, "a high hit rate")
    toggle(page, "Break the prefix")
    until(lambda: count(pool, "saved") == 0, "the shared blocks to go")
    until(lambda: _share(page) < 0.2, "the hit rate to fall")
    toggle(page, "Break the prefix")
    until(lambda: _share(page) > 0.7, "the hit rate to come back")
    quiet(page)
    until(lambda: count(pool, "used") == 0, "an empty pool")


def test_the_prefix_tree_shows_what_is_shared_and_by_whom(stub, open_page):
    page = open_page(f"{stub}/blocks")
    quiet(page)
    users(page, "8")
    tree = picture(page, "Prefix tree")
    tree.scroll_into_view_if_needed()
    until(lambda: "more than one way on" in (tree.get_attribute("aria-label") or ""), "a fork in the tree")
    tree.focus()
    tree.press("Home")
    tip = page.locator(".tip:not([hidden])")
    expect(tip).to_contain_text(re.compile(r"Block \d+: tokens 0 to 15"))
    expect(tip.locator("q")).to_contain_text("assistant")
    tree.press("ArrowRight")
    expect(tip).to_contain_text("tokens 16 to 31")
    until(lambda: "held by" in tip.inner_text() and "nobody" not in tip.inner_text(), "somebody holds it")
    tree.press("Enter")
    expect(page.get_by_role("option", selected=True)).to_have_count(1)
    tree.press("Escape")
    expect(tip).to_have_count(0)
    quiet(page)


def _share(page) -> float:
    text = number(page, "hits").inner_text()
    return float(text.split()[0]) / 100 if text[0].isdigit() else 0.0


def test_switches_wait_for_an_idle_engine_and_a_small_pool_preempts(stub, open_page):
    page = open_page(f"{stub}/blocks")
    quiet(page)
    pool = picture(page, "Block pool")
    users(page, "8")
    until(lambda: count(pool, "used") > 0, "traffic")
    _switch(page, "Pool size (blocks)", "64")
    expect(page.get_by_text("Engine busy")).to_be_visible()
    click(page.get_by_role("button", name="Stop users and apply"))
    until(lambda: count(pool, "blocks") == 64, "a pool of 64 blocks")
    expect(page.get_by_text("Engine busy")).to_have_count(0)
    before = count(pool, "preemptions")
    users(page, "32")
    toggle(page, "Shared system prompt")
    until(lambda: count(pool, "preemptions") > before, "a preemption")
    click(page.get_by_role("link", name="Cockpit"))
    gantt = picture(page, "Requests over time")
    until(lambda: count(gantt, "preempted") > 0, "a preempted row in the request chart")
    click(page.get_by_role("link", name="KV blocks"))
    quiet(page)
    _switch(page, "Pool size (blocks)", "256")
    until(lambda: count(picture(page, "Block pool"), "blocks") == 256, "the pool as it was")
    no_traceback(page)


def _switch(page, label: str, value: str) -> None:
    click(page.get_by_role("button", name="Engine switches"))
    page.get_by_role("spinbutton", name=label).fill(value)
    click(page.get_by_role("button", name="Apply", exact=True))
    page.keyboard.press("Escape")


def test_the_prefix_cache_is_emptied(stub, open_page):
    page = open_page(stub)
    quiet(page)
    ask(page, "Something to remember for a while, so that a block of sixteen tokens becomes full.")
    until(lambda: count(picture(page, "Requests over time"), "live") == 1, "the request")
    stop_all(page)
    click(page.get_by_role("link", name="KV blocks"))
    pool = picture(page, "Block pool")
    until(lambda: count(pool, "cached") > 0 and count(pool, "used") == 0, "cached blocks")
    click(page.get_by_role("button", name="Engine switches"))
    click(page.get_by_role("button", name="Reset prefix cache"))
    until(lambda: count(pool, "cached") == 0, "no cached block")


def test_keyboard_and_pointer_reach_every_block(stub, open_page):
    page = open_page(f"{stub}/blocks")
    quiet(page)
    users(page, "8")
    pool = picture(page, "Block pool")
    until(lambda: count(pool, "saved") > 0, "traffic")
    pool.focus()
    pool.press("Home")
    tip = page.locator(".tip")
    expect(tip).to_contain_text("Block 0:")
    for block in range(1, 256):
        if "shared" in tip.inner_text():
            break
        pool.press("ArrowRight")
        expect(tip).to_contain_text(f"Block {block}:")
    expect(tip).to_contain_text("hash chain")
    expect(tip.locator("q")).to_contain_text("·")
    table = page.get_by_role("region", name="Block table")

    def told() -> bool:
        """Whether the table of one of its holders is there; some end just when they are chosen."""
        rows = table.locator("tbody tr").all_inner_texts()
        if not rows:
            pool.press("Enter")  # the first holder, then the next
        return bool(rows) and "16/16" in rows[0] and "·" in rows[0]

    until(told, "the block table of a holder")
    expect(page.get_by_role("option", selected=True)).to_have_count(1)
    pool.press("Escape")
    expect(page.get_by_role("option", selected=True)).to_have_count(0)
    pool.hover(position={"x": 60, "y": 12})
    expect(tip).to_contain_text("Block 0:")
    quiet(page)


def test_a_request_shows_its_block_table_with_its_words(stub, open_page):
    page = open_page(stub)
    quiet(page)
    ask(page, "Which block of the pool holds this very question and the long answer to it?")
    expect(page.locator("article[data-request]").filter(has_text="this very question")).to_be_visible()
    click(page.get_by_role("link", name="KV blocks"))
    click(page.get_by_role("option").filter(has_text="you").first)
    table = page.get_by_role("region", name="Block table")
    expect(table.locator("tbody tr").nth(1)).to_be_visible()
    expect(table.locator("td.tokens").first).to_contain_text(re.compile("this.?·very.?·question"))
    expect(table.locator("tbody tr").first).to_contain_text("16/16")


def test_the_users_that_run_are_shown_on_every_page(stub, open_page):
    page = open_page(stub)
    quiet(page)
    users(page, "8")
    for name in ("KV blocks", "Phases", "Explorer", "Cockpit"):
        click(page.get_by_role("link", name=name))
        if name != "Explorer":
            chosen = page.get_by_role("radiogroup", name="Users").get_by_role("radio", name="8", exact=True)
            expect(chosen).to_be_checked()
            shared = page.get_by_test_id("stCheckbox").filter(has_text="Shared system prompt").locator("input")
            expect(shared).to_be_checked()
    quiet(page)


def test_two_tabs_watch_one_engine(stub, open_page):
    first, second = open_page(stub), open_page(stub)
    quiet(first)
    users(first, "8")
    gantt = picture(second, "Requests over time")
    until(lambda: count(gantt, "live") > 3, "the other tab's users")
    expect(second.get_by_role("radiogroup", name="Users").get_by_role("radio", name="8", exact=True)).to_be_checked()
    quiet(second)
    until(lambda: count(picture(first, "Requests over time"), "live") == 0, "the end of it in the first tab")


def test_tables_say_what_the_pictures_show(stub, open_page):
    page = open_page(stub)
    quiet(page)
    ask(page, "One request for the table.")
    until(lambda: count(picture(page, "Requests over time"), "rows") > 0, "a request")
    opened(page.locator("details", has_text="Table").first, page.get_by_test_id("stDataFrame"))
    click(page.get_by_role("button", name="Refresh"))
    expect(page.get_by_test_id("stDataFrame")).to_be_visible()
    no_traceback(page)


def test_units_change_everywhere(stub, open_page):
    page = open_page(f"{stub}/blocks")
    formula = page.locator(".formulas").first
    expect(formula).to_contain_text("KiB")
    click(page.get_by_role("radiogroup", name="Units").get_by_role("radio", name="GB", exact=True))
    expect(formula).to_contain_text("kB")
    expect(formula).not_to_contain_text("KiB")
    expect(page).to_have_url(re.compile(r"units=GB"))


def test_a_refused_prompt_is_explained(stub, open_page):
    page = open_page(stub)
    quiet(page)
    ask(page, "word " * 5000)
    alert = page.get_by_role("alert").filter(has_text="does not take this prompt")
    expect(alert).to_contain_text("4096")
    no_traceback(page)


def test_model_text_is_never_markup(stub, open_page):
    page = open_page(stub)
    quiet(page)
    ask(page, '<img src=x onerror="window.hacked=1"> **bold** [a](javascript:1)')
    expect(page.locator("article[data-request] .prompt").first).to_contain_text("<img src=x onerror=")
    assert page.evaluate("window.hacked") is None
    quiet(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/blocks"])
def test_accessibility_rules_hold(stub, open_page, path, theme):
    page = open_page(stub + path, theme=theme)
    users(page, "8")
    until(lambda: count(page.get_by_role("img").filter(has_not_text="x").last, "step") > 0, "a drawn picture")
    accessible(page)
    quiet(page)


def test_nothing_jumps_while_it_is_live(stub, open_page):
    page = open_page(f"{stub}/blocks")
    users(page, "8")
    pool = picture(page, "Block pool")
    until(lambda: count(pool, "step") > 0, "a drawn pool")
    page.evaluate(PLACES)
    first = count(pool, "step")
    until(lambda: count(pool, "step") > first + 100, "a hundred steps")
    places = [place.split(";") for place in page.evaluate("[...window.places]")]
    assert [pair for place in places[1:] for pair in zip(places[0], place, strict=True) if len(set(pair)) > 1] == []
    quiet(page)


# Where every picture, heading and control stands, looked at in each frame; one entry when nothing ever moved.
PLACES = """() => {
  const roots = () => [document, ...[...document.querySelectorAll('*')].map((e) => e.shadowRoot).filter(Boolean)];
  const place = (node) => {
    const box = (node.closest('.scroller') ?? node).getBoundingClientRect(); // what scrolls may grow inside
    return [box.x, box.y, box.width, box.height].map(Math.round).join();
  };
  window.places = new Set();
  const look = () => {
    const nodes = roots().flatMap((root) => [...root.querySelectorAll('canvas, h1, h2, .card, button, input')]);
    window.places.add(nodes.map(place).join(';'));
    requestAnimationFrame(look);
  };
  look();
}"""


def test_an_engine_that_ends_is_said_and_found_again(tmp_path, open_page):
    """Below a base path, as behind a proxy: the WebSocket must be found there too."""
    engine, ui = free_port(), free_port()
    address = f"http://127.0.0.1:{engine}"
    with dashboard(ui, tmp_path / "ui.log", base="lab/kv", KVSCOPE_ENGINE_URL=address):
        with stub_engine(engine, tmp_path / "one.log"):
            page = open_page(f"http://127.0.0.1:{ui}/lab/kv/blocks")
            expect(page.get_by_text(READY)).to_be_visible()
            click(page.get_by_role("link", name="Cockpit"))
            ask(page, "Hello")
            until(lambda: count(picture(page, "Requests over time"), "rows") == 1, "a request")
            expect(page.locator(".kv[data-live='live']").first).to_be_attached()
        expect(page.get_by_text("The engine is not running")).to_be_visible()
        expect(page.get_by_text("start it there")).to_be_visible()
        no_traceback(page)
        with stub_engine(engine, tmp_path / "two.log"):
            expect(page.get_by_text(READY)).to_be_visible(timeout=90_000)
            until(lambda: count(picture(page, "Requests over time"), "rows") == 0, "the new engine's empty chart")
            ask(page, "Hello again")
            until(lambda: count(picture(page, "Requests over time"), "rows") == 1, "a request of the new engine")
        open_page.close()


def test_without_routes_reruns_feed_the_same_pictures(engine, tmp_path, open_page):
    """`streamlit run pages/shell.py`: as where a host does not run app.py."""
    ui = free_port()
    with dashboard(ui, tmp_path / "ui.log", script="pages/shell.py", KVSCOPE_ENGINE_URL=engine):
        page = open_page(f"http://127.0.0.1:{ui}")
        ask(page, "Can you hear me without a socket?")
        pane = page.locator("article[data-request]").first
        expect(pane.locator(".prompt")).to_contain_text("without a socket")
        expect(pane.locator(".answer")).to_contain_text("block")
        gantt = picture(page, "Requests over time")
        first = count(gantt, "step")
        until(lambda: count(gantt, "step") > first + 20, "steps by rerun")
        no_traceback(page)
        open_page.close()


def test_the_socket_wants_the_token(stub):
    for query in ("", "?token=wrong"):
        with pytest.raises(InvalidStatus, match="403"):
            connect(f"{stub.replace('http', 'ws', 1)}/api/live{query}", origin=stub)
