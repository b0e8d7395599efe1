"""Results of many calls, by every way to make a communicator: those of threads, to the bit."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import processes
import pytest
from cases import NUMPY, hard_data
from processes import FRAMEWORK, RANK, SIZE, TRANSPORT

import qccl
from qccl import codecs

COUNTS = (0, 1, 255, 2047, 2048, 2049, 8191, 40_003)
MAKERS = {
    "": lambda: qccl.init(backend="host", timeout=30),
    "torch": lambda: qccl.Communicator.from_torch(timeout=30),
    "jax": lambda: qccl.Communicator.from_jax(timeout=30),
}
SPECS = [*codecs.examples(), "minmax1", "minmax4:bucket=64,rounding=stochastic,seed=9", "minmax5:bucket=shard"]


def digests(comm: qccl.Communicator) -> list[str]:
    """One for each codec, over the results of all collectives, with all dtypes; the counts take turns."""
    found = []
    for i, spec in enumerate(SPECS):
        digest = hashlib.sha256()
        for j in range(4):
            count, dtype = COUNTS[(3 * i + j) % len(COUNTS)], NUMPY[list(NUMPY)[(i + j) % len(NUMPY)]]
            for result in results(comm, hard_data("normal", count, dtype, comm.rank), spec, j):
                digest.update(result.tobytes())
        found.append(digest.hexdigest())
    return found


def results(comm: qccl.Communicator, x: np.ndarray, codec: str, number: int) -> list[Any]:
    """Results of a call of each collective, some of them under way together."""
    n, rank, count = comm.size, comm.rank, x.size
    peers = [peer for peer in range(n) if peer != rank]
    counts = [count // n + (r < count % n) for r in range(n)]
    options = {"codec": codec, "async_op": True}
    sizes = (count, counts[rank], counts[0] * n, counts[0] * n, count, count, count, count // 3, count - count // 3)
    outs = [np.zeros(size, x.dtype) for size in (*sizes, *len(peers) * [count])]
    part = x[: counts[0]]
    square = np.resize(x, counts[0] * n)
    works = [
        comm.quantized_allreduce(x, outs[0], algorithm=("two_round", "one_shot")[number % 2], **options),
        comm.quantized_reduce_scatter(x, outs[1], counts=counts, op="avg", **options),
        comm.quantized_all_gather(part, outs[2], **options),
        comm.quantized_all_to_all(square, outs[3], **options),
        comm.quantized_broadcast(x, outs[4], root=number % n, **options),
        comm.hierarchical_allreduce(x, outs[5], node_ids=[r // 2 for r in range(n)], **options),
        comm.quantized_reduce(x, outs[6], root=(number + 1) % n, **options),
        comm.quantized_allreduce_coalesced([x[: count // 3], x[count // 3 :]], outs[7:9], **options),
        comm.peer_exchange(x, send_to=peers, replicas=dict(zip(peers, outs[9:], strict=True)), **options),
    ]
    for work in works if rank % 2 else reversed(works):
        work.wait()
    return outs


@pytest.mark.parametrize("maker", ["", *([FRAMEWORK] if FRAMEWORK else [])])
def test_the_bits_of_threads(maker):
    with MAKERS[maker]() as comm:
        assert (comm.rank, comm.size) == (RANK, SIZE)
        assert comm.transport.name == ("loopback" if SIZE == 1 else TRANSPORT)
        found, nodes = processes.allgather(digests(comm)), comm.nodes

    def on_threads(other: qccl.Communicator) -> list[str]:
        other.nodes = nodes  # which decide whether there are two levels
        return digests(other)

    if RANK == 0:  # one process computes for all
        for rank, (mine, wanted) in enumerate(zip(found, qccl.run_ranks(SIZE, on_threads), strict=True)):
            assert dict(zip(SPECS, mine, strict=True)) == dict(zip(SPECS, wanted, strict=True)), f"rank {rank}"
    processes.barrier()
