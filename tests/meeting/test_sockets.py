"""Sockets and their addresses: names of hosts, ports, both families of addresses, and calls that reach the caller."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from clocks import Clock
from meeting_ranks import gather

from qccl import ArgumentError
from qccl.base import deadline
from qccl.communicator import launch
from qccl.meeting import rendezvous, sockets
from qccl.meeting.messages import Member, parse_member
from qccl.meeting.strangers import NotARank

pytestmark = pytest.mark.usefixtures("one_meeting_for_all")

NOTES = [b"zero", b"one"]


def to_itself() -> socket.socket:
    """What connect() returns now and then where nobody listens: the system gave the caller the port that it calls."""
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    return itself


def test_a_socket_that_called_itself(monkeypatch):
    with to_itself() as itself:
        monkeypatch.setattr(socket, "create_connection", lambda place, timeout: itself)
        with pytest.raises(ConnectionRefusedError, match="called itself"):
            sockets.connect(itself.getsockname(), 5.0)
        assert itself.fileno() == -1


def test_the_addresses_of_a_name_share_the_time(monkeypatch):
    """Three answer nothing, and the next one does."""
    given: list[float] = []
    clock, create_connection = Clock(), socket.create_connection

    def call(place, timeout):
        given.append(timeout)
        if len(given) < 4:
            clock.ahead += timeout
            raise TimeoutError
        return create_connection(place, timeout)

    with socket.create_server(("127.0.0.1", 0)) as server:
        found = socket.getaddrinfo(*server.getsockname(), type=socket.SOCK_STREAM)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **more: found * 4)
        monkeypatch.setattr(socket, "create_connection", call)
        monkeypatch.setattr(deadline, "time", clock)
        sockets.connect(("a.name", 1), 40.0).close()
    assert len(given) == 4 and sum(given) < 40.001


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("host:80", ("host", 80)),
        ("[fd77::11]:29500", ("fd77::11", 29500)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        *((text, None) for text in ("host", "host:", ":80", "[]:80", "host:0", "host:65536", "host:\u0663", "", None)),
    ],
)
def test_addresses(text, found):
    assert sockets.host_and_port(text) == found
    assert found is None or sockets.place_text(found) == text


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ranks_meet_over_ipv6(port):
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(gather, NOTES[rank], rank, 2, ("::1", port), 60.0) for rank in range(2)]
        assert [each.result(60) for each in found] == [NOTES] * 2


def test_a_name_of_this_machine_for_its_loopback_interface(monkeypatch, port):
    """As in Debian's /etc/hosts: other machines find another address for it."""
    getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **kw: getaddrinfo("127.0.1.1" if host == "debian" else host, *more, **kw),
    )
    with sockets.listen("debian", port) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")
    with sockets.listen("debian", port, is_local=True) as server:
        assert server.getsockname()[:2] == ("127.0.1.1", port)
    for host in ("localhost", "127.0.0.1"):
        with sockets.listen(host, port) as server:
            assert server.getsockname()[0] == "127.0.0.1"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("is_local", [False, True])
def test_a_name_with_addresses_of_both_families(is_local, port, monkeypatch):
    """Other machines may have one of them only. Where all ranks are here, they try all addresses."""
    getaddrinfo = socket.getaddrinfo

    def both(host, *more, **kw):
        if host != "both":
            return getaddrinfo(host, *more, **kw)
        return [*getaddrinfo("::1", *more, **kw), *getaddrinfo("127.0.0.1", *more, **kw)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    monkeypatch.setattr(sockets, "is_loopback", lambda host: False)  # they stand for addresses of the network
    with sockets.listen("both", port, is_local=is_local):
        sockets.connect(("both", port), 5.0).close()
        if is_local:
            with pytest.raises(ConnectionRefusedError):
                sockets.connect(("127.0.0.1", port), 5.0)
        else:
            sockets.connect(("127.0.0.1", port), 5.0).close()
            sockets.connect(("::1", port), 5.0).close()


NO_NAMES = ["a..b", ".a", "a" * 64, "a" * 64 + ".b", "a\0b", "[[]]]", "[a", "a]b"]


@pytest.mark.parametrize("host", NO_NAMES)
def test_what_is_no_name_of_a_host(host, port):
    assert sockets.host_and_port(f"{host}:80") is None
    with pytest.raises(ArgumentError, match="MASTER_ADDR"):
        rendezvous.meeting_place({"MASTER_ADDR": host, "MASTER_PORT": "80"})
    with pytest.raises(ArgumentError, match="address="):
        launch._given(0, 2, f"{host}:80")
    with pytest.raises(ArgumentError, match="address="):
        launch.join(f"{host}:80", 1.0)
    with pytest.raises(NotARank):
        parse_member(msgspec.json.encode(Member.make("0" * 32, host, 1, "0" * 64, b"")))
    for call in (lambda: sockets.connect((host, port), 1.0), lambda: sockets.listen(host, port)):
        with pytest.raises(socket.gaierror):
            call()


@pytest.mark.parametrize("host", ["a", "a.b.", "a" * 63, "127.0.0.1", "fd77::11", "fe80::1%eth0", "node_1.x-y"])
def test_what_is_a_name_of_a_host(host):
    assert sockets.host_and_port(sockets.place_text((host, 80))) == (host, 80)
    assert parse_member(msgspec.json.encode(Member.make("0" * 32, host, 1, "0" * 64, b""))).host == host
