"""Groups over wan whose ranks share memory inside a machine: which messages go which way, and that all agree on it."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import patience
import pytest
from rank_calls import all_calls
from start_ranks import needs_ucx
from wan_groups import group

import qccl
from qccl.errors import EngineError, MismatchError
from qccl.trace import TraceEvent
from qccl.transports import neighbours, ucx
from qccl.transports.invitation import Invitation
from qccl.transports.neighbours import Neighbours, joint
from qccl.transports.wan import WanTransport

pytestmark = needs_ucx

SECRET = bytes(range(32))


def once(function):
    """Work of a group that each rank does once; then the ranks only call with each other until the test has all."""
    results: dict[int, object] = {}
    lock, done = threading.Lock(), threading.Event()

    def work(comm: qccl.Communicator, chosen: random.Random) -> int:
        if comm.rank not in results:
            found = function(comm)
            with lock:
                results[comm.rank] = found
                if len(results) == comm.size:
                    done.set()
        return 1

    def of(size: int, ranks_each: int, secret: bytes | None = SECRET) -> list:
        with group(size, secret, ranks_each=ranks_each, work=work) as running:
            limit = patience.Limit(60)
            while not done.wait(0.05) and limit.left():
                if failed := [each for each in running.ends if each.done()]:
                    failed[0].result()
        return [results[rank] for rank in range(size)]

    return of


def carriers(comm: qccl.Communicator) -> tuple[str, ...]:
    x = np.full(100_000, comm.rank + 1, np.float32)
    assert (comm.quantized_allreduce(x, codec="none") == comm.size * (comm.size + 1) / 2).all()
    return comm.transport.carriers


@pytest.mark.parametrize(
    ("size", "ranks_each", "expected"),
    [
        (4, 2, ["wan ucx wan wan", "ucx wan wan wan", "wan wan wan ucx", "wan wan ucx wan"]),
        (3, 2, ["wan ucx wan", "ucx wan wan", "wan wan wan"]),
        (2, 2, ["wan ucx", "ucx wan"]),
        (2, 1, ["wan wan", "wan wan"]),
    ],
)
@pytest.mark.parametrize("secret", [SECRET, None])
def test_ranks_of_a_machine_share_memory(size, ranks_each, expected, secret):
    found = once(carriers)(size, ranks_each, secret)
    assert [" ".join(each) for each in found] == expected


def test_the_communicator_says_which_ranks_share_memory():
    assert once(repr)(4, 2)[2] == "<Communicator rank 2 of 4, wan; ucx with 3>"


def test_all_calls_have_the_bits_of_threads():
    def work(comm: qccl.Communicator) -> list[bytes]:
        x = np.random.default_rng(comm.rank).standard_normal(50_000, np.float32)
        found = all_calls(comm)
        for layout in ("sharded", "leader"):
            nodes = [rank // 2 for rank in range(comm.size)]
            out = comm.hierarchical_allreduce(x.copy(), codec="minmax8", layout=layout, node_ids=nodes)
            found.append(out.tobytes())
        return found

    assert once(work)(4, 2) == qccl.run_ranks(4, work)


def test_a_group_has_the_nodes_of_its_machines():
    assert once(lambda comm: comm.nodes)(4, 2) == [(0, 0, 1, 1)] * 4


def test_a_setting_keeps_all_on_wan(monkeypatch):
    monkeypatch.setenv("QCCL_WAN_SHARED_MEMORY", "0")
    assert once(carriers)(2, 2) == [("wan", "wan")] * 2


def test_a_setting_that_is_none(monkeypatch):
    monkeypatch.setenv("QCCL_WAN_SHARED_MEMORY", "no")
    with pytest.raises(qccl.ArgumentError, match="QCCL_WAN_SHARED_MEMORY='no' is neither 0 nor 1"):
        WanTransport(lambda note: [note], 10.0, is_local=True)


def test_without_ucx_all_stay_on_wan(monkeypatch):
    def fails(membership: object) -> None:
        raise EngineError("there is no UCX")

    monkeypatch.setattr(neighbours, "memory_wire", fails)
    assert once(carriers)(2, 2) == [("wan", "wan")] * 2


def test_ucx_starts_only_where_another_rank_may_be_on_the_machine(monkeypatch):
    """A process that joins may be."""
    started = []
    start = neighbours.memory_wire
    monkeypatch.setattr(neighbours, "memory_wire", lambda membership: started.append(membership) or start(membership))
    first = WanTransport(lambda note: [note], 10.0, is_local=True, is_alone=True)
    second, _ = first.regroup(0, 10.0, grows=False)
    assert not started
    third, _ = second.regroup(0, 10.0, grows=True)
    assert len(started) == 1
    third.close()


@pytest.mark.parametrize("blind", [0, 1])
def test_one_rank_that_cannot_read_the_other_ones_file(blind, monkeypatch):
    """Both use wan, although the other one could read."""
    content, thread = Invitation.content, threading.local()
    begin = Neighbours.__init__

    def marked(self, rank, addresses):
        thread.is_blind = rank == blind
        begin(self, rank, addresses)

    monkeypatch.setattr(Neighbours, "__init__", marked)
    monkeypatch.setattr(Invitation, "content", lambda self: b"" if thread.is_blind else content(self))
    found = once(carriers)(3, 3)
    for rank, each in enumerate(found):
        assert each == tuple("wan" if blind in (rank, other) or rank == other else "ucx" for other in range(3))


def test_ranks_that_ucx_does_not_reach(monkeypatch, caplog):
    """Its workers have no transport between processes."""
    monkeypatch.setattr(ucx, "_IN_MEMORY", "self")
    assert once(carriers)(2, 2) == [("wan", "wan")] * 2
    assert "UCX does not reach rank" in caplog.text


@pytest.mark.parametrize("told", [[b"01", b"1"], [b"01", b"1x"], [b"", b"10"]])
def test_a_rank_that_tells_nonsense(told):
    with pytest.raises(MismatchError, match=r"rank \d does not say with which ranks it shares memory"):
        joint(0, told)


def test_two_ranks_share_memory_if_both_say_so():
    assert joint(0, [b"0111", b"1000", b"0000", b"1000"]) == {1, 3}
    assert joint(2, [b"0111", b"1000", b"0000", b"1000"]) == set()


@pytest.mark.parametrize(("size", "ranks_each"), [(3, 2), (2, 1)])
def test_sends_ahead_to_other_machines_only(size, ranks_each):
    """All chunks of the first round leave rank 0 for another machine while the ranks there have not called.

    Their headers take long from another site. UCX keeps all that comes early, so a rank of the same machine gets one
    window before it has called.
    """
    traces: list[list[TraceEvent]] = [[] for _ in range(size)]
    began, called = [0.0] * size, threading.Event()

    def work(comm: qccl.Communicator) -> None:
        x = np.full(3 << 18, comm.rank + 1, np.float32)
        comm.barrier()
        if comm.rank:  # rank 0's sends need none of its Python code any more
            assert called.wait(60)
            time.sleep(0.5 * patience.factor())
        began[comm.rank] = time.perf_counter()
        trace = traces[comm.rank]
        call = comm.quantized_allreduce(x, chunk=1 << 13, algorithm="two_round", trace=trace, async_op=True)
        if not comm.rank:
            called.set()
        call.wait()
        assert (x == size * (size + 1) / 2).all()

    once(work)(size, ranks_each)
    for peer in range(1, size):
        sends = [e for e in traces[0] if e.queue == "send" and e.args["round"] == 0 and e.args["peer"] == peer]
        early = [event for event in sends if event.start < min(began[1:])]
        assert len(early) == len(sends) if peer >= ranks_each else 0 < len(early) < len(sends), (peer, len(sends))


def connections(ports: list[int]) -> int:
    """The ends of TCP connections to these ports of this machine."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(each[3] == "01" and int(each[1].rpartition(":")[2], 16) in ports for each in fields)


@pytest.mark.parametrize("ranks_each", [2, 1])
def test_ranks_that_share_memory_keep_no_connection(ranks_each):
    """They have some for the set-up, which end when all that was sent has come."""
    with group(2, SECRET, ranks_each=ranks_each) as running:
        patience.wait_until(lambda: ranks_each == 1 or not connections(running.ports))
        assert bool(connections(running.ports)) == (ranks_each == 1)


def held() -> tuple[int, int]:
    """This process's descriptors, and its mappings of shared memory."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("/dev/shm" in each or "/SYSV" in each for each in mappings)


def test_descriptors_and_memory_end_with_the_group():
    once(carriers)(4, 2)  # UCX is loaded
    gc.collect()
    descriptors, mappings = held()
    for _ in range(3):
        once(carriers)(4, 2)
    gc.collect()
    now = held()
    assert now[0] <= descriptors and now[1] <= mappings, (now, descriptors, mappings)
