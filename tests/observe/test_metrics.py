"""The endpoint of QCCL_METRICS: what it says by prometheus_client's own reader, and when it is open."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import struct
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from changing_sets import changed_while_read
from prometheus_client.parser import text_string_to_metric_families

import qccl
from qccl.base.errors import ArgumentError
from qccl.meeting.sockets import place_text
from qccl.observe import metrics
from qccl.observe.statistics import Statistics
from qccl.observe.tallies import Tallies

pytestmark = pytest.mark.usefixtures("threads_end")

SECONDS = 60.0
DASHBOARD = Path(__file__).parents[2] / "docs" / "howto" / "dashboard.json"


def get(port: int) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """What an endpoint says, by metric and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {family.name + ("_total" if family.type == "counter" else ""): family for family in families}
    assert len(found) == len(families) and all(family.documentation for family in families)
    return {
        name: {frozenset(sample.labels.items()): sample.value for sample in family.samples}
        for name, family in found.items()
    }


def is_refused(port: int) -> bool:
    with socket.socket() as free:
        return free.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def ports(port, monkeypatch) -> int:
    """QCCL_METRICS is set to it."""
    monkeypatch.setenv(metrics.VARIABLE, str(port))
    return port


@pytest.fixture
def endpoint():
    statistics = Statistics(0, 1, 'a "group"\\ \n of one', Tallies(are_timed=False))
    made = metrics.Endpoint(("127.0.0.1", 0))
    made.add(statistics)
    yield made
    made.remove(statistics)
    assert is_refused(made.port)


def test_the_totals_of_each_rank_at_its_port(ports):
    def run(comm):
        for _ in range(3):
            comm.quantized_allreduce(np.ones(1000, np.float32), codec="minmax8:bucket=64")
        comm.quantized_broadcast(np.ones(10, np.float32), root=0, codec="none")
        stats = comm.stats(reset=True)  # which does not reset the counters
        return stats, get(ports + comm.rank)

    for rank, (stats, found) in enumerate(qccl.run_ranks(2, run)):
        group = {("group", stats.group), ("rank", str(rank))}
        assert found["qccl_group_size"] == {frozenset(group): 2}
        for name, field, _ in metrics.COUNTERS:
            expected = {
                frozenset({*group, ("collective", each.collective), ("codec", each.codec)}): getattr(each, field)
                for each in stats.calls
            }
            assert found[name] == expected
        assert found.keys() == {"qccl_group_size", *(name for name, _, _ in metrics.COUNTERS)}
        assert is_refused(ports + rank)  # the communicators are closed


def test_groups_of_one_process_share_a_port(ports):
    def run(comm):
        sub = comm.split(0)
        both = get(ports)["qccl_group_size"]
        sub.close()
        one = get(ports)["qccl_group_size"]
        return len(both), len(one)

    assert qccl.run_ranks(1, run) == [(2, 1)]
    with qccl.init("host", rank=0, size=1, address="127.0.0.1:1") as first:
        second = qccl.Communicator._from_transport(qccl.transports.loopback.LoopbackGroup(1).transport(0))
        second._session.serve_metrics(3, is_thread=False)  # whatever its rank on the machine
        assert len(get(ports)["qccl_group_size"]) == 2
        second.close()
        assert len(get(ports)["qccl_group_size"]) == 1
        assert first.rank == 0
    assert is_refused(ports)


def test_without_the_variable_there_is_none(monkeypatch):
    monkeypatch.delenv(metrics.VARIABLE, raising=False)
    assert qccl.run_ranks(1, lambda comm: comm._session._endpoint) == [None]


@pytest.mark.parametrize("setting", ["0", "65536", "-1", "http", "host:", ":9400x", "1.5", " 94", "9\u0664"])
def test_a_wrong_setting(setting, monkeypatch):
    monkeypatch.setenv(metrics.VARIABLE, setting)
    with pytest.raises(ArgumentError, match=r"QCCL_METRICS is .*1 to 65535"):
        qccl.run_ranks(1, lambda comm: None)


