"""The endpoint of QCCL_METRICS: what it says, read strictly, and how it meets hostile requests."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
import urllib.request

import numpy as np
import pytest
from changing_sets import changed_while_read

import qccl
from qccl import metrics
from qccl.engine.tallies import Tallies
from qccl.errors import ArgumentError
from qccl.statistics import Statistics
from qccl.transports.sockets import place_text

SECONDS = 60.0
VALUE = re.compile(r"[0-9]+|[0-9]+\.[0-9]+(e[+-][0-9]+)?|[0-9]+e[+-][0-9]+")
LABELS = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\[\\n"])*)"(?:,|$)')


def parsed(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """By metric and labels; fails on what the text format 0.0.4 does not allow."""
    assert text.endswith("\n") and "\r" not in text
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, _, meaning = line[7:].partition(" ")
            assert name not in helped and meaning and "\\" not in meaning
            helped.add(name)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            assert name in helped and name not in kinds and kind in ("counter", "gauge")
            kinds[name], found[name] = kind, {}
        else:
            match = re.fullmatch(r"([a-z_]+)\{(.*)\} (\S+)", line)
            assert match and VALUE.fullmatch(match[3]), line
            name, labels = match[1], LABELS.findall(match[2])
            assert ",".join(f'{label}="{value}"' for label, value in labels) == match[2]
            assert name == list(kinds)[-1]  # the lines of a metric are together
            assert kinds[name] == "gauge" or name.endswith("_total")
            assert frozenset(labels) not in found[name]
            found[name][frozenset(labels)] = float(match[3])
    return found


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def ask(port: int, request: bytes) -> bytes:
    """The answer to any bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        connection.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
        return answer


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

    for rank, (stats, text) in enumerate(qccl.run_ranks(2, run)):
        found = parsed(text)
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
        both = parsed(get(ports))["qccl_group_size"]
        sub.close()
        one = parsed(get(ports))["qccl_group_size"]
        return len(both), len(one)

    assert qccl.run_ranks(1, run) == [(2, 1)]
    with qccl.init("host", rank=0, size=1, address="127.0.0.1:1") as first:
        second = qccl.Communicator._from_transport(qccl.transports.loopback.LoopbackGroup(1).transport(0))
        second._session.serve_metrics(3, is_thread=False)  # whatever its rank on the machine
        assert len(parsed(get(ports))["qccl_group_size"]) == 2
        second.close()
        assert len(parsed(get(ports))["qccl_group_size"]) == 1
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


def test_dropped_communicators_close_the_port(monkeypatch):
    monkeypatch.setattr(metrics, "_LOOK_SECONDS", 0.05)
    statistics = Statistics(0, 1, "g", Tallies(are_timed=False))
    made = metrics.Endpoint(("127.0.0.1", 0))
    made.add(statistics)
    del statistics
    made._thread.join(SECONDS)
    assert not made._thread.is_alive() and not made.is_open and is_refused(made.port)


def test_a_child_of_a_fork_leaves_the_port_to_the_parent(endpoint):
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os._exit(1 if endpoint.is_open or endpoint._listener.fileno() != -1 else 0)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    parsed(get(endpoint.port))


def test_groups_may_be_made_while_others_are_shown(endpoint):
    others = []

    def another():
        others.append(Statistics(1, 2, f"group {len(others)}", Tallies(are_timed=False)))
        endpoint.add(others[-1])

    with changed_while_read(another):
        lines = list(endpoint.lines())
    assert any("of one" in line for line in lines)
    for each in others:
        endpoint.remove(each)
    parsed(get(endpoint.port))


def test_texts_are_escaped(endpoint):
    (labels,) = parsed(get(endpoint.port))["qccl_group_size"]
    assert dict(labels)["group"] == r"a \"group\"\\ \n of one"


# -- hostile requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"GET http://elsewhere/metrics HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\xff\xfe\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 20_000, b"400"),
        (b"A: b\r\n" * 5_000, b"400"),
    ],
)
def test_requests(endpoint, request_, status):
    answer = ask(endpoint.port, request_)
    assert answer.split(b" ")[:2] == [b"HTTP/1.1", status] or (status == b"400" and answer == b"")  # reset by the rest
    assert (b"qccl_group_size" in answer) == (status == b"200")
    parsed(get(endpoint.port))


@pytest.mark.parametrize("drip", [b"", b"G"])
def test_a_slow_request_holds_up_others_for_its_deadline_only(endpoint, monkeypatch, drip):
    monkeypatch.setattr(metrics, "_REQUEST_SECONDS", 1.0)  # also of the other request
    ended = threading.Event()

    def drips(connection):
        with contextlib.suppress(OSError):
            while not ended.wait(0.05):
                connection.sendall(drip)

    with socket.create_connection(("127.0.0.1", endpoint.port)) as slow:
        thread = threading.Thread(target=drips, args=(slow,), daemon=True)
        thread.start()
        time.sleep(0.1)
        parsed(get(endpoint.port))
        ended.set()
        thread.join(SECONDS)


def test_a_client_that_does_not_read_is_left(endpoint, monkeypatch):
    monkeypatch.setattr(metrics, "_REQUEST_SECONDS", 1.0)  # also of the other request
    monkeypatch.setattr(metrics.Endpoint, "lines", lambda self: iter(["# " + "x" * (64 << 20)]))
    with socket.create_connection(("127.0.0.1", endpoint.port)) as silent:
        silent.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        time.sleep(0.1)
        monkeypatch.setattr(metrics.Endpoint, "lines", lambda self: iter(["# short"]))
        assert get(endpoint.port) == "# short\n"


def test_the_address_of_the_machine_itself_is_not_open(ports):
    """Where QCCL_METRICS is a port alone, only this machine's programs may connect."""
    found = qccl.run_ranks(1, lambda comm: comm._session._endpoint._listener.getsockname())
    assert found == [("127.0.0.1", ports)] and place_text(found[0])
