"""Recorded and built metrics become the numbers that they mean, under our names, with where they are from."""

from __future__ import annotations

import math

import pytest

from backend.events import Value
from backend.sources.attach import exposition, profiles
from backend.sources.attach.canonical import NAMES
from backend.sources.attach.exposition import Reader
from backend.sources.attach.meter import Meter, Reading
from tests.sources.attach import texts
from tests.sources.attach.texts import recorded


def scrapes(*bodies: bytes, apart_s: float = 2.0) -> tuple[str, Reading]:
    """(whose metrics they are, the last reading) of scrapes in a row."""
    profile = profiles.recognise(exposition.names(bodies[0]))
    meter = Meter(profile)
    reader = Reader(meter.samples)
    readings = [meter.take(reader.read(body), 10.0 + i * apart_s) for i, body in enumerate(bodies)]
    return profile.kind, readings[-1]


def numbers(reading: Reading) -> dict[str, float]:
    return {name: round(value.value, 6) for name, value in reading.values.items() if value.value is not None}


def test_a_real_vllm_under_load():
    """What its own text says between the recording of an idle and of a busy moment, as if two seconds apart."""
    kind, reading = scrapes(recorded("vllm_metrics_idle"), recorded("vllm_metrics_load"))
    assert kind == "vllm" and not reading.problems and not reading.restarted
    found = numbers(reading)
    assert {name: found[name] for name in found if not name.endswith("_s") or name.endswith("per_s")} == {
        "running": 12, "waiting": 0, "waiting_capacity": 0, "waiting_deferred": 0, "kv_usage": 0.068871,
        "block_size": 128, "num_blocks": 364, "used_blocks": 25, "preemptions": 0,
        "prefix_queries_per_s": 2122, "prefix_hits_per_s": 1472, "hit_rate": round(2944 / 4244, 6),
        "prompt_tokens_per_s": 2122, "prompt_tokens_computed_per_s": 650, "output_tokens_per_s": 1134,
        "tokens_per_step": round(3568 / 190, 6),
        "flops_per_s": 9.31583158272e11 / 2, "read_bytes_per_s": 6.452718336e10 / 2,
        "write_bytes_per_s": 1.733548032e9 / 2,
    }  # fmt: skip
    assert found["ttft_p50_s"] == round(0.75 + 0.25 * 11 / 15, 6)  # 1 request is below 0.75 s, 16 are below 1 s
    ttft = reading.values["ttft_p50_s"]
    assert (ttft.low, ttft.high, ttft.quality) == (0.75, 1.0, "derived") and "of 24 in" in ttft.note
    assert (reading.cells, reading.block_size, reading.config["enable_prefix_caching"]) == (363, 128, "True")
    assert reading.values["flops_per_s"].quality == "estimated"
    assert "includes cached" in reading.values["prompt_tokens_per_s"].note
    assert "vllm:request_success_total" in reading.unknown and not any("created" in name for name in reading.unknown)


def test_a_vllm_that_is_full_and_one_that_was_started_anew():
    """63 of 64 blocks can be given out; the second recording is of another process."""
    _, reading = scrapes(recorded("vllm_metrics_load"), recorded("vllm_metrics_preemptions"))
    found = numbers(reading)
    assert (found["used_blocks"], reading.cells, found["running"], found["waiting_capacity"]) == (62, 63, 19, 5)
    assert reading.restarted and reading.restarts == 1
    assert found["preemptions"] == 10 and found["output_tokens_per_s"] == 3929 / 2
    assert all(value >= 0 for value in found.values())


def test_the_first_scrape_has_gauges_and_no_rates():
    _, reading = scrapes(recorded("vllm_metrics_load"))
    assert numbers(reading).keys() == {
        "running", "waiting", "waiting_capacity", "waiting_deferred", "kv_usage", "block_size", "num_blocks",
        "used_blocks", "preemptions",
    }  # fmt: skip
    assert reading.values["output_tokens_per_s"].note.startswith("one reading so far")


def test_a_real_llamacpp():
    kind, reading = scrapes(recorded("llamacpp_metrics_load"), recorded("llamacpp_metrics_after"))
    assert kind == "llamacpp"
    assert numbers(reading) == {
        "running": 0, "waiting": 0, "prompt_tokens_computed_per_s": (3969 - 896) / 2, "prefix_hits_per_s": 0,
        "output_tokens_per_s": (3972 - 896) / 2,
        "tokens_per_step": round((3969 - 896 + 3972 - 896) / (1284 - 896), 6),
    }  # fmt: skip
    assert "slots" in reading.values["used_blocks"].note and "excludes cached" in reading.values[
        "prompt_tokens_computed_per_s"
    ].note  # fmt: skip


def test_names_of_vllm_before_its_v1():
    _, reading = scrapes(texts.vllm_v0(), texts.vllm_v0(4))
    found = numbers(reading)
    assert (found["running"], found["waiting_capacity"], found["kv_usage"]) == (3, 1, 0.25)
    assert (found["used_blocks"], found["hit_rate"], found["preemptions"]) == (25, 0.5, 4)
    assert (found["prompt_tokens_per_s"], found["output_tokens_per_s"]) == (200, 20)
    assert reading.values["itl_p50_s"].name == "vllm:time_per_output_token_seconds"
    assert reading.values["itl_p50_s"].low == 0.01 and reading.values["queue_p50_s"].high == 1.0
    assert "0.11" in reading.values["tpot_p50_s"].note


