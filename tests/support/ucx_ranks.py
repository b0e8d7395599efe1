"""The ranks of test_ucx.py: ``ucx_ranks.py NAME RANK SIZE ADDRESS``; each prints ``done NAME`` at its end."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import machines
import numpy as np
import patience
from rank_calls import all_calls, check_texts_and_a_split, error_of

import qccl
from qccl import meetings
from qccl.transports.ucx import UcxTransport

#: how many times as long everything may take on this machine now
BUSY = patience.factor()


def connect(rank: int, size: int, address: str, timeout: float = 30.0 * BUSY) -> qccl.Communicator:
    machines.pretend(rank)
    comm = qccl.init("host", timeout, rank=rank, size=size, address=address)
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (rank, size, rank, size)
    assert comm.transport.name == (os.environ.get("QCCL_TRANSPORT", "ucx") if size > 1 else "loopback")
    return comm


def processes_of(comm: qccl.Communicator) -> list[int]:
    """The ranks' processes."""
    return [int(note) for note in comm.allgather(str(os.getpid()).encode())]


def wait_for_the_end(*processes: int) -> None:
    """Until these have ended, and the test has reaped them."""
    limit = patience.Limit(60)
    while any(Path(f"/proc/{process}").exists() for process in processes) and limit.left():
        time.sleep(0.05)


def calls(*where) -> None:
    """The bits of other transports; groups of a group; texts of unequal lengths."""
    with connect(*where) as comm:
        assert all_calls(comm) == qccl.run_ranks(comm.size, all_calls)[comm.rank]
        pending = comm.quantized_allreduce(np.ones(300_000, np.float32), async_op=True)
        check_texts_and_a_split(comm)
        assert (pending.wait() == comm.size).all()


def cannot_start(*where) -> None:
    """Settings of rank 1 that UCX cannot use."""
    if where[0] == 1:
        os.environ |= json.loads(os.environ["QCCL_TEST_ENVIRONMENT"])
    begin = time.monotonic()
    try:
        connect(*where)
    except qccl.QcclError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("it started")
    assert time.monotonic() - begin < 20 * BUSY, "the other rank waited for the deadline"


def limit_descriptors(rank: int, soft: int, hard: int) -> None:
    """Rank 1 may open so many beside those that it has, with the soft limit, and when it has raised that."""
    if rank == 1:
        used = len(os.listdir("/proc/self/fd"))
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + soft, min(used + hard, most)))


def raises_its_limit(*where) -> None:
    """A soft limit that is too low for the connections does not matter."""
    UcxTransport(lambda note: [note], 20.0).close()  # from now on UCX is loaded
    limit_descriptors(where[0], 5, 1000)
    with connect(*where) as comm:
        assert (comm.quantized_allreduce(np.ones(1000, np.float32)) == comm.size).all()
    if where[0] == 1:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft > len(os.listdir("/proc/self/fd")) + 14


def has_too_few_descriptors(*where) -> None:
    """All ranks learn which one may open too few, and by the name of the error."""
    limit_descriptors(where[0], 15, 15)
    text = error_of(lambda: connect(*where), qccl.EngineError)
    assert text.startswith("rank 1: EMFILE (too many open files): TCP needs 11 descriptors"), text


def listening() -> list[str]:
    """The addresses at which this process listens."""
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself
            own.add(os.readlink(each))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


def listens_on_loopback(*where) -> None:
    """Ranks of one machine open no port to others, not for the next group either, and UCX opens none at all."""
    over_tcp = {"UCX_TLS", "QCCL_TRANSPORT"} & os.environ.keys()  # as these settings want it
    ports = ["0100007F"] * (2 if over_tcp else 1)
    with connect(*where) as comm:
        assert listening() == ports, listening()
        comm = comm.shrink()
        assert listening() == ports, listening()
        assert comm.address.removeprefix("wan://").startswith("127.0.0.1:"), comm.address


def closes_in_turn(*where) -> None:
    """A rank that closes early is not lost for those that are still closing, and calls are over."""
    for _ in range(3):
        comm = connect(*where)
        comm.quantized_allreduce(np.ones(10, np.float32))
        time.sleep(0.1 * comm.rank)
        comm.close()


def leaves(*where) -> None:
    """The process ends without close(), with a call behind it."""
    comm = connect(*where)
    assert (comm.quantized_allreduce(np.ones(1000, np.float32)) == comm.size).all()


def closed(*where) -> None:
    """A call after another rank's close() names that rank, and does not say that it was lost."""
    comm = connect(*where)
    processes = processes_of(comm)
    if comm.rank == 1:
        comm.timeout = 0.5  # close() waits so long for the others
        comm.close()
        wait_for_the_end(processes[0], processes[2])
        return
    time.sleep(1)
    error = _call_until_it_fails(comm)
    assert isinstance(error, qccl.PeerLost) and "rank 1 has closed its communicator" in str(error), error
    assert "lost" not in str(error), error