def test_a_host_may_be_given(port, monkeypatch):
    monkeypatch.setenv(metrics.VARIABLE, f"localhost:{port}")
    assert "qccl_group_size" in qccl.run_ranks(1, lambda comm: get(port))[0]


@pytest.mark.parametrize("setting", ["127.0.0.1:{port}", "host.invalid:{port}", "65535"])
def test_a_port_that_cannot_be_opened_is_logged(setting, port, monkeypatch, caplog):
    """It is used, the host is not this machine, or there are no further ports: the calls go on."""
    monkeypatch.setenv(metrics.VARIABLE, setting.format(port=port))
    with socket.create_server(("127.0.0.1", port)), caplog.at_level(logging.WARNING):
        found = qccl.run_ranks(2, lambda comm: comm.quantized_allreduce(np.ones(4, np.float32), codec="none")[0])
    assert found == [2.0, 2.0]
    assert any("no metrics at" in record.getMessage() for record in caplog.records)


def test_dropped_communicators_are_shown_no_longer(endpoint):
    dropped = Statistics(0, 1, "g", Tallies(are_timed=False))
    endpoint.add(dropped)
    assert len(get(endpoint.port)["qccl_group_size"]) == 2
    del dropped
    assert len(get(endpoint.port)["qccl_group_size"]) == 1


def test_a_child_of_a_fork_leaves_the_port_to_the_parent(endpoint):
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            group = next(iter(endpoint._groups))
            endpoint.remove(group)  # as close() does
            os._exit(1 if endpoint in metrics._endpoints or endpoint._server.fileno() != -1 else 0)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    get(endpoint.port)


def test_groups_may_be_made_while_others_are_shown(endpoint):
    others = []

    def another():
        others.append(Statistics(1, 2, f"group {len(others)}", Tallies(are_timed=False)))
        endpoint.add(others[-1])

    with changed_while_read(another):
        sizes, *_ = endpoint.collect()
    assert any("of one" in sample.labels["group"] for sample in sizes.samples)
    for each in others:
        endpoint.remove(each)
    get(endpoint.port)


def test_texts_are_escaped(endpoint):
    (labels,) = get(endpoint.port)["qccl_group_size"]
    assert dict(labels)["group"] == 'a "group"\\ \n of one'


def test_the_address_of_the_machine_itself_is_not_open(ports):
    """Where QCCL_METRICS is a port alone, only this machine's programs may connect."""
    found = qccl.run_ranks(1, lambda comm: comm._session._endpoint._server.socket.getsockname())
    assert found == [("127.0.0.1", ports)] and place_text(found[0])


def test_it_needs_prometheus_client(ports, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ArgumentError, match=r'QCCL_METRICS needs prometheus_client.*pip install "qccl\[metrics\]"'):
        qccl.run_ranks(1, lambda comm: None)


def test_silent_and_broken_callers_are_left(monkeypatch, capfd):
    group = Statistics(0, 1, "g", Tallies(are_timed=False))
    for seconds in (SECONDS, 0.2):
        monkeypatch.setattr(metrics, "_SILENT_SECONDS", seconds)
        made = metrics.Endpoint(("127.0.0.1", 0))
        made.add(group)
        with socket.create_connection(("127.0.0.1", made.port), timeout=SECONDS) as broken:
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets it
            broken.sendall(b"GET /metr")
        with socket.create_connection(("127.0.0.1", made.port), timeout=SECONDS) as silent:
            silent.sendall(b"GET /metr")
            if seconds == SECONDS:
                assert "qccl_group_size" in get(made.port)  # others have their answers meanwhile
            else:
                assert silent.recv(1) == b""
        made.remove(group)
    assert capfd.readouterr().err == ""


def test_the_dashboard_asks_for_what_there_is():
    names = {metrics.GROUP_SIZE, *(name for name, _, _ in metrics.COUNTERS)}
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    page = DASHBOARD.with_name("watching.md").read_text(encoding="utf-8")
    for text in (*asked, page):
        assert set(re.findall(r"qccl_\w+", text)) and set(re.findall(r"\bqccl_\w+", text)) <= names, text
    assert all(f"`{expression}`" in page for expression in asked)
