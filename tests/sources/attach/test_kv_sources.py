"""Where engines say that they publish, and what people type."""

from __future__ import annotations

import json

import pytest

from backend.sources.attach.kv_sources import BadEndpoint, Endpoint, of_sglang, of_vllm, typed

SERVER = "http://gpu-1.example:8000/v1"


def test_vllm_says_it_by_rank_or_as_a_list():
    row = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv-events"}
    one = Endpoint(url="tcp://gpu-1.example:5557", replay="tcp://gpu-1.example:5558", topic="kv-events")
    assert of_vllm({"0": row}, SERVER) == of_vllm([row | {"data_parallel_rank": 0}], SERVER) == [one]
    assert of_vllm({"sources": [row]}, SERVER) == [one]
    second = {"endpoint": "tcp://10.0.0.2:5560", "replay_endpoint": None, "topic": "", "data_parallel_rank": 3}
    assert of_vllm([row, second], SERVER)[1] == Endpoint(url="tcp://10.0.0.2:5560", rank=3)


def test_a_server_on_this_machine_may_name_a_path_or_wait_for_us():
    row = {"endpoint": "ipc:///run/kv:5557", "replay_endpoint": "ipc:///run/replay:5557", "topic": "t"}
    expected = [Endpoint(url="ipc:///run/kv:5557", replay="ipc:///run/replay:5557", topic="t")]
    assert of_vllm({"0": row}, "http://127.0.0.1:8000") == of_vllm({"0": row}, "http://localhost:8000") == expected
    assert of_vllm({"0": row}, SERVER) == []  # another machine has no business with our files
    (here,) = of_vllm({"0": {"endpoint": "tcp://127.0.0.1:5557"}}, "http://127.0.0.1:8000")
    assert here.bind  # vLLM connects to an endpoint of one host


NONE = [
    *(None, 3, "x", [], {}, [None], {"0": 3}, {"error": {"message": "no"}}),
    *([{"endpoint": endpoint}] for endpoint in (3, "ipc:///tmp/x", "tcp://*:0", "tcp://*:x")),
]


@pytest.mark.parametrize("said", NONE)
def test_answers_without_an_address_that_can_be_reached(said):
    assert of_vllm(said, SERVER) == []
    assert of_sglang(said, SERVER) == ([], 0)


def test_sglang_describes_a_range_of_ports():
    said = {"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "",
                          "block_size": 1, "dp_size": 2}}  # fmt: skip
    found, page = of_sglang(said, "http://[::1]:30000")
    assert found == [Endpoint(url="tcp://[::1]:5557"), Endpoint(url="tcp://[::1]:5558", rank=1)]
    assert page == 1


def test_an_older_sglang_gives_its_configuration():
    config = {"publisher": "zmq", "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:6100", "topic": "kv"}
    said = {"kv_events_config": json.dumps(config), "page_size": 16, "dp_size": 2, "enable_dp_attention": True}
    found, page = of_sglang(said, SERVER)
    assert [(e.url, e.replay) for e in found] == [
        ("tcp://gpu-1.example:6000", "tcp://gpu-1.example:6100"),
        ("tcp://gpu-1.example:6001", "tcp://gpu-1.example:6101"),
    ]
    assert page == 16
    assert len(of_sglang(said | {"enable_dp_attention": False}, SERVER)[0]) == 1
    assert of_sglang(said | {"kv_events_config": '{"publisher": "null"}'}, SERVER) == ([], 0)


def test_what_a_person_types():
    assert typed(" tcp://h:5557 ") == Endpoint(url="tcp://h:5557")
    assert typed("tcp://h:5557, tcp://h:5558") == Endpoint(url="tcp://h:5557", replay="tcp://h:5558")
    assert typed("bind+tcp://127.0.0.1:5557") == Endpoint(url="tcp://127.0.0.1:5557", bind=True)
    assert typed("ipc:///run/kv").url == "ipc:///run/kv"
    for wrong in (
        "",
        "h:5557",
        "http://h:5557",
        "tcp://h",
        "tcp://:5557",
        "tcp://h:99999",
        "tcp://h:5557,x",
        "inproc://a",
    ):
        with pytest.raises(BadEndpoint):
            typed(wrong)
