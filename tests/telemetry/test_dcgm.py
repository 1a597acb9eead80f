"""DRAM activity from a DCGM exporter: what counts as a value, and what is said when there is none."""

from __future__ import annotations

import http.server
import threading

import pytest

from backend.telemetry.dcgm import Exporter, parse
from backend.telemetry.readings import ReadError
from tests.telemetry import golden

T4 = "GPU-74000000-0000-0000-0000-000000000000"
PAGE = f"""\
# HELP DCGM_FI_PROF_DRAM_ACTIVE Ratio of cycles the device memory interface is active.
# TYPE DCGM_FI_PROF_DRAM_ACTIVE gauge
DCGM_FI_PROF_DRAM_ACTIVE{{gpu="0",UUID="{T4}",device="nvidia0",modelName="Tesla T4"}} 0.8125
DCGM_FI_PROF_DRAM_ACTIVE{{gpu="1",UUID="GPU-blank"}} 140737488355328
DCGM_FI_PROF_DRAM_ACTIVE{{gpu="2",UUID="GPU-sliced",GPU_I_ID="3"}} 0.5
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{{gpu="0",UUID="{T4}"}} 69.5
"""


@pytest.fixture
def exporter():
    """(url, list of requests, a dictionary whose "page" is what it answers)."""
    asked, answer = [], {"page": PAGE}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer["page"].encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/metrics", asked, answer
    server.shutdown()
    server.server_close()


def test_blank_values_and_slices_are_no_values():
    assert parse(PAGE) == {T4: 0.8125}


def test_it_is_asked_once_a_second_for_all_gpus(exporter):
    url, asked, answer = exporter
    now = [10.0]
    found = Exporter(url, lambda: now[0])
    assert [found.dram_active_percent(T4) for _ in range(3)] == [81.25] * 3
    with pytest.raises(ReadError, match="dcp-metrics-included"):
        found.dram_active_percent("GPU-blank")
    assert asked == ["/metrics"]
    answer["page"] = PAGE.replace("0.8125", "0.25")
    now[0] += 1.01
    assert found.dram_active_percent(T4) == 25.0


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/metrics", "file:///etc/passwd", "nonsense"])
def test_an_exporter_that_cannot_be_asked_is_named(url):
    with pytest.raises(ReadError, match=url):
        Exporter(url).dram_active_percent(T4)


def test_a_gpu_without_counters_of_its_own_is_read_through_it(exporter, box, monkeypatch):
    monkeypatch.setenv("KVSCOPE_DCGM_URL", exporter[0])
    told = box("t4").tick(2)
    sensor = told.sensors()["dram_bandwidth"]
    assert (told.values()["dram_bandwidth"], sensor.source) == (81.25, "dcgm")
    assert sensor.label.startswith("measured: DCGM exporter")


def test_counters_of_its_own_are_preferred(exporter, box, monkeypatch):
    monkeypatch.setenv("KVSCOPE_DCGM_URL", exporter[0])
    told = golden.read(box("h100"), 3)
    assert told.sensors()["dram_bandwidth"].source == "nvml_gpm" and exporter[1] == []