def mismatch(*where) -> None:
    """Calls with other counts are refused on all ranks, by name."""
    with connect(*where) as comm:
        x = np.ones(1001 - (comm.rank == 0), np.float32)
        text = error_of(lambda: comm.quantized_allreduce(x), qccl.MismatchError)
        assert "count=1000" in text and "count=1001" in text


def other_size(*where) -> None:
    """A message of another size than its receive is a MismatchError of the transport, which names both."""
    rank, size, address = where
    host, port = address.split(":")
    transport = meetings.connect(meetings.of_address("the test", rank, size, (host, int(port))), 30.0 * BUSY)
    memory = np.zeros(100, np.uint8)
    data = memory.__array_interface__["data"][0]
    if rank == 0:
        transport.receive(1, 5000, data, 7, "received")
    else:
        transport.send(0, 5000, data, 10, "sent")
    deadline = time.monotonic() + (3 if rank else 30) * BUSY
    try:
        while time.monotonic() < deadline:
            assert "received" not in transport.poll(idle=1)
    except qccl.MismatchError as error:
        assert rank == 0 and "rank 1 sent 10 bytes to rank 0, which expected 7" in str(error), error
    except qccl.PeerLost as error:
        assert rank == 1 and "rank 0 was lost" in str(error), error
    else:
        assert rank == 1, "the sizes differ"


def _call_until_it_fails(comm: qccl.Communicator, count: int = 200_000) -> Exception:
    x = np.ones(count, np.float32)
    try:
        while True:
            comm.quantized_allreduce(x, op="avg")
    except qccl.QcclError as error:
        return error


