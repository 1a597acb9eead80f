"""What is at an address: found out, or said plainly why not; keys stay where they belong."""

from __future__ import annotations

import asyncio
import copy
import pickle
import shutil
import socket
from collections.abc import Iterator

import msgspec
import pytest

from backend.sources.attach import detect, exposition, web
from backend.sources.attach.address import ALLOW, allowed, base_url, join
from backend.sources.attach.detect import Found, probe
from backend.sources.attach.target import Secret, TargetConfig, Unreachable
from tests.sources.attach import texts
from tests.sources.attach.talker import Said, Talker, certificate, packed, told

METRICS = texts.recorded("vllm_metrics_load")
MODELS = told({"data": [{"id": "smollm2", "owned_by": "vllm", "max_model_len": 2048}]})
VLLM = {"/metrics": Said(METRICS), "/v1/models": MODELS, "/version": told({"version": "0.32.0"})}
KEY = "sk-very-secret"


def found(url: str, **config) -> Found:
    return asyncio.run(probe(TargetConfig(url=url, **config)))


def why(url: str, **config) -> str:
    with pytest.raises(Unreachable) as refused:
        found(url, **config)
    return str(refused.value)


@pytest.fixture
def vllm() -> Iterator[Talker]:
    with Talker(dict(VLLM)) as talker:
        yield talker


def quality(seen: Found) -> dict[str, str]:
    return {view.view: view.quality for view in seen.capabilities}


def test_connections_that_were_kept_and_dropped_cost_no_question(vllm):
    """All of them at once, as when a server that is asked for several things is started anew."""

    async def ask() -> list[int]:
        to = web.Web(TargetConfig(url=vllm.url))
        try:
            paths = ["/metrics", "/v1/models", "/version"] * 2
            answers = [await asyncio.gather(*map(to.get, paths)) for _ in range(3)]
            posted = await to.post("/version", {})
            return [answer.status for some in [*answers, [posted]] for answer in some]
        finally:
            await to.close()

    vllm.drops = "next"
    assert asyncio.run(ask()) == [200] * 19
    assert [method for method, *_ in vllm.asked].count("POST") == 1


# what is there


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_vllm(vllm, ending):
    seen = found(vllm.url + ending)
    assert (seen.kind, seen.version, seen.model, seen.max_model_len) == ("vllm", "0.32.0", "smollm2", 2048)
    assert seen.metrics_url == f"{vllm.url}/metrics" and not seen.problems
    views = quality(seen)
    assert (views["roofline"], views["latency"], views["prefix_tree"], views["switches"]) == (
        "estimated", "derived", "none", "none",
    )  # fmt: skip
    flags = {view.view: view.flag for view in seen.capabilities}
    assert "--kv-events-config" in flags["prefix_tree"]


def test_a_vllm_says_where_its_kv_events_are(vllm):
    vllm.answers["/kv_event_sources"] = told({"0": {"endpoint": "tcp://*:5557", "topic": "kv"}})
    seen = found(vllm.url)
    assert [(end.url, end.topic) for end in seen.kv_endpoints] == [("tcp://127.0.0.1:5557", "kv")]
    assert quality(seen)["prefix_tree"] == "exact"


def test_a_base_model_says_that_it_has_no_chat_template(vllm):
    assert found(vllm.url).chat  # nothing was said of it
    vllm.answers["/tokenize"] = told({"error": {"message": "no chat template is defined"}}, status=400)
    assert not found(vllm.url).chat
    vllm.answers["/tokenize"] = told({"tokens": [1]})
    assert found(vllm.url).chat


def test_without_estimates_the_flag_is_named(vllm):
    rows = [row for row in METRICS.split(b"\n") if b"estimated" not in row]
    vllm.answers["/metrics"] = Said(b"\n".join(rows))
    roofline = next(view for view in found(vllm.url).capabilities if view.view == "roofline")
    assert (roofline.quality, roofline.flag) == ("none", "--enable-mfu-metrics")


def test_a_server_under_a_path():
    """Behind a proxy only the long path is there; vLLM's --root-path answers under both."""
    answers = {f"/llm{path}": said for path, said in VLLM.items()}
    with Talker(answers) as talker:
        seen = found(f"{talker.url}/llm/v1")
        assert seen.base_url == f"{talker.url}/llm" and seen.metrics_url == f"{talker.url}/llm/metrics"
        assert "no models" in why(talker.url)


