"""Which processes have ended, by their listening sockets."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import patience
import pytest
from clocks import Clock
from tls_streams import SECRET

from qccl import _host
from qccl.meeting import callers, strangers
from qccl.meeting.messages import Member
from qccl.meeting.regroup import MembershipSocket
from qccl.meeting.sockets import is_abandoned
from qccl.meeting.watch import Watch

LISTENER = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


def ended_soon(watch, ranks):
    """ended(), once it finds any, or after a minute."""
    return patience.wait_until(lambda: watch.ended(ranks))


@pytest.mark.processes
def test_a_process_that_is_killed_and_not_reaped():
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True) as process:
        with socket.create_server(("127.0.0.1", 0)) as living:
            watch = Watch([living.getsockname(), ("127.0.0.1", int(process.stdout.readline()))])
            assert watch.ended([0, 1]) == []
            process.send_signal(signal.SIGKILL)
            assert ended_soon(watch, [0, 1]) == [1]
            assert watch.ended([0, 1]) == [1] and watch.ended([0]) == []
            os.kill(process.pid, 0)  # by its number it is still there
            watch.close()
            assert watch.ended([0, 1]) == []
        process.wait(10)


def test_a_process_that_ends_a_connection_lives():
    """It accepts those of ranks that look, and may end them; then another one is made."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        watch = Watch([server.getsockname()])
        for _ in range(3):
            assert watch.ended([0]) == []
            server.accept()[0].close()
            while not watch._connections:  # the answer to its call may come late
                assert watch.ended([0]) == []
            assert select.select(watch._connections.values(), [], [], 60)[0]  # the end has come
        assert len(watch._connections) == 1
        watch.close()


def free_place(host="127.0.0.1"):
    with socket.create_server((host, 0)) as server:
        return server.getsockname()


def test_a_process_of_this_machine_that_nobody_has_reached():
    watch = Watch([free_place()])
    assert ended_soon(watch, [0]) == [0]
    watch.close()


def looks(watch, seconds=0.3):
    """What a rank finds that looks often for a moment."""
    found = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found += watch.ended([0])
    watch.close()
    return found


def test_a_firewall_of_this_machine_refuses(monkeypatch):
    """The port of a process that listens is not free, so its refusal does not count."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = Watch([server.getsockname()])

        def check_connected(connection):
            raise ConnectionRefusedError

        monkeypatch.setattr("qccl.meeting.watch.check_connected", check_connected)
        assert looks(watch) == []


def test_a_firewall_of_another_machine_refuses(monkeypatch):
    """A refusal counts after its socket was reached once. A closed port here stands for such a machine."""
    monkeypatch.setattr("qccl.meeting.watch.is_abandoned", lambda *_: False)
    assert looks(Watch([free_place()])) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = Watch([server.getsockname()])
        while not watch._reached:
            assert watch.ended([0]) == []
    assert ended_soon(watch, [0]) == [0]
    watch.close()


def test_a_name_may_mean_another_machine():
    """Many machines have the name of this one, and "localhost" is one that all have."""
    host, port = free_place()
    assert host == "127.0.0.1" and looks(Watch([("localhost", port)], "localhost")) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_abandoned_places(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        place = server.getsockname()
        assert not is_abandoned(family, place)
        with socket.create_connection(place[:2]), server.accept()[0]:
            server.close()  # what it accepted goes on
            if host != "0.0.0.0":
                assert is_abandoned(family, place)


def test_the_port_of_another_machine_is_not_abandoned():
    assert not is_abandoned(socket.AF_INET, ("192.0.2.1", 9))


def test_names_of_other_machines_are_not_looked_up(monkeypatch):
    """A name server that does not answer would hold up the set-up, once per machine."""
    asked, lookup = [], socket.getaddrinfo

    def getaddrinfo(host, *arguments, **named):
        asked.append((host, named["flags"]))
        return lookup(host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    watch = Watch([("other.invalid", 9), ("localhost", 9)], "localhost")
    assert [host for host, flags in asked if flags != socket.AI_NUMERICHOST] == ["localhost"]
    assert watch.ended([0]) == []
    watch.close()


def test_machines_that_do_not_answer_cost_one_look_a_moment(monkeypatch):
    """A socket whose queue is full drops calls, as a firewall may. Nobody waits for each of them in turn."""
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        place = full.getsockname()
        for _ in range(4):  # the queue has room for one or two
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(place)
        time.sleep(0.05)
        clock = Clock()

        def poll():
            """It does not wait, and puts the clock forward."""

            def wait(milliseconds):
                clock.ahead += milliseconds / 1000
                return real.poll(0)

            real = select.poll()
            return SimpleNamespace(register=real.register, unregister=real.unregister, poll=wait)

        found = SimpleNamespace(poll=poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
        monkeypatch.setattr("qccl.base.deadline.time", clock)
        monkeypatch.setattr("qccl.meeting.watch.select", found)
        watch = Watch([place] * 63)
        for look in range(1, 4):
            assert watch.ended(range(63)) == []
            assert len(watch._calls) == 63, "the calls go on"
            assert clock.ahead <= look * 0.05, "what a look waits does not grow with the number of ranks"
        watch.close()
        assert watch._calls == {}


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_watch_says_what_it_is(secret, monkeypatch, caplog):
    """The rank that it looked at drops it without a warning, however late it hears of it, and without a handshake."""
    made = []
    monkeypatch.setattr(_host, "TlsStream", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(strangers, "_reported", set())
    monkeypatch.setattr(callers, "HELLO_SECONDS", 0.05)
    with closing(MembershipSocket("127.0.0.1", secret=secret)) as rank:
        watch = Watch([(rank._host, rank._port)], greeting=rank.greeting)
        for _ in range(3):
            while not watch._connections:
                assert watch.ended([0]) == []
            for _ in range(3):
                assert rank.waiting() == 0
                time.sleep(0.06)
            assert not rank._callers._unknown and not rank._callers._known
            assert watch.ended([0]) == [], "it is called again"
        watch.close()
    assert not made and not caplog.records


def test_a_look_at_other_addresses_keeps_no_connection(monkeypatch, caplog):
    """A name of another machine is left to the caller. The socket that was looked at drops it without a warning."""
    monkeypatch.setattr(strangers, "_reported", set())
    with closing(MembershipSocket("127.0.0.1")) as rank:
        places = [(rank._host, rank._port), free_place(), ("localhost", rank._port)]
        watch = Watch(places, "here")
        assert watch.reach() == {0} and not watch._connections and watch.unseen == [2]
        assert Watch(places, rank._host).reach() == set()
        rank.begin([rank.member(b""), Member.make("0" * 32, "localhost", rank._port, "0" * 64, b"")])
        rank.look_at_names(Watch([(member.host, member.port) for member in rank.members], "127.0.0.1"))
        assert rank._reached == {"0" * 32}
        for _ in range(3):
            rank.hear()
        assert not rank._callers._unknown and not rank._callers._known and not caplog.records
        watch.close()
