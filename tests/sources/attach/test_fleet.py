"""Many servers at once, real HTTP: each a row, none in the way of another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from backend.sources.attach import fleet as following
from backend.sources.attach import scraper
from backend.sources.attach.endpoints import Endpoint, parse
from backend.sources.attach.fleet import Fleet
from backend.sources.attach.scraper import Scraper
from backend.sources.attach.target import TargetConfig
from tests.sources.attach.replicas import Replicas, small
from tests.waiting import eventually

FAST_S = 0.2


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    replicas = Replicas(8)
    yield replicas
    replicas.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(following, "SPREAD_S", FAST_S)
    monkeypatch.setattr(following, "GPUS_EVERY_S", 0.1)
    monkeypatch.setattr(scraper, "BACKOFF_S", (0.05, 0.2))
    for module in (following, scraper):
        monkeypatch.setattr(module, "STALE_INTERVALS", 7)  # on a busy machine the tests' own servers are late


def configs(replicas: Replicas) -> list[TargetConfig]:
    return [TargetConfig(url=url, name=f"r{i}", interval_s=FAST_S) for i, url in enumerate(replicas.urls)]


@pytest.fixture
def fleet(replicas) -> Iterator[Fleet]:
    fleet = Fleet(configs(replicas))
    yield fleet
    fleet.close()


def states(fleet: Fleet) -> list[str]:
    return [row.state for row in fleet.rows()]


def all_live(fleet: Fleet) -> None:
    eventually(lambda: set(states(fleet)) == {"live"}, "all replicas are live")


def test_every_server_is_a_row_and_requests_are_summed(replicas, fleet):
    all_live(fleet)
    rows = fleet.rows()
    assert [(row.name, row.kind, row.model) for row in rows] == [(f"r{i}", "vllm", "m") for i in range(8)]
    assert [row.value("running") for row in rows] == list(range(1, 9))
    sums = eventually(lambda: (told := fleet.sums()).states["live"] == 8 and told)
    assert sums.totals["running"].value == 36 and sums.totals["num_blocks"].value == 8 * 101
    assert sums.kv_usage.value == pytest.approx(3.5 / 8) and sums.imbalance["running"] == pytest.approx(8 / 4.5)
    eventually(lambda: (rate := fleet.sums().totals.get("output_tokens_per_s")) and rate.of == 8 and rate.value > 0)


def test_one_that_hangs_slows_no_other_and_is_asked_once_at_a_time(replicas, fleet):
    all_live(fleet)
    replicas.hang = {3}
    eventually(lambda: states(fleet)[3] == "stale", "the one that hangs is stale")
    before = dict(replicas.asked)
    eventually(lambda: all(replicas.asked[i] >= before[i] + 5 for i in range(8) if i != 3), "others go on")
    eventually(lambda: [i for i, state in enumerate(states(fleet)) if state != "live"] == [3])
    assert fleet.rows()[3].message and fleet.rows()[3].age_s > 0
    assert max(replicas.most_open.values()) == 1
    # an old number is no part of now
    eventually(lambda: (told := fleet.sums()).states["live"] == 7 and told.totals["running"].value == 36 - 4)


def test_a_dead_one_is_a_state_and_comes_back(replicas, fleet):
    all_live(fleet)
    replicas.dead = {0}
    eventually(lambda: states(fleet) == ["down"] + ["live"] * 7, "it alone is down")
    assert "127.0.0.1" in fleet.rows()[0].message
    replicas.dead = set()
    all_live(fleet)
    eventually(lambda: fleet.rows()[0].message == "")


def test_scrapes_are_spread_over_the_interval(replicas, monkeypatch):
    monkeypatch.setattr(following, "SPREAD_S", 1.0)
    delays = []
    monkeypatch.setattr(following._Replica, "start", lambda self, delay_s: delays.append(delay_s))
    fleet = Fleet(configs(replicas))
    try:
        assert eventually(lambda: len(delays) == 8) and delays == [i / 8 for i in range(8)]
    finally:
        monkeypatch.undo()
        fleet._replicas = ()
        fleet.close()


def test_a_mistake_of_our_own_is_named_and_costs_one_row(replicas, monkeypatch):
    real = Scraper.attempt

    async def attempt(self):
        if self.config.name == "r2":
            raise ZeroDivisionError("by zero")
        return await real(self)

    monkeypatch.setattr(Scraper, "attempt", attempt)
    fleet = Fleet(configs(replicas))
    try:
        eventually(lambda: states(fleet).count("live") == 7 and states(fleet)[2] == "down")
        assert "internal error: ZeroDivisionError" in fleet.rows()[2].message
    finally:
        fleet.close()


def test_ranks_behind_one_address_are_rows(replicas):
    def two(replica: int, asked: int) -> bytes:
        return small(replica, asked) + small(replica + 10, asked).replace(b'engine="0"', b'engine="1"')

    servers = Replicas(1, two)
    fleet = Fleet(configs(servers))
    try:
        rows = eventually(lambda: len(rows := fleet.rows()) == 2 and rows)
        assert [(row.rank, row.value("running")) for row in rows] == [("0", 1), ("1", 11)]
        assert fleet.sums().totals["running"].value == 12 and fleet.sums().replicas == 2
        assert fleet.config(rows[1].key).url == servers.urls[0] and fleet.config("http://other") is None
    finally:
        fleet.close()
        servers.close()


def test_a_name_is_asked_again_and_its_replicas_come_and_go(replicas, monkeypatch):
    answers: list[list[Endpoint] | OSError] = []

    async def resolve(endpoint: Endpoint) -> list[Endpoint]:
        found = answers[0] if len(answers) == 1 else answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(following.listed, "resolve", resolve)
    at = [Endpoint(config=config) for config in configs(replicas)]
    (name,) = parse(["dns+http://pods.serving:8000"])
    answers.append(OSError(-2, "Name or service not known"))
    fleet = Fleet([name, at[7]], resolve_every_s=0.05)
    try:
        rows = eventually(lambda: len(rows := fleet.rows()) == 2 and rows)
        assert (rows[1].state, rows[1].message) == ("down", "pods.serving has no address: Name or service not known")
        answers[:] = [at[:2]]
        eventually(lambda: len(fleet.rows()) == 3)
        all_live(fleet)
        first = fleet.rows()[0]
        answers[:] = [OSError(-2, "gone"), at[:1] + at[4:6]]
        eventually(lambda: [row.name for row in fleet.rows()] == ["r0", "r4", "r5", "r7"])
        all_live(fleet)
        asked = replicas.asked[1]
        assert first.key == fleet.rows()[0].key and replicas.asked[0] >= 1
        eventually(lambda: replicas.asked[0] > 3 + asked or replicas.asked[4] > 3)
        assert replicas.asked[1] <= asked + 1  # nobody asks the one that went
    finally:
        fleet.close()


def test_gpus_of_a_host_are_joined_to_all_that_run_there(replicas):
    def exporter(replica: int, asked: int) -> bytes:
        return b'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a",modelName="H200"} 612.5\n'

    gpus = Replicas(1, exporter)
    servers = [Endpoint(config=config) for config in configs(replicas)[:2]]
    fleet = Fleet([Endpoint(config=servers[0].config, dcgm=f"{gpus.urls[0]}/metrics"), servers[1]])
    try:
        rows = eventually(lambda: (rows := fleet.rows()) and all(row.gpus for row in rows) and rows)
        assert [row.gpus[0].power_w for row in rows] == [612.5, 612.5]
        gpus.dead = {0}
        rows = eventually(lambda: (rows := fleet.rows()) and not any(row.gpus for row in rows) and rows)
        assert rows[0].gpus_message.startswith("no GPU readings: ")
    finally:
        fleet.close()
        gpus.close()
    alone = Fleet(servers[:1])
    assert "no DCGM exporter is named" in alone.rows()[0].gpus_message
    alone.close()


def test_closing_ends_the_thread_and_all_connections(replicas, fleet):
    all_live(fleet)
    fleet.close()
    fleet.close()
    assert "kvscope-fleet" not in {thread.name for thread in threading.enumerate()}
    asked = dict(replicas.asked)
    asyncio.run(asyncio.sleep(0))
    assert fleet.rows() and dict(replicas.asked) == asked
