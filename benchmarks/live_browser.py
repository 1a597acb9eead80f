"""What the live picture shows and costs: distinct steps painted, blank frames, age of a frame, CPU of the server.

    python -m benchmarks.live_browser [--seconds 30] [--blocks 4096 32768] [--json]

Scripted events come at 50 steps a second with 64 running requests; a headless Chromium paints in software, its worst
case. Targets on a quiet machine: at least 45 distinct steps a second, no blank frame, less than 6 % of a core in the
page's server, frames at most 10 ms old at the median and 20 ms at p95. The load average is printed, because a busy
machine tells something else.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import FLAGS, NAMES
from tests.browser.pages import count, picture, until
from tests.browser.processes import dashboard, free_port, process

STEPS_PER_S = 50
RUNNING = 64
BLANK = 0.3  # of the median share of pixels that are not background

# Counts each change of the canvas's step, and how old its newest event is then.
PROBE = """(name) => {
  const named = (canvas) => canvas.getAttribute('aria-label')?.startsWith(name);
  const find = (root) => [...root.querySelectorAll('canvas')].find(named);
  const roots = [...document.querySelectorAll('*')].map((e) => e.shadowRoot).filter(Boolean);
  const canvas = roots.map(find).find(Boolean);
  const live = [...globalThis.__kvscope_live_1.values()][0];
  const probe = (window.probe = { steps: new Set(), ages: [] });
  new MutationObserver(() => {
    if (probe.steps.has(canvas.dataset.step)) return;
    probe.steps.add(canvas.dataset.step);
    probe.ages.push(Date.now() - (live.state.wall_time + live.state.t) * 1000);
  }).observe(canvas, { attributes: true, attributeFilter: ['data-step'] });
}"""
READ = "() => [window.probe.steps.size, window.probe.ages]"
RESET = "() => { window.probe.steps.clear(); window.probe.ages.length = 0; }"


def measure(page: Page, ui: psutil.Process, seconds: float) -> dict[str, float]:
    """Two runs: one for steps and costs, one that films the pool and looks for frames that went blank."""
    pool = picture(page, "Block pool")
    until(lambda: count(pool, "used") > 0, "the pool to be drawn")
    page.evaluate(PROBE, "Block pool")
    page.wait_for_timeout(3000)  # the start is not what is measured
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    page.evaluate(RESET)
    busy, tasks, start = _cpu(ui), _tasks(devtools), time.monotonic()
    page.wait_for_timeout(seconds * 1000)
    steps, ages = page.evaluate(READ)
    wall = time.monotonic() - start
    cpu, main = _cpu(ui) - busy, _tasks(devtools) - tasks
    frames = film(page, devtools, pool, seconds)
    median = statistics.median(frames) if frames else 0.0
    ages.sort()
    return {
        "distinct_steps_per_s": steps / wall,
        "ui_process_share_of_a_core": cpu / wall,
        "browser_main_thread_share": main / wall,
        "age_ms_median": statistics.median(ages),
        "age_ms_p95": ages[max(0, -(-95 * len(ages) // 100) - 1)],
        "filmed_frames": len(frames),
        "blank_frames": sum(1 for share in frames if share < BLANK * median),
    }


def film(page: Page, devtools, pool, seconds: float) -> list[float]:
    """Share of pixels in the pool's place that are not background, frame by frame."""
    box = pool.bounding_box()
    shots: list[str] = []

    filming = True

    def frame(event: dict) -> None:
        shots.append(event["data"])
        if filming:
            devtools.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})

    devtools.on("Page.screencastFrame", frame)
    devtools.send("Page.startScreencast", {"format": "jpeg", "quality": 60, "everyNthFrame": 1})
    page.wait_for_timeout(seconds * 1000)
    filming = False
    devtools.send("Page.stopScreencast")
    return [_ink(shot, box) for shot in shots]


def _ink(shot: str, box: dict[str, float]) -> float:
    image = Image.open(io.BytesIO(base64.b64decode(shot))).convert("L")
    place = image.crop((int(box["x"]) + 48, int(box["y"]), int(box["x"] + box["width"]), int(box["y"] + box["height"])))
    histogram = place.histogram()
    background = max(range(256), key=histogram.__getitem__)
    near = sum(histogram[max(0, background - 6) : background + 7])
    return 1 - near / max(1, sum(histogram))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _tasks(devtools) -> float:
    metrics = {entry["name"]: entry["value"] for entry in devtools.send("Performance.getMetrics")["metrics"]}
    return metrics["TaskDuration"]


def run(blocks: int, seconds: float) -> dict[str, float]:
    engine, port = free_port(), free_port()
    command = [sys.executable, "-m", "benchmarks.scripted_server", "--port", str(engine), "--blocks", str(blocks)]
    command += ["--running", str(RUNNING), "--steps-per-s", str(STEPS_PER_S)]
    with tempfile.TemporaryDirectory() as logs, sync_playwright() as playwright:
        folder = Path(logs)
        with (
            process(command, f"http://127.0.0.1:{engine}/health", folder / "engine.log"),
            dashboard(port, folder / "ui.log", KVSCOPE_ENGINE_URL=f"http://127.0.0.1:{engine}") as ui,
        ):
            path = next(filter(None, map(shutil.which, NAMES)), None)
            browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(f"http://127.0.0.1:{port}/blocks")
            result = measure(page, psutil.Process(ui.pid), seconds)
            browser.close()
    return {"blocks": blocks, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="of each of the two runs")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = [run(blocks, arguments.seconds) for blocks in arguments.blocks]
    load = os.getloadavg()[0]
    if arguments.json:
        print(json.dumps({"load_average": load, "results": results}, indent=2))
        return
    print(f"{STEPS_PER_S} steps/s, {RUNNING} running requests, load average {load:.1f} on {os.cpu_count()} cores")
    print("blocks | distinct steps/s | UI process, share of a core | main thread | age median, p95 | blank frames")
    for r in results:
        print(
            f"{r['blocks']:6d} | {r['distinct_steps_per_s']:16.1f} | {100 * r['ui_process_share_of_a_core']:25.1f} % | "
            f"{100 * r['browser_main_thread_share']:9.0f} % | {r['age_ms_median']:5.1f}, {r['age_ms_p95']:5.1f} ms | "
            f"{r['blank_frames']} of {r['filmed_frames']}"
        )


if __name__ == "__main__":
    main()
