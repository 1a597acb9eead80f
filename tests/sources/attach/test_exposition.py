"""Metrics texts: the same samples as prometheus_client finds, at the first scrape and at every later one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from backend.sources.attach import exposition
from backend.sources.attach.exposition import Exposition, Reader
from backend.sources.attach.meter import Meter
from backend.sources.attach.profiles import profiles
from tests.sources.attach.texts import body, line, recorded


def flat(told: Exposition) -> dict[tuple, float]:
    parts = (told.series, told.created)
    return {
        (name, *labels): value for part in parts for name, series in part.items() for labels, value in series.items()
    }


def test_every_scrape_says_what_prometheus_client_says():
    kept = CollectorRegistry()
    histogram = Histogram("vllm:ttft_seconds", "first", ["model_name"], registry=kept, buckets=(0.1, 1.0))
    gauge = Gauge("vllm:running", "a help text with } and { in it", ["model_name", "engine"], registry=kept)
    counter = Counter("vllm:tokens", "t", registry=kept)
    wanted = {f"vllm:ttft_seconds_{part}" for part in ("bucket", "sum", "count")} | {
        "vllm:running",
        "vllm:tokens_total",
    }
    reader = Reader(wanted)
    for step in range(4):
        histogram.labels('odd "}" \\ name\n').observe(0.3 * step)
        gauge.labels("a b # c", str(step % 2)).set(step)
        counter.inc(2)
        text = generate_latest(kept)
        expected = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }
        told = reader.read(text)
        assert flat(told) == expected and not told.problems and not told.unknown


def test_values_that_are_odd_but_allowed():
    reader = Reader(set("abcdefg"))
    text = b'a NaN\nb +Inf\nc 1.5e-3\nd{x="1",} 4 1795981231000\ne  3\n\n  \r\nf 2\r\ng{x="}"} 6 # {id="7"} 1 2\n'
    for _ in range(2):
        told = reader.read(text)
        assert [value for name in "bcdefg" for value in told.series[name].values()] == [math.inf, 0.0015, 4, 3, 2, 6]
        assert told.series["a"] == {} and told.problems == ["1 series are NaN"]


@pytest.mark.parametrize("broken", ["a{", 'a{x="1} 2', "a x", "a b c", "a 1_000", 'a{x="1"} one', 'a{x="1"}', "a "])
def test_a_broken_line_costs_only_itself(broken):
    reader = Reader({"a", "before", "after"})
    for _ in range(2):
        told = reader.read(f"before 1\n{broken}\nafter 2\n".encode())
        assert flat(told) == {("before",): 1, ("after",): 2} and told.problems == ["1 lines could not be read"]


def test_a_last_line_that_was_cut_off_is_no_number():
    told = Reader({"a", "b"}).read(b"a 124\nb 4")
    assert flat(told) == {("a",): 124} and told.cut and "middle of a line" in told.problems[0]


def test_a_series_that_comes_twice_counts_once():
    told = Reader({"a"}).read(b'a{x="1"} 4\na{x="1"} 5\n')
    assert flat(told) == {("a", ("x", "1")): 5} and "twice" in told.problems[0]


def test_what_nobody_wants_is_listed_with_how_many_series_it_has():
    told = Reader({"a"}).read(b'a 1\nhttp_requests{p="/"} 1\nhttp_requests{p="/x"} 1\nodd_created 1.7e9\n')
    assert told.unknown == {"http_requests": 2}


def test_labels_that_never_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(exposition, "MAX_SERIES", 100)
    reader = Reader({"a"})
    for scrape in range(50):
        reader.read("".join(f'a{{request="{scrape}-{n}"}} 1\n' for n in range(100)).encode())
    assert len(reader._parsed) <= 300


def test_fifty_thousand_series_are_read_and_more_are_left_out(monkeypatch):
    known = Reader({"vllm:num_requests_running"})
    rows = [line("vllm:num_requests_running", n, model_name=f"m{n}") for n in range(1_000)]
    many = body(rows, (line("vllm:lora_requests_info", 1, adapter=f"a{n}") for n in range(49_000)))
    told = known.read(many)
    assert len(told.series["vllm:num_requests_running"]) == 1_000
    assert told.unknown == {"vllm:lora_requests_info": 49_000} and not told.problems
    monkeypatch.setattr(exposition, "MAX_SERIES", 900)
    told = Reader({"vllm:num_requests_running"}).read(many)
    assert len(told.series["vllm:num_requests_running"]) == 900 and "more than 900" in told.problems[0]


FAMILIES = recorded("vllm_metrics_load").splitlines()
PIECES = st.one_of(
    st.sampled_from(FAMILIES),
    st.binary(max_size=40),
    st.sampled_from(FAMILIES).flatmap(lambda row: st.integers(0, len(row)).map(lambda cut: row[:cut])),
    st.builds(
        lambda name, labels, value: f"{name}{{{labels}}} {value}".encode(),
        st.sampled_from(["vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:kv_cache_usage_perc"]),
        st.text(alphabet='engine="0,model_name}{\\', max_size=20),
        st.sampled_from(["NaN", "-Inf", "+Inf", "-5", "1e400", "1e-400", "", "١", "0x1", "1 2 3"]),
    ),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(PIECES, max_size=12), min_size=1, max_size=4))
def test_no_text_breaks_reader_or_meter_and_no_number_is_nonsense(scrapes):
    meter = Meter(profiles()["vllm"])
    reader = Reader(meter.samples)
    for second, rows in enumerate(scrapes):
        reading = meter.take(reader.read(b"\n".join(rows) + b"\n"), float(second))
        for name, value in reading.values.items():
            assert (value.value is None) == (value.quality == "absent")
            assert value.value is None or not math.isnan(value.value), name
            assert value.note or value.value is not None, f"{name} is missing without a reason"
            if name.endswith("_per_s") and value.value is not None:
                assert value.value >= 0
