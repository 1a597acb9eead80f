"""Turning all pages to a server that is not ours, and back."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from backend.events import View
from backend.experiments import Progress
from backend.hub import Hub
from backend.sources import Source, SourceError
from backend.sources.attach import web
from backend.sources.attach.detect import Found
from backend.sources.attach.endpoints import FleetError
from backend.sources.attach.fleet_view import message
from backend.sources.attach.target import Secret, TargetConfig, Unreachable
from backend.sources.background import Background
from backend.sources.embedded import EmbeddedEngine
from pages.widgets import capabilities, connect, fleet, header, service
from pages.widgets.service import Service
from tests.browser.vllm_server import VllmServer
from tests.sources.attach.replicas import Replicas
from tests.sources.attach.talker import Said, Talker, certificate, told
from tests.sources.attach.texts import recorded
from tests.sources.fake_engine import Serving
from tests.waiting import eventually

COMMAND = (sys.executable, str(Path(__file__).parents[1] / "sources" / "fake_engine.py"))


@pytest.fixture(scope="module")
def vllm() -> Iterator[tuple[VllmServer, str]]:
    server = VllmServer()
    with Serving(server) as url:
        yield server, url


@pytest.fixture
def found() -> Iterator[Service]:
    """A service on an engine of our own that nobody answers for."""
    found = Service(Source(Hub(), Background(), url="http://127.0.0.1:9", engine=None, key=None))
    yield found
    found.close()


def test_everything_follows_the_server_and_comes_back(found, vllm):
    _, url = vllm
    own, hub, users, pulse = found.source, found.hub, found.users, found.pulse()
    fixed = found.fixed()
    assert found.probe(TargetConfig(url=url)).title == "vLLM"
    found.attach(TargetConfig(url=url, key=Secret("do not show me")))
    assert found.attached and found.hub is not hub and found.users is not users
    assert found.fixed() != fixed and found.pulse() != pulse  # so that every tab is drawn again
    eventually(lambda: found.hub.read(lambda state: state.scrape is not None), "a scrape")
    assert found.where == url.removeprefix("http://")
    assert "do not show me" not in repr(found.source.config) + repr(found.status) + found.pulse()

    # What a user asks is ours to be shown; what the gauge counts besides is others'.
    found.set_users(1)
    eventually(lambda: found.hub.read(lambda state: any(r.output_tokens for r in state.requests.values())), "a token")
    assert service.at_work(found.hub.read(lambda state: state)) == 12  # the recorded gauge
    facts = found.hub.read(lambda state: header.facts(state, "GiB"))
    assert facts.attached == "vLLM 0.32.0" and facts.device == "" and "0.0 M" not in facts.model_help

    found.detach()
    assert found.source is own and found.hub is hub and not found.attached
    found.detach()  # harmless
    assert found.source is own


def test_an_experiment_is_not_pulled_away_from_its_engine(found, vllm):
    def endless():
        while True:
            yield Progress(0, 1)

    job = found.lab.start("a sweep", endless())
    with pytest.raises(SourceError, match="'a sweep' is running"):
        found.attach(TargetConfig(url=vllm[1]))
    assert not found.attached
    job.stop(timeout_s=5)


def test_our_own_engine_makes_room_and_starts_again(vllm):
    engine = EmbeddedEngine(command=COMMAND)
    found = Service(Source(Hub(), Background(), url=None, engine=engine, key=None))
    try:
        engine.start()
        eventually(lambda: found.status.phase == "ready", "our own engine")
        found.attach(TargetConfig(url=vllm[1]), stop_own=True)
        assert engine.url is None and engine.status.phase == "stopped"
        found.detach()
        eventually(lambda: found.status.phase == "ready", "our own engine again")
    finally:
        found.close()


def test_who_was_attached_from_the_start_finds_an_engine_of_their_own(vllm, monkeypatch):
    service.close()
    monkeypatch.setenv(service.ATTACH_URL, vllm[1])
    monkeypatch.setenv("KVSCOPE_ENGINE_URL", "http://127.0.0.1:9")
    try:
        found = service.get()
        assert found.attached and found.own is None
        found.detach()
        assert found.source.kind == "remote" and found.own is found.source
    finally:
        service.close()


def test_nobody_there_is_said_within_seconds(found):
    with pytest.raises(Unreachable, match="127.0.0.1:9"):
        found.probe(TargetConfig(url="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000/llm", True),
        ("http://localhost:8000", True),
        ("http://10.0.0.7:8000", False),
        ("https://gpu.example", False),
        ("nonsense", False),
    ],
)
def test_only_a_server_on_this_machine_wants_its_cores(url, here):
    assert connect.loopback(url) is here


@pytest.fixture
def dialog(found, monkeypatch) -> Callable[..., Found | str]:
    """What the connect dialog says of an address: what it found, or the words of its error."""
    monkeypatch.setattr(service, "_service", found)

    def script() -> None:
        from pages.widgets import connect

        connect._dialog()

    page = AppTest.from_function(script, default_timeout=30).run()

    def ask(url: str, **fields: str | bool) -> Found | str:
        page.text_input(key="connect_url").set_value(url)
        for name, value in fields.items():
            (page.toggle if isinstance(value, bool) else page.text_input)(key=f"connect_{name}").set_value(value)
        next(button for button in page.button if button.label == "Test connection").click()
        page.run()
        assert not page.exception
        return page.error[0].value if page.error else page.session_state[connect.OUTCOME]

    return ask


ANSWERS = {"/metrics": Said(recorded("vllm_metrics_load")), "/v1/models": told({"data": [{"id": "m"}]})}


def test_the_dialog_says_what_is_wrong_with_a_connection(dialog, monkeypatch, tmp_path):
    with Talker(dict(ANSWERS)) as other, Talker(dict(ANSWERS)) as talker:
        assert dialog(talker.url).kv_endpoints == []
        talker.answers["/kv_event_sources"] = told({"0": {"endpoint": "tcp://127.0.0.1:5557"}})
        assert [endpoint.url for endpoint in dialog(talker.url).kv_endpoints] == ["tcp://127.0.0.1:5557"]
        talker.answers["/metrics"] = Said(delay_s=30)
        with monkeypatch.context() as impatient:
            impatient.setattr(web, "ANSWER_S", 0.5)
            assert "does not answer GET" in dialog(talker.url)
        talker.answers["/metrics"] = Said(status=302, headers={"location": f"{other.url}/metrics"})
        assert "another server" in dialog(talker.url, key="a-key-that-nobody-may-see") and other.asked == []
        talker.answers["/metrics"] = Said(status=401)
        said = dialog(talker.url, key="a-key-that-nobody-may-see")
        assert "401" in said and "nobody" not in said
    if shutil.which("openssl"):
        context, pem = certificate(tmp_path)
        with Talker(dict(ANSWERS), tls=context) as secure:
            assert "is not trusted" in dialog(secure.url)
            assert dialog(secure.url, ca=str(pem)).kind == "vllm"
            assert dialog(secure.url, ca="", insecure=True).kind == "vllm"


def test_the_dialog_takes_ipv6_and_a_path_that_a_proxy_puts_in_front(dialog):
    with Talker({f"/llm{path}": said for path, said in ANSWERS.items()}) as proxy:
        assert "404" in dialog(proxy.url)
        assert dialog(f"{proxy.url}/llm/v1").metrics_url == f"{proxy.url}/llm/metrics"
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    with Talker(dict(ANSWERS), host="::1") as six:
        assert dialog(six.url).metrics_url == f"http://[::1]:{six.port}/metrics"
        assert "connection refused" in dialog("http://[::1]:1")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_a_key_must_fit_into_a_header():
    assert connect.checked("abc") == "abc" and connect.checked("") == ""
    for key in ("a\nb", "schlüssel"):
        with pytest.raises(SourceError):
            connect.checked(key)


def test_a_page_reads_no_files_of_its_machine_into_headers(monkeypatch):
    said = {"fleet_lines": "http://10.0.0.7:8000 key_file=/etc/shadow"}
    monkeypatch.setattr(fleet.st, "session_state", said)
    with pytest.raises(FleetError, match="key_file"):
        fleet.wanted()
    said |= {"fleet_lines": "http://a:1\nhttp://b:2 name=right", "fleet_key": " typed "}
    assert [endpoint.config.key.reveal() for endpoint in fleet.wanted()] == ["typed", "typed"]
    assert fleet.wanted()[1].config.name == "right"


def test_what_is_missing_comes_with_its_reason_and_its_flag():
    view = View(view="roofline", quality="none", why="vLLM exports no FLOPs", flag="--enable-mfu-metrics")
    assert capabilities.reason(view) == "vLLM exports no FLOPs. Start it with `--enable-mfu-metrics`."
    assert "`" not in capabilities.reason(view, code=False)
    row = capabilities.frame([view]).iloc[0]
    assert row["view"] == "Roofline" and "`--enable-mfu-metrics`" in row["why"] and row["quality"] == "○ none"


def test_the_fleets_message_is_made_once_a_second_for_all_tabs(found, monkeypatch):
    assert found.fleet_message("") == ""
    replicas = Replicas(2)
    made = []
    monkeypatch.setattr(service.fleet_view, "message", lambda *said: made.append(said) or message(*said))
    try:
        found.watch([TargetConfig(url=url) for url in replicas.urls])
        eventually(lambda: found.fleet.sums().states["live"] == 2, "both replicas")
        made.clear()
        said = [found.fleet_message(chosen) for chosen in ("", "", replicas.urls[0], "no such replica")]
        assert len(made) <= 4 and said[0] == said[1] and said[0].startswith('{"type":"fleet"')
        assert '"detail":null' in said[0] and '"vllm:num_requests_running"' in said[2] and '"detail":null' in said[3]
        found.unwatch()
        assert found.fleet_message("") == ""
    finally:
        replicas.close()
