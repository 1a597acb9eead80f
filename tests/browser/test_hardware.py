"""What a person sees and does on the phases page and the hardware page: on a CPU, and with two fake GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.pages import accessible, click, no_traceback, number, picture, quiet, until, users
from tests.browser.processes import dashboard, free_port, stub_engine
from tests.nvml import library

WIDTHS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class Gpus:
    url: str
    script: library.Script  # of what the fake library says


@pytest.fixture(scope="module")
def gpus(tmp_path_factory) -> Iterator[Gpus]:
    """A dashboard whose engine says that it computes on an H100; a T4 is in the machine too. Neither exists."""
    if library.COMPILER is None:
        pytest.skip(library.NO_COMPILER)
    folder = tmp_path_factory.mktemp("gpus")
    variables = library.variables("h100", folder)
    script = library.Script(folder / "h100.txt")
    second = library.Script(library.MACHINES / "t4.txt").lines
    script.update({"count": 2} | {key.replace("gpu.0.", "gpu.1."): v for key, v in second.items() if key[:4] == "gpu."})
    engine, ui = free_port(), free_port()
    own = script.lines["gpu.0.uuid"]
    with (
        stub_engine(engine, folder / "engine.log", step_ms=20, computes_on=own, **variables),
        dashboard(ui, folder / "ui.log", KVSCOPE_ENGINE_URL=f"http://127.0.0.1:{engine}"),
    ):
        yield Gpus(f"http://127.0.0.1:{ui}", script)


def place(canvas: Locator, name: str) -> tuple[float, float]:
    """(FLOP/byte, FLOP/s) of a point of the roofline; zeros while it is not there."""
    text = canvas.get_attribute(f"data-{name}") or "0 0"
    x, y = text.split()
    return float(x), float(y)


def strip(page: Page, name: str, nth: int = 0) -> Locator:
    return page.locator(f"[data-sensor='{name}']").nth(nth)


# ---- phases ----------------------------------------------------------------------------------------------------------


def test_a_shape_is_modelled_and_the_run_of_it_measured_at_the_same_intensity(stub, open_page):
    page = open_page(f"{stub}/phases")
    quiet(page)
    roofline = picture(page, "Roofline")
    until(lambda: roofline.get_attribute("data-roof") == "measured", "the roofs")
    before = place(roofline, "model")
    batch = page.get_by_role("slider", name="Batch")
    batch.press("ArrowRight")  # 8 -> 16
    until(lambda: place(roofline, "model")[0] > 1.2 * before[0], "the modelled point to move right")
    context = page.get_by_role("slider", name="Context")
    context.press("ArrowRight")  # 512 -> 1,024 : 16 x 1,024 tokens do not fit into 256 blocks of 16
    expect(page.get_by_text("the pool has 256")).to_be_visible()
    expect(page.get_by_role("button", name="Run it")).to_be_disabled()
    for _ in range(3):
        context.press("ArrowLeft")
    expect(page.get_by_text("the pool has 256")).to_have_count(0)
    click(page.get_by_role("button", name="Run it"))

    def together() -> bool:
        (x, y), (wanted, _) = place(roofline, "decode"), place(roofline, "model")
        return bool(x) and abs(x / wanted - 1) < 0.35 and y > 0

    # Steps of others from the last seconds are in the mean; the shape before would be at half.
    until(together, "the measured point at the modelled intensity", 60)
    assert place(roofline, "prefill")[0] > place(roofline, "decode")[0]
    parts = page.get_by_role("img", name=re.compile("^Where the step went:"))
    expect(parts).to_have_attribute("data-decode", re.compile("memory|overhead"))
    expect(page.get_by_role("img", name=re.compile("^Shapes of the scores:"))).to_have_attribute(
        "data-decode", re.compile(r"^1x\d+$")
    )
    expect(number(page, "mbu")).to_contain_text("%")
    expect(number(page, "ratio")).to_contain_text("×")
    roofline.focus()
    roofline.press("ArrowRight")
    expect(page.locator(".tip").first).to_contain_text("FLOP/byte")
    no_traceback(page)


def test_another_accelerator_is_laid_over(stub, open_page):
    page = open_page(f"{stub}/phases")
    roofline = picture(page, "Roofline")
    until(lambda: place(roofline, "model")[0] > 0, "the modelled point")
    click(page.get_by_role("combobox", name="Overlay the roof of"))
    page.keyboard.type("H100")
    click(page.get_by_role("option", name=re.compile("H100")).first)
    expect(page.get_by_text("dense, data sheet")).to_be_visible()
    expect(roofline).to_have_attribute("aria-label", re.compile("modelled, on .*H100"), timeout=10_000)
    assert page.evaluate(WIDTHS) <= 0
    no_traceback(page)


def test_roofs_are_measured_when_the_engine_is_idle_and_not_before(stub, open_page):
    page = open_page(f"{stub}/phases")
    quiet(page)
    users(page, "8")
    expect(page.get_by_text(re.compile(r"\bbusy$"))).to_be_visible(timeout=60_000)
    click(page.get_by_role("button", name="Measure the roofs"))
    expect(page.get_by_role("alert").filter(has_text="Not now")).to_contain_text("requests run")
    quiet(page)
    expect(page.get_by_text(re.compile(r"\bready$"))).to_be_visible(timeout=60_000)
    expect(page.get_by_role("alert").filter(has_text="Not now")).to_have_count(0)
    click(page.get_by_role("button", name="Measure the roofs"))
    expect(number(page, "ridge")).to_contain_text(
        "16.0 FLOP/byte", timeout=60_000
    )  # 400 GFLOP/s ÷ 25 GB/s, as it was scripted
    no_traceback(page)


# ---- hardware --------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_says_what_it_hides_and_shows_what_it_has(stub, open_page):
    page = open_page(f"{stub}/hardware")
    users(page, "8")
    expect(page.get_by_text("No NVIDIA GPU can be read here")).to_be_visible()
    expect(strip(page, "memory_used").locator(".now")).to_contain_text("iB")
    expect(strip(page, "dram_bandwidth")).to_contain_text("not available:")
    expect(strip(page, "dram_bandwidth").locator(".now")).to_have_text("–")
    bandwidth = picture(page, "Memory bandwidth")
    until(lambda: int(bandwidth.get_attribute("data-computed") or 0) > 2, "computed bandwidth")
    assert bandwidth.get_attribute("data-measured") == "0" and bandwidth.get_attribute("data-reason")
    expect(page.locator(".windows tbody tr").first).to_contain_text("not available:")
    expect(number(page, "energy")).to_have_text("Not available")
    expect(page.locator(".banner")).to_be_hidden()
    quiet(page)
    no_traceback(page)


def test_fake_gpus_are_called_fake_and_read_like_real_ones(gpus, open_page):
    page = open_page(f"{gpus.url}/hardware")
    users(page, "8")
    expect(page.locator(".banner")).to_contain_text("Fake device")
    expect(strip(page, "dram_bandwidth").locator(".now")).to_have_text("71.5 %")
    expect(strip(page, "dram_bandwidth").locator(".from")).to_contain_text("measured: NVML GPM, average over the last")
    expect(strip(page, "memory_busy").locator(".from")).to_contain_text("share of time")
    expect(strip(page, "clock_reasons")).to_contain_text("power cap: 100 % of the readings")
    bandwidth = picture(page, "Memory bandwidth")
    until(lambda: int(bandwidth.get_attribute("data-measured") or 0) > 2, "measured bandwidth")
    decode = page.locator(".windows tbody tr").filter(has_text="decode")
    expect(decode).to_contain_text("2.40 TB/s")
    expect(decode).to_contain_text("J/token", timeout=60_000)
    expect(number(page, "energy")).to_contain_text("J/token")
    expect(page.get_by_role("row", name=re.compile("4711"))).to_contain_text("28.0 GiB")
    expect(page.get_by_role("row", name=re.compile("4712"))).to_contain_text("not told by the driver")

    click(page.get_by_role("button", name=re.compile("Tesla T4")))  # the other card, which knows less
    expect(strip(page, "dram_bandwidth")).to_contain_text("needs Hopper or newer")
    expect(strip(page, "dram_bandwidth").locator("canvas")).to_have_count(0)
    click(strip(page, "pcie_tx").get_by_role("button", name="Read it"))
    expect(strip(page, "pcie_tx").locator(".now")).to_contain_text("MB/s", timeout=15_000)

    lost = "GPU_IS_LOST"
    gpus.script.update({"error.gpu.1.nvmlDeviceGetUtilizationRates": lost})
    expect(page.locator("[data-state='lost']")).to_contain_text("Tesla T4", timeout=15_000)
    click(page.get_by_role("button", name=re.compile("H100")))
    expect(strip(page, "power").locator(".now")).to_have_text("405 W")  # the other card and the engine go on
    gpus.script.update({"error.gpu.1.nvmlDeviceGetUtilizationRates": None})
    quiet(page)
    no_traceback(page)


@pytest.mark.parametrize(("path", "theme"), [("/phases", "dark"), ("/hardware", "light")])
def test_accessibility_rules_hold(gpus, open_page, path, theme):
    page = open_page(gpus.url + path, theme=theme)
    users(page, "8")
    until(lambda: bool(page.locator("canvas[data-step]").first.get_attribute("data-step")), "a drawn picture")
    if path == "/phases":
        until(lambda: place(picture(page, "Roofline"), "decode")[0] > 0, "a decode point")
    else:
        expect(strip(page, "power").locator(".now")).to_contain_text("W")
    page.locator("[data-testid='stApp'][data-test-script-state='notRunning']").wait_for(state="attached")
    accessible(page)
    assert page.evaluate(WIDTHS) <= 0
    quiet(page)