def test_tensorrt_llm_has_its_metrics_elsewhere():
    answers = {"/metrics": told([{"iter": 1}]), "/prometheus/metrics": Said(texts.trtllm()), "/v1/models": MODELS}
    with Talker(answers) as talker:
        assert found(talker.url).metrics_url == f"{talker.url}/prometheus/metrics"
        assert found(talker.url, metrics_path="/prometheus/metrics").kind == "trtllm"


@pytest.mark.parametrize(
    ("kind", "answers", "flag"),
    [
        ("llamacpp", {"/props": told({"default_generation_settings": {}, "build_info": "b1"})}, "--metrics"),
        ("sglang", {"/v1/models": told({"data": [{"id": "m", "owned_by": "sglang"}]})}, "--enable-metrics"),
        ("openai", {}, ""),
    ],
)
def test_a_server_without_metrics_is_told_by_what_it_says(kind, answers, flag):
    with Talker({"/v1/models": told({"data": [{"id": "m"}]}), **answers}) as talker:
        seen = found(talker.url)
    assert (seen.kind, seen.model, seen.metrics_url) == (kind, "m", "")
    assert flag in " ".join(seen.problems) and "no metrics" in seen.problems[0]
    assert quality(seen)["requests"] == "derived" and quality(seen)["roofline"] == "none"


@pytest.mark.parametrize("make", [packed, Said])
def test_a_packed_body_is_unpacked(vllm, make):
    vllm.answers["/metrics"] = make(METRICS)
    assert len(found(vllm.url).samples) > 80


def test_the_same_server_may_send_us_on(vllm):
    vllm.answers |= {"/metrics": Said(status=307, headers={"location": "/metrics/"}), "/metrics/": Said(METRICS)}
    assert found(vllm.url).kind == "vllm"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_an_address_of_ipv6():
    try:
        with Talker(dict(VLLM), host="::1") as talker:
            assert found(f"http://[::1]:{talker.port}").kind == "vllm"
    except OSError:
        pytest.skip("no IPv6 loopback here")


# why not


@pytest.mark.parametrize("url", ["", "foo bar", "ftp://host", "http://", "http://host:99999", "http://host:0", "//x"])
def test_what_is_no_address(url):
    assert "no address" in why(url)


def test_nothing_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        assert "nothing listens" in why(f"http://127.0.0.1:{taken.getsockname()[1]}")


def test_no_such_host():
    assert "no host of the name" in why("http://no-such-host.invalid:8000")


def test_a_key_is_wanted_or_not_accepted(vllm):
    vllm.answers["/metrics"] = Said(status=401)
    assert "wants a key" in why(vllm.url)
    said = why(vllm.url, key=Secret(KEY))
    assert "does not accept the key" in said and KEY not in said


def test_numbers_may_be_read_where_requests_need_a_key(vllm):
    vllm.answers["/v1/models"] = Said(status=401)
    seen = found(vllm.url)
    assert seen.kind == "vllm" and "wants a key" in seen.problems[0]


def test_a_web_page_is_no_metrics():
    page = Said(b"<!doctype html><title>x</title>", headers={"content-type": "text/html"})
    with Talker({"/metrics": page, "/v1/models": page}) as talker:
        assert "web page" in why(talker.url)


def test_metrics_of_something_else():
    with Talker({"/metrics": Said(b"node_cpu_seconds_total 4\nnode_load1 2\n")}) as talker:
        assert "no engine that is known" in why(talker.url) and "node" in why(talker.url)


def test_a_server_that_takes_half_a_minute(vllm, monkeypatch):
    assert web.CONNECT_S + web.ANSWER_S > detect.PROBE_S and detect.PROBE_S < 5
    monkeypatch.setattr(web, "ANSWER_S", 0.2)
    vllm.answers["/metrics"] = Said(METRICS, delay_s=30)
    assert "does not answer GET" in why(vllm.url)
    monkeypatch.setattr(web, "ANSWER_S", 30)
    monkeypatch.setattr(detect, "PROBE_S", 0.2)
    assert "too slowly" in why(vllm.url)


def test_another_host_is_not_followed_and_gets_no_key(vllm):
    with Talker(dict(VLLM)) as other:
        vllm.answers["/metrics"] = Said(status=302, headers={"location": f"{other.url}/metrics"})
        assert "another server" in why(vllm.url, key=Secret(KEY))
        assert other.asked == []


def test_a_circle_ends(vllm):
    vllm.answers["/metrics"] = Said(status=302, headers={"location": "/metrics"})
    assert "circle" in why(vllm.url)


