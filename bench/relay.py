"""How much a relay forwards: ``python bench/relay.py`` (takes half a minute).

One process sends and another one receives, over loopback, by a relay and directly, as fast as they can or at 1 Gbit/s,
by 1 and by 8 connections. The table has the median of ``--rounds`` runs; ``--write PAGE`` replaces the table
of a page.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click
from runs import document_table, machine, print_table, rewrite_table

from qccl.relay.jobs import Job
from qccl.relay.server import Limits, Relay
from qccl.transports.relay_protocol import GREETING_NBYTES, Hello, Role
from qccl.transports.sockets import Place, listen
from qccl.transports.timed import receive, send

KEY = os.urandom(32)
#: written at once, as wan does with four records of TLS
_PART = bytes(64 << 10)
_SECONDS = 60.0


class Run(NamedTuple):
    """What came: Mbit/s in all connections together, and the relay's share of a processor."""

    mbit: float
    share: float


def serve(listener: socket.socket) -> None:
    """The relay's process."""
    Relay(listener, [Job(KEY)], Limits()).serve()


def send_for(connections: Sequence[socket.socket], seconds: float, mbit: float | None) -> None:
    """Send on all connections in turn, at most so many Mbit/s, and close them."""
    begin, sent = time.monotonic(), 0
    while (now := time.monotonic()) < begin + seconds:
        if mbit and 8e-6 * sent > (now - begin) * mbit:
            time.sleep(2e-4)
            continue
        for each in connections:
            each.sendall(_PART)
            sent += len(_PART)
    for each in connections:
        each.close()


def receive_all(connections: Sequence[socket.socket]) -> float:
    """Mbit/s until all connections have ended."""
    room, total, begin = bytearray(1 << 20), 0, time.monotonic()
    with selectors.DefaultSelector() as selector:
        for each in connections:
            selector.register(each, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(_SECONDS):
                got = key.fileobj.recv_into(room)  # type: ignore[union-attr]
                total += got
                if not got:
                    selector.unregister(key.fileobj)
    return 8e-6 * total / (time.monotonic() - begin)


def cpu_seconds(process: int) -> float:
    """What a process has used of a processor."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(count: int, seconds: float, mbit: float | None, *, by_relay: bool) -> Run:
    """One run with so many connections."""
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1"))
        place = listener.getsockname()
        context = multiprocessing.get_context("fork")
        relay = context.Process(target=serve, args=(listener,)) if by_relay else None
        if relay is not None:
            relay.start()
            stack.callback(relay.join)
            stack.callback(relay.terminate)
        ends = [_joined(place) if by_relay else _direct(place, listener) for _ in range(count)]
        sender = context.Process(target=send_for, args=([one for one, _ in ends], seconds, mbit))
        before = cpu_seconds(relay.pid) if relay and relay.pid else 0.0
        sender.start()
        for one, _ in ends:
            one.close()
        rate = receive_all([other for _, other in ends])
        used = cpu_seconds(relay.pid) - before if relay and relay.pid else 0.0
        sender.join()
        for _, other in ends:
            other.close()
        return Run(rate, used / seconds)


def _joined(place: Place) -> tuple[socket.socket, socket.socket]:
    """The sender's and the receiver's connection, by the relay."""
    deadline, name = time.monotonic() + _SECONDS, os.urandom(32)
    found = []
    for role in (Role.LISTENER, Role.CALLER):
        connection = socket.create_connection(place, _SECONDS)
        greeting = receive(connection, GREETING_NBYTES, deadline)
        send(connection, Hello.make(role, name, KEY, greeting).packed(), deadline)
        found.append(connection)
    for connection in found:
        assert receive(connection, 1, deadline) == b"J"
        connection.settimeout(_SECONDS)
    return found[1], found[0]


def _direct(place: Place, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """The same without a relay."""
    one = socket.create_connection(place, _SECONDS)
    return one, listener.accept()[0]


@click.command()
@click.option("--seconds", default=2.0, show_default=True, help="Of one run.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--write", metavar="PAGE", help="Replace the table of this page.")
def main(seconds: float, rounds: int, write: str | None) -> None:
    """Measure how much a relay forwards, and what of a processor it uses."""
    head = ["sent", "connections", "directly, Mbit/s", "by the relay, Mbit/s", "of one processor, by the relay"]
    rows = []
    for mbit in (1000.0, None):
        for count in (1, 8):
            runs = [[measure(count, seconds, mbit, by_relay=each) for each in (False, True)] for _ in range(rounds)]
            direct, relayed = (statistics.median(run[i].mbit for run in runs) for i in (0, 1))
            share = statistics.median(run[1].share for run in runs)
            sent = "1 Gbit/s" if mbit else "as fast as possible"
            rows.append([sent, count, f"{direct:.0f}", f"{relayed:.0f}", f"{100 * share:.0f}%"])
    print_table(head, rows)
    if write:
        rewrite_table(write, "python bench/relay.py", document_table(head, rows, machine()))


if __name__ == "__main__":
    main()
