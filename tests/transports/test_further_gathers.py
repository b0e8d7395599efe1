"""Further gathers of ranks that have met: how many round trips they take, and ranks that leave or are silent."""

from __future__ import annotations

import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from meeting_ranks import reach

import qccl
from qccl import CollectiveTimeout, PeerLost
from qccl.cuda import libraries
from qccl.transports.meeting_messages import Kind
from qccl.transports.rendezvous import Rendezvous
from qccl.transports.secret import derive

pytestmark = pytest.mark.usefixtures("one_meeting_for_all")


class Turns:
    """A program between the ranks and rank 0 that counts how often the direction changes in which bytes go."""

    def __init__(self, port: int) -> None:
        self.to, self.over, self.directions = ("127.0.0.1", port), False, list[list[int]]()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.place = self.server.getsockname()
        self.threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Turns:
        self.threads[0].start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over = True
        for thread in self.threads:
            thread.join(10)
        self.server.close()

    def _accept(self) -> None:
        self.server.settimeout(0.02)
        while not self.over:
            with suppress(TimeoutError):
                caller = self.server.accept()[0]
                self.threads.append(threading.Thread(target=self._pass_on, args=(caller,)))
                self.threads[-1].start()

    def _pass_on(self, caller: socket.socket) -> None:
        turns: list[int] = []
        self.directions.append(turns)
        with caller, suppress(OSError), socket.create_connection(self.to, timeout=60) as called:
            while not self.over:
                for number, side, other in ((0, caller, called), (1, called, caller)):
                    if select.select([side], [], [], 0.005)[0]:
                        part = side.recv(1 << 16)
                        if not part:
                            return
                        if turns[-1:] != [number]:
                            turns.append(number)
                        other.sendall(part)

    def round_trips(self) -> list[float]:
        """Of each connection: one to connect, and half of one for each time that the direction changes."""
        return [1 + len(turns) / 2 for turns in self.directions]


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("key", [None, derive(bytes(32), "meeting")], ids=["plain", "TLS"])
def test_round_trips_of_a_meeting(size, key, port, patient_host):
    """Three for the first gather, whatever the number of ranks, and one for each further one."""
    gathers = 4
    notes = [[f"{number} of {rank}".encode() for rank in range(size)] for number in range(gathers)]

    def run(rank: int) -> list[list[bytes]]:
        place = ("127.0.0.1", port) if rank == 0 else relay.place
        with Rendezvous(rank, size, place, "the job", key=key) as meeting:
            found = [meeting.gather(each[rank], 60.0) for each in notes]
            if met.wait(60) == 0:
                counted.extend(relay.round_trips())
            met.wait(60)  # before the connections end, which over TLS takes messages, too
            return found

    met, counted = threading.Barrier(size), list[float]()
    with Turns(port) as relay, ThreadPoolExecutor(size) as pool:
        found = [pool.submit(run, 0)]
        reach(port).close()
        found += [pool.submit(run, rank) for rank in range(1, size)]
        assert [each.result(60) for each in found] == [notes] * size
    assert counted == [3 + (gathers - 1)] * (size - 1)


@pytest.mark.parametrize(
    "backend",
    [
        "host",
        pytest.param("auto", marks=pytest.mark.skipif(not libraries.missing(), reason="ranks agree on GPUs, too")),
    ],
)
def test_round_trips_of_the_meeting_of_init(backend, port, patient_host):
    """One for a second gather: what ranks offer is one note, and the addresses of their sockets another one."""

    def run(rank: int, to: int) -> None:
        qccl.init(backend, 60.0, rank=rank, size=2, address=f"127.0.0.1:{to}", transport="wan").close()

    with Turns(port) as relay, ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, 0, port)
        reach(port).close()
        run(1, relay.place[1])
        first.result(60)
    assert relay.round_trips() == [3 + 1]


def test_a_rank_that_leaves_between_two_gathers(port):
    """Nobody waits for the deadline."""

    def run(rank: int) -> None:
        with Rendezvous(rank, 3, ("127.0.0.1", port)) as meeting:
            meeting.gather(b"", 60.0)
            if rank != 2:
                meeting.gather(b"", 1000.0)

    with ThreadPoolExecutor(3) as pool:
        first, second, third = (pool.submit(run, rank) for rank in range(3))
        third.result(60)
        with pytest.raises(PeerLost, match="rank 2 has left the meeting"):
            first.result(60)
        with pytest.raises(PeerLost, match="or a rank that it waited for, has left the meeting"):
            second.result(60)


def test_a_rank_that_is_silent_in_a_further_gather(port, monkeypatch):
    """It has half a second, and the others have a minute."""
    over, receive = threading.Event(), Rendezvous._receive

    def receive_soon(meeting: Rendezvous, rank: int, kind: Kind, deadline: float) -> bytes:
        is_late = rank == 2 and kind is Kind.NOTE
        return receive(meeting, rank, kind, time.monotonic() + 0.5 if is_late else deadline)

    monkeypatch.setattr(Rendezvous, "_receive", receive_soon)

    def run(rank: int) -> None:
        with Rendezvous(rank, 3, ("127.0.0.1", port)) as meeting:
            meeting.gather(b"", 60.0)
            if rank != 2:
                meeting.gather(b"", 60.0)
            over.wait(120)

    with ThreadPoolExecutor(3) as pool:
        first, second, third = (pool.submit(run, rank) for rank in range(3))
        try:
            with pytest.raises(CollectiveTimeout, match="rank 2 did not come to the meeting again"):
                first.result(60)
            assert isinstance(second.exception(60), PeerLost)
        finally:
            over.set()
        third.result(60)