def test_where_old_and_new_names_stand_side_by_side_the_new_one_counts_and_engines_are_put_together():
    _, reading = scrapes(texts.vllm_010(), texts.vllm_010(3))
    found = numbers(reading)
    assert (found["running"], found["waiting"]) == (10, 2)  # summed
    assert found["kv_usage"] == 0.4 and found["kv_usage_max"] == 0.5  # (0.1 × 100 + 0.5 × 300) ÷ 400: never a sum
    assert reading.values["kv_usage"].name == "vllm:kv_cache_usage_perc" and reading.cells == 400
    assert found["used_blocks"] == 10 + 150 and found["hit_rate"] == 0.25
    assert (found["prefix_queries_per_s"], found["output_tokens_per_s"]) == (300, 30)
    assert [(row.labels, row.running, row.kv_usage) for row in reading.by_engine] == [
        ({"engine": "0"}, 4, 0.1),
        ({"engine": "1"}, 6, 0.5),
    ]


def test_blocks_that_vllm_calls_none_are_not_known():
    text = texts.vllm_v0().replace(b'num_gpu_blocks="101"', b'num_gpu_blocks="None"')
    _, reading = scrapes(text)
    assert reading.cells == 0 and reading.values["num_blocks"].value is None
    assert "how many blocks" in reading.values["used_blocks"].note


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_ranks_of_one_sglang_engine_tell_the_same_and_its_data_parallel_engines_do_not(prefix):
    kind, reading = scrapes(texts.sglang(0, prefix), texts.sglang(4, prefix))
    found = numbers(reading)
    assert kind == "sglang" and (found["running"], found["waiting"], found["kv_usage"]) == (10, 4, 0.5)
    assert (found["block_size"], reading.cells, found["used_blocks"]) == (4, 2000, 1000)
    assert found["prompt_tokens_per_s"] == 2 * (60 + 20) * 4 / 2  # two engines, not four ranks
    assert (found["prompt_tokens_computed_per_s"], found["output_tokens_per_s"]) == (240, 32)
    assert (found["hit_rate"], found["preemptions"], len(reading.by_engine)) == (0.25, 24, 2)
    slowest = reading.values["ttft_p95_s"]
    assert (slowest.value, slowest.low, slowest.high) == (0.1, 0.1, None) and "at least" in slowest.note


def test_tensorrt_llm():
    kind, reading = scrapes(texts.trtllm(), texts.trtllm(2))
    found = numbers(reading)
    assert kind == "trtllm" and (found["used_blocks"], found["num_blocks"], found["block_size"]) == (99, 200, 32)
    assert (found["hit_rate"], found["output_tokens_per_s"], found["waiting_deferred"]) == (0.4, 5, 1)
    assert "paused" in reading.values["preemptions"].note


def test_tgi():
    kind, reading = scrapes(texts.tgi(), texts.tgi(6))
    found = numbers(reading)
    assert kind == "tgi" and (found["running"], found["waiting"]) == (6, 4)
    assert (found["output_tokens_per_s"], found["prompt_tokens_per_s"]) == (21, 150)
    assert found["tpot_p50_s"] == 0.02 and "nothing about its KV cache" in reading.values["kv_usage"].note


def test_dynamo_and_vllm_under_ray():
    kind, reading = scrapes(texts.dynamo(), texts.dynamo(1))
    assert kind == "dynamo" and numbers(reading)["output_tokens_per_s"] == 20 and reading.cells == 500
    kind, reading = scrapes(texts.ray(), texts.ray(3))
    found = numbers(reading)
    assert kind == "vllm" and (found["running"], found["output_tokens_per_s"]) == (10, 30)
    assert reading.values["running"].name == "ray_vllm_num_requests_running"


def test_every_name_is_in_every_reading_and_what_is_missing_has_a_reason():
    for text in (b"", recorded("vllm_metrics_load"), texts.tgi(), texts.sglang()):
        profile = profiles.recognise(exposition.names(text)) or profiles.nothing("openai", "This server")
        reading = Meter(profile).take(Reader(profile.samples).read(text), 1.0)
        assert tuple(reading.values) == NAMES
        for name, value in reading.values.items():
            assert isinstance(value, Value) and (value.value is not None or value.note), name


def test_a_gauge_that_is_nan_is_missing():
    text = b'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_waiting{engine="0"} 2\n'
    _, reading = scrapes(text)
    assert reading.values["running"].value is None and "is NaN" in reading.values["running"].note
    assert reading.values["waiting"].value == 2


def test_two_scrapes_at_the_same_moment_have_no_rate():
    _, reading = scrapes(recorded("vllm_metrics_idle"), recorded("vllm_metrics_load"), apart_s=0.0)
    assert reading.window_s == 0 and reading.values["output_tokens_per_s"].value is None


def test_the_file_of_names_is_sound():
    for kind, profile in profiles.profiles().items():
        assert profile.kind == kind and profile.title and profile.metrics
        for candidates in profile.metrics.values():
            for candidate in candidates:
                assert (candidate.read == "label") == bool(candidate.label)
                assert candidate.quality in ("measured", "estimated")
                if candidate.read == "histogram":
                    assert not candidate.name.endswith(("_bucket", "_sum", "_count"))
    assert math.isclose(profiles.profiles()["vllm"].null_blocks, 1)
