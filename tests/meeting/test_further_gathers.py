"""Further gathers of ranks that have met: how many round trips they take, and ranks that leave or are silent."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from meeting_ranks import reach
from taps import Tap

import qccl
from qccl import CollectiveTimeout, PeerLost
from qccl.base.deadline import Deadline
from qccl.engine.cuda import libraries
from qccl.meeting import rendezvous
from qccl.meeting.meeting_messages import MeetingKind, MeetingMessage
from qccl.meeting.rendezvous import Rendezvous
from qccl.meeting.secret import derive

pytestmark = pytest.mark.usefixtures("one_meeting_for_all")


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
    with Tap(("127.0.0.1", port)) as relay, ThreadPoolExecutor(size) as pool:
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

    with Tap(("127.0.0.1", port)) as relay, ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, 0, port)
        reach(port).close()
        run(1, relay.place[1])
        first.result(60)
    assert relay.round_trips() == [3 + 1]


def gather_twice(rank: int, size: int, port: int, seconds: float = 60.0, over: threading.Event | None = None) -> None:
    """Rank 2 gathers once; with ``over`` it stays, and is silent."""
    with Rendezvous(rank, size, ("127.0.0.1", port)) as meeting:
        meeting.gather(b"", 60.0)
        if rank != 2:
            meeting.gather(b"", seconds)
        elif over is not None:
            over.wait(120)


def test_a_rank_that_leaves_between_two_gathers(port):
    """Nobody waits for the deadline."""
    with ThreadPoolExecutor(3) as pool:
        first, second, third = (pool.submit(gather_twice, rank, 3, port, 1000.0) for rank in range(3))
        third.result(60)
        with pytest.raises(PeerLost, match="rank 2 has left the meeting"):
            first.result(60)
        with pytest.raises(PeerLost, match="or a rank that it waited for, has left the meeting"):
            second.result(60)


def test_a_time_that_is_over_is_no_loss_of_a_rank(port, monkeypatch):
    """It ends between the last note and the answer, which is longer than what the system takes at once."""
    over, receive = threading.Event(), Rendezvous._receive

    def receive_last(meeting: Rendezvous, rank: int, kind: MeetingKind, deadline: Deadline) -> bytes:
        if kind is MeetingKind.NOTES:
            assert over.wait(60)
        found = receive(meeting, rank, kind, deadline)
        deadline.end = 0.0
        return found

    monkeypatch.setattr(Rendezvous, "_receive", receive_last)
    monkeypatch.setattr(rendezvous, "join", lambda notes: MeetingMessage(MeetingKind.NOTES, bytes(64 << 20)))
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(gather_twice, rank, 2, port) for rank in range(2))
        with pytest.raises(CollectiveTimeout, match="rank 1 did not take the notes of the others"):
            first.result(60)
        over.set()
        with pytest.raises(PeerLost, match="rank 0, or a rank that it waited for, has left"):
            second.result(60)


def test_a_rank_that_is_silent_in_a_further_gather(port, monkeypatch):
    """It has half a second, and the others have a minute."""
    over, receive = threading.Event(), Rendezvous._receive

    def receive_soon(meeting: Rendezvous, rank: int, kind: MeetingKind, deadline: Deadline) -> bytes:
        is_late = rank == 2 and kind is MeetingKind.NOTE
        return receive(meeting, rank, kind, Deadline(0.5) if is_late else deadline)

    monkeypatch.setattr(Rendezvous, "_receive", receive_soon)
    with ThreadPoolExecutor(3) as pool:
        first, second, third = (pool.submit(gather_twice, rank, 3, port, over=over) for rank in range(3))
        try:
            with pytest.raises(CollectiveTimeout, match="rank 2 did not come to the meeting again"):
                first.result(60)
            assert isinstance(second.exception(60), PeerLost)
        finally:
            over.set()
        third.result(60)
