"""Ranks over UCX, each a process, over all networks: bits, sizes, descriptors, and the groups that follow a group."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import patience
import pytest
from rank_calls import all_calls, check_texts_and_a_split, error_of
from rank_forks import check, on_processes, run
from start_ranks import NETWORKS, needs_ucx
from ucx_ranks import check_sum, connect, next_group

import qccl
from qccl.transports.ucx import UcxTransport

pytestmark = [pytest.mark.starts_first, pytest.mark.processes, needs_ucx]


# -- calls -----------------------------------------------------------------------------------------------------------


def make_calls(*where) -> None:
    """The bits of other transports; groups of a group; texts of unequal lengths."""
    with connect(*where) as comm:
        assert all_calls(comm) == qccl.run_ranks(comm.size, all_calls)[comm.rank]
        pending = comm.quantized_allreduce(np.ones(300_000, np.float32), async_op=True)
        check_texts_and_a_split(comm)
        assert (pending.wait() == comm.size).all()


@pytest.mark.parametrize(
    ("size", "network"),
    [
        pytest.param(2, "shared memory", marks=pytest.mark.quick),
        *((size, network) for size in (2, 3) for network in NETWORKS if (size, network) != (2, "shared memory")),
        *((1, "shared memory"), (5, "shared memory"), (5, "mixed")),
    ],
)
def test_the_bits_of_other_transports(size, network):
    check(run(size, make_calls, **NETWORKS[network]))


# -- the start -------------------------------------------------------------------------------------------------------


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
    assert time.monotonic() - begin < 20 * patience.factor(), "the other rank waited for the deadline"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"QCCL_NET": "eth77"}, "ArgumentError: QCCL_NET='eth77'"),
        ({"UCX_TLS": "nonsense"}, "EngineError: UCX .* did not start"),
        ({"UCX_TLS": "self"}, "EngineError: UCX has no network from rank 1 to rank"),
    ],
)
def test_a_rank_that_cannot_start(environment, message):
    """The others do not wait for it."""
    found = run(2, cannot_start, QCCL_TEST_ENVIRONMENT=json.dumps(environment))
    check(found)
    assert re.search(message, found[1].out), found


def limit_descriptors(rank: int, soft: int, hard: int) -> None:
    """Rank 1 may open so many beside those that it has, with the soft limit, and when it has raised that."""
    if rank == 1:
        used = len(os.listdir("/proc/self/fd"))
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + soft, min(used + hard, most)))


@on_processes(6, UCX_TLS="tcp,self")
def test_a_soft_limit_of_descriptors_that_is_too_low(*where) -> None:
    """A soft limit that is too low for the connections does not matter."""
    UcxTransport.meet(lambda note: [note], 20.0).close()  # from now on UCX is loaded
    limit_descriptors(where[0], 5, 1000)
    with connect(*where) as comm:
        assert (comm.quantized_allreduce(np.ones(1000, np.float32)) == comm.size).all()
    if where[0] == 1:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft > len(os.listdir("/proc/self/fd")) + 14


@on_processes(6, UCX_TLS="tcp,self")
def test_too_few_descriptors(*where) -> None:
    """All ranks learn which one may open too few, and by the name of the error."""
    limit_descriptors(where[0], 18, 18)
    text = error_of(lambda: connect(*where), qccl.EngineError)
    assert text.startswith("rank 1: EMFILE (too many open files): TCP needs 11 descriptors"), text


@on_processes(6, UCX_TLS="tcp,self")
def test_nearly_no_descriptors(*where) -> None:
    """UCX is not even started; the others learn why."""
    limit_descriptors(where[0], 12, 12)
    text = error_of(lambda: connect(*where), qccl.EngineError)
    assert text.startswith("rank 1: " * (where[0] != 1) + "UCX ") and "did not start: EMFILE" in text, text
    assert "ulimit -n" in text, text


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


@on_processes(2, over=NETWORKS)
def test_ranks_of_one_machine_listen_on_its_loopback_interface(*where) -> None:
    """Ranks of one machine open no port to others, not for the next group either, and UCX opens none at all."""
    over_tcp = {"UCX_TLS", "QCCL_TRANSPORT"} & os.environ.keys()  # as these settings want it
    ports = ["0100007F"] * (2 if over_tcp else 1)
    with connect(*where) as comm:
        assert listening() == ports, listening()
        comm = comm.shrink()
        assert listening() == ports, listening()
        assert comm.address.removeprefix("wan://").startswith("127.0.0.1:"), comm.address


# -- the next group --------------------------------------------------------------------------------------------------


@on_processes(3, over=NETWORKS)
def test_groups_follow_each_other(*where) -> None:
    """Groups follow each other in one process, without losses: nothing stays of the old ones."""
    comm = connect(*where)
    used: list[tuple[int, int]] = []
    for number in range(40):
        comm.quantized_allreduce(np.ones(50_000, np.float32), codec="minmax8+ef", key="x")
        calls, old = comm.calls, comm
        comm = next_group(comm)
        assert (comm.rank, comm.size, comm.calls) == (old.rank, old.size, calls)
        check_sum(comm)
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


@on_processes(3, over=NETWORKS)
def test_a_group_that_grows_with_calls_under_way(*where) -> None:
    """They end well before the group changes; their plans are of no use afterwards."""
    comm = connect(*where)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(qccl.join, comm.address, 30.0 * patience.factor()) if comm.rank == 0 else None
        while comm.rank == 0 and not comm.transport.waiting():
            time.sleep(0.01)
        comm.barrier()
        arrays = [np.ones(500_000, np.float32) for _ in range(20)]
        works = [comm.quantized_allreduce(x, codec="none", async_op=True) for x in arrays]
        grown = comm.grow()
        assert (grown.rank, grown.size, grown.calls) == (comm.rank, comm.size + 1, 20)
        assert all((work.wait() == comm.size).all() for work in works)
        new = None if joined is None else pool.submit(check_sum, joined.result(30 * patience.factor()))
        check_sum(grown)
        if joined is not None and new is not None:
            new.result(30 * patience.factor())
            closing = pool.submit(joined.result().close)
        grown.close()
        if joined is not None:
            closing.result(30 * patience.factor())


@on_processes(3, over=NETWORKS)
def test_residuals_reach_the_next_group(*where) -> None:
    """What a rank has not delivered yet reaches the next group."""
    comm = connect(*where)
    x = np.linspace(0, 1, 3000, dtype=np.float32)  # one bit per element delivers 0 or 1
    comm.quantized_allreduce(x.copy(), codec="minmax1+ef", key="x", algorithm="one_shot")
    (before,) = comm.state_dict()["keys"]["x"]["values"].values()
    assert before.any()
    comm = next_group(comm)
    (after,) = comm.state_dict()["keys"]["x"]["values"].values()
    assert (after == before).all(), "one_shot has no owners"
    total = comm.quantized_allreduce(np.zeros(3000, np.float32), codec="minmax1+ef", key="x", algorithm="one_shot")
    assert total.any()
    half = comm.split(comm.rank % 2)
    assert half is not None
    comm = next_group(comm)  # the parts of a group are groups of their own
    check_sum(half)
    half = next_group(half)
    check_sum(half)
    half.close()
    comm.close()


@on_processes(2)
def test_shrink_in_a_forked_child(*where) -> None:
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
        comm.barrier() if not comm._session.end.is_over else None
        comm.abort("the next children are those of a failed group")
    comm.close()