def test_more_than_can_be_read(vllm, monkeypatch):
    vllm.answers["/metrics"] = packed(b"a 1\n" * (exposition.MAX_BYTES // 4 + 1))
    assert "more than 8 MB" in why(vllm.url)
    vllm.answers["/metrics"] = Said(b"\x1f\x8bnonsense", headers={"content-encoding": "gzip"})
    assert "cannot be unpacked" in why(vllm.url)


def test_what_closes_without_a_word():
    with Talker() as talker:
        talker.choose = lambda path, body: 1 / 0  # the connection ends
        assert "closed the connection without an answer" in why(talker.url)


def test_what_is_no_http_at_all():
    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        writer.close()

    async def ask() -> str:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(Unreachable) as refused:
                await probe(TargetConfig(url=f"http://127.0.0.1:{port}"))
            return str(refused.value)

    assert "as an HTTP server" in asyncio.run(ask())


# TLS


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed: no certificate can be made")
def test_a_certificate_must_be_trusted_or_waived(tmp_path, vllm):
    context, pem = certificate(tmp_path)
    with Talker(dict(VLLM), tls=context) as talker:
        assert "certificate" in why(talker.url) and "not trusted" in why(talker.url)
        assert found(talker.url, ca_file=str(pem)).kind == "vllm"
        assert found(talker.url, insecure_tls=True).kind == "vllm"
        assert "cannot be used" in why(talker.url, ca_file=str(tmp_path / "none.pem"))
        assert "https" in why(talker.url.replace("https", "http"))
    assert "does not speak TLS" in why(vllm.url.replace("http", "https"))


# keys


def test_a_key_travels_in_the_header_only(vllm, tmp_path, caplog):
    caplog.set_level("DEBUG")
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    for config in ({"key_file": str(file)}, {"key": Secret(KEY)}):
        seen = found(vllm.url, **config)
        assert KEY not in repr(seen) and KEY not in repr(TargetConfig(url=vllm.url, **config))
    assert vllm.keys() == {f"Bearer {KEY}"} and all(KEY not in path for _, path, _, _ in vllm.asked)
    file.write_text("Basic dXNlcjpwdw==")
    vllm.asked.clear()
    found(vllm.url, key_file=str(file))
    assert vllm.keys() == {"Basic dXNlcjpwdw=="}
    assert KEY not in caplog.text


def test_a_key_is_written_nowhere():
    config = TargetConfig(url="http://x", key=Secret(KEY))
    for write in (msgspec.json.encode, pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError):
            write(config)
    assert KEY not in str(config) and config == TargetConfig(url="http://x", key=Secret(KEY))
    assert msgspec.json.encode(TargetConfig(url="http://x")) == b'{"url":"http://x"}'


def test_a_key_in_the_address_is_refused_and_not_repeated():
    said = why(f"http://user:{KEY}@127.0.0.1:1/")
    assert "does not belong into the address" in said and KEY not in said
    assert KEY not in why(f"ftp://user:{KEY}@host") and KEY not in TargetConfig(url=f"http://u:{KEY}@h:1").label


def test_a_key_file_that_cannot_be_used(vllm, tmp_path):
    assert "cannot be read" in why(vllm.url, key_file=str(tmp_path / "none"))
    (tmp_path / "two").write_text("a\nb")
    assert "one line" in why(vllm.url, key_file=str(tmp_path / "two"))


# which hosts


def test_addresses_where_machines_keep_credentials_are_refused(monkeypatch):
    for url in (
        "http://169.254.169.254",
        "http://[fe80::1]",
        "http://metadata.google.internal",
        "http://[::ffff:169.254.1.1]",
    ):
        assert "credentials" in why(url)
    monkeypatch.setenv(ALLOW, "gpu-1, 10.1.0.0/16")
    assert allowed("gpu-1", "192.168.7.7") and allowed("x", "10.1.2.3") and not allowed("x", "127.0.0.1")
    assert "does not list it" in why("http://127.0.0.1:1")
    monkeypatch.setenv(ALLOW, "169.254.0.0/16")
    assert allowed("x", "169.254.169.254")


def test_paths_are_joined_below_the_base():
    assert join("http://h/llm", "/metrics") == "http://h/llm/metrics"
    assert base_url(" http://h:1/a/v1/ ") == "http://h:1/a" and base_url("h:8000") == "http://h:8000"