def dies(*where) -> None:
    """Rank 1 is killed in the middle; the others name it."""
    comm = connect(*where)
    comm.quantized_allreduce(np.ones(10, np.float32))
    if comm.rank == 1:
        comm.quantized_allreduce(np.ones(200_000, np.float32), op="avg")  # the others have ended the first call then
        print("dying", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    error = _call_until_it_fails(comm)
    assert isinstance(error, qccl.PeerLost) and "rank 1 was lost" in str(error), error


def dies_in_a_transfer(*where) -> None:
    """Rank 1 is killed while the ranks move 16 MiB; the others name it before their deadline."""
    comm = connect(*where)
    x = np.ones(4 << 20, np.float32)
    for _ in range(2):
        begin = time.monotonic()
        comm.quantized_allreduce(x, op="avg")
        seconds = time.monotonic() - begin
    if comm.rank == 1:
        threading.Timer(seconds / 2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    error = _call_until_it_fails(comm, x.size)
    assert isinstance(error, qccl.PeerLost) and "rank 1 was lost" in str(error), error


def stops(*where) -> None:
    """Rank 1 stops; the others meet their deadline, and end."""
    comm = connect(*where)
    comm.quantized_allreduce(np.ones(10, np.float32))
    comm.timeout = 1.0 * BUSY
    if comm.rank == 1:
        comm.quantized_allreduce(np.ones(200_000, np.float32), op="avg")
        os.kill(os.getpid(), signal.SIGSTOP)
    error = _call_until_it_fails(comm)
    assert isinstance(error, qccl.CollectiveTimeout | qccl.PeerLost) and "rank 1" in str(error), error


def _check_sum(comm: qccl.Communicator) -> None:
    x = np.full(50_000, comm.rank + 1, np.float32)
    assert (comm.quantized_allreduce(x) == comm.size * (comm.size + 1) / 2).all()


def _next_group(comm: qccl.Communicator) -> qccl.Communicator:
    """Every rank has made its calls before one of them ends the group."""
    with contextlib.suppress(qccl.PeerLost):
        comm.barrier()
    return comm.shrink()


def stops_for_good(*where) -> None:
    """The others go on without a rank that stops. When it continues, it gets no group, and cannot disturb theirs."""
    comm = connect(*where)
    rank, processes = comm.rank, processes_of(comm)
    comm.timeout = 1.0 * BUSY
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        error = _call_until_it_fails(comm)
        refused = error_of(lambda: comm.shrink(timeout=2 * BUSY), (qccl.PeerLost, qccl.CollectiveTimeout))
        assert "rank" in refused, (error, refused)
        return
    error = _call_until_it_fails(comm)
    assert isinstance(error, qccl.CollectiveTimeout | qccl.PeerLost), error
    first = comm.shrink(timeout=1 * BUSY)
    first.timeout = 20.0 * BUSY
    assert (first.rank, first.size) == (rank // 2, 2)
    _check_sum(first)
    if rank == 0:
        os.kill(processes[1], signal.SIGCONT)
    for _ in range(30):
        _check_sum(first)
        time.sleep(0.1)
    second = _next_group(first)
    assert (second.rank, second.size) == (rank // 2, 2)
    _check_sum(second)
    second.close()


def shrinks_often(*where) -> None:
    """Groups follow each other in one process, without losses: nothing stays of the old ones."""
    comm = connect(*where)
    used: list[tuple[int, int]] = []
    for number in range(40):
        comm.quantized_allreduce(np.ones(50_000, np.float32), codec="minmax8+ef", key="x")
        calls, old = comm.calls, comm
        comm = _next_group(comm)
        assert (comm.rank, comm.size, comm.calls) == (old.rank, old.size, calls)
        _check_sum(comm)
        try:
            old.quantized_allreduce(np.ones(10, np.float32))
        except qccl.PeerLost:
            old.close()
        if number in (9, 39):
            comm.barrier()
            gc.collect()
            with open("/proc/self/statm") as statm:
                resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            used.append((len(os.listdir("/proc/self/fd")), resident))
            comm.barrier()
    comm.close()
    (descriptors, first), (descriptors_now, now) = used
    assert descriptors_now < descriptors + 10, used  # 30 groups followed; a connection may be about to close
    assert now < first + (8 << 20), used


def grows_with_calls_under_way(*where) -> None:
    """They end well before the group changes; their plans are of no use afterwards."""
    comm = connect(*where)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(qccl.join, comm.address, 30.0 * BUSY) if comm.rank == 0 else None
        while comm.rank == 0 and not comm.transport.waiting():
            time.sleep(0.01)
        comm.barrier()
        arrays = [np.ones(500_000, np.float32) for _ in range(20)]
        works = [comm.quantized_allreduce(x, codec="none", async_op=True) for x in arrays]
        grown = comm.grow()
        assert (grown.rank, grown.size, grown.calls) == (comm.rank, comm.size + 1, 20)
        assert all((work.wait() == comm.size).all() for work in works)
        new = None if joined is None else pool.submit(_check_sum, joined.result(30 * BUSY))
        _check_sum(grown)
        if joined is not None and new is not None:
            new.result(30 * BUSY)
            closing = pool.submit(joined.result().close)
        grown.close()
        if joined is not None:
            closing.result(30 * BUSY)


def keeps_residuals(*where) -> None:
    """What a rank has not delivered yet reaches the next group."""
    comm = connect(*where)
    x = np.linspace(0, 1, 3000, dtype=np.float32)  # one bit per element delivers 0 or 1
    comm.quantized_allreduce(x.copy(), codec="minmax1+ef", key="x", algorithm="one_shot")
    (before,) = comm.state_dict()["keys"]["x"]["values"].values()
    assert before.any()
    comm = _next_group(comm)
    (after,) = comm.state_dict()["keys"]["x"]["values"].values()
    assert (after == before).all(), "one_shot has no owners"
    total = comm.quantized_allreduce(np.zeros(3000, np.float32), codec="minmax1+ef", key="x", algorithm="one_shot")
    assert total.any()
    half = comm.split(comm.rank % 2)
    assert half is not None
    comm = _next_group(comm)  # the parts of a group are groups of their own
    _check_sum(half)
    half = _next_group(half)
    _check_sum(half)
    half.close()
    comm.close()


def raises(*where) -> None:
    """The reason of a rank that gives up reaches the others."""
    comm = connect(*where)
    try:
        with comm:
            if comm.rank == 0:
                raise ZeroDivisionError("a reason of its own")
            _ = comm.quantized_allreduce(np.ones(10, np.float32))
    except (ZeroDivisionError, qccl.PeerLost) as error:
        assert "a reason of its own" in str(error), error


def stays_away(*where) -> None:
    """Set-up has a deadline, too; a transport that timed out is of no further use."""
    comm = connect(*where)
    processes = processes_of(comm)
    if comm.rank == 0:
        transport = comm.transport
        assert isinstance(transport, UcxTransport)
        for expected in (qccl.CollectiveTimeout, qccl.EngineError):
            error_of(lambda: transport.allgather(b"x", 0.3), expected)
    else:
        wait_for_the_end(processes[0])


def shrinks_in_a_fork(*where) -> None:
    """shrink() is refused in a child of os.fork(), as every other use is, also where the group has failed before."""
    comm = connect(*where)
    comm.quantized_allreduce(np.ones(10, np.float32))
    for _ in range(2):
        for use in (lambda: comm.shrink(timeout=1), lambda: comm.transport.regroup(0, 1, grows=False)):
            if (pid := os.fork()) == 0:
                try:
                    use()
                except qccl.EngineError as error:
                    os._exit(0 if f"forked by rank {comm.rank}" in str(error) else 1)
                except BaseException:
                    os._exit(2)
                os._exit(3)
            _, status = os.waitpid(pid, 0)
            assert status == 0, status
        comm.barrier() if comm._session.failure is None else None
        comm.abort("the next children are those of a failed group")
    comm.close()


if __name__ == "__main__":
    name = sys.argv[1]
    globals()[name](int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    print("done", name, flush=True)
