"""Peer exchange: schedules of any directed graph, bytes along its edges, and lists that do not fit together."""

from __future__ import annotations

import random

import numpy as np
import pytest
from case_schedules import schedules
from collective_cases import Case
from sent_bytes import sent_by_each
from thread_ranks import on_ranks

import qccl
from qccl.base.dtypes import FLOAT32
from qccl.codecs import get

Graph = list[list[int]]  # by rank, whom it sends to


def random_graph(draw: random.Random, n: int) -> Graph:
    return [[peer for peer in range(n) if peer != rank and draw.random() < 0.5] for rank in range(n)]


def sources(graph: Graph, rank: int) -> list[int]:
    return [source for source, targets in enumerate(graph) if rank in targets]


def of(*graph: tuple[int, ...], count: int = 50) -> Case:
    return Case("peer_exchange", len(graph), (count,), "minmax4:bucket=8", graph=graph)


def test_the_own_code_is_stored_once() -> None:
    first, *_ = schedules(of((1, 2, 3), (0,), (0,), (0,)))
    assert first.buffers["recv"].nbytes == 3 * first.buffers["send"].nbytes


def test_bytes_go_along_the_edges_alone() -> None:
    """Out-degree times the encoded size, whatever the number of ranks."""
    codec, count = get("minmax8:bucket=64"), 6400
    for n in (2, 5, 8):
        graph = random_graph(random.Random(n), n)

        def call(comm: qccl.Communicator, graph: Graph = graph) -> None:
            replicas = {peer: np.zeros(count, np.float32) for peer in sources(graph, comm.rank)}
            comm.peer_exchange(np.ones(count, np.float32), send_to=graph[comm.rank], replicas=replicas, codec=codec)

        wanted = [len(targets) * codec.encoded_nbytes(count, FLOAT32) for targets in graph]
        assert sent_by_each(n, call) == wanted


@pytest.mark.parametrize(
    ("lists", "concerned"),
    [
        ({0: ([1], [])}, [0, 1]),  # rank 0 sends to rank 1, which does not know
        ({0: ([], [1])}, [0, 1]),  # rank 0 waits for rank 1, which does not send
        ({0: ([1], [2]), 1: ([2], [0]), 2: ([], [1])}, [0, 2]),  # of a ring one edge is missing
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_one_sided_lists_are_found(lists, concerned, cached: bool) -> None:
    """The ranks concerned change nothing, and the others hear of it at the latest in the next call."""
    others = [lists.get(rank, ([], [])) for rank in range(3)]
    whole = [sorted({*others[r][0], *(p for p in range(3) if r in others[p][1])}) for r in range(3)]

    def run(comm: qccl.Communicator) -> None:
        x, z = np.arange(50, dtype=np.float32), np.ones(50, np.float32)
        send_to, receive_from = others[comm.rank]
        replicas = {peer: np.full(50, peer, np.float32) for peer in receive_from}
        if cached:  # some ranks make the same call again, with others who fitted before
            full = {peer: np.zeros(50, np.float32) for peer in sources(whole, comm.rank)}
            comm.peer_exchange(z, send_to=whole[comm.rank], replicas=full, applied=z.copy(), codec="none")
            comm.barrier()
        with pytest.raises(qccl.MismatchError, match=r"does not send to"):
            comm.peer_exchange(z, send_to=send_to, replicas=replicas, applied=x, codec="none")
            assert comm.rank not in concerned
            comm.barrier()
        if comm.rank in concerned:
            assert (x == np.arange(50)).all() and all((y == peer).all() for peer, y in replicas.items())

    qccl.run_ranks(3, run, timeout=20.0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"send_to": [0]}, "send_to names rank 0, which is this rank; peers are the other ranks .* 0 to 1"),
        ({"send_to": [2]}, "send_to names rank 2; peers are the other ranks"),
        ({"send_to": [1, 1]}, r"send_to names a rank twice: \[1, 1\]"),
        ({"send_to": ["1"]}, "each of send_to must be an integer, not '1'"),
        ({"send_to": 1}, "send_to must be a list of integers, not 1"),
        ({"replicas": [np.ones(8, np.float32)]}, "replicas must be a dict of arrays by rank, not list"),
        ({"replicas": {-1: np.ones(8, np.float32)}}, "replicas names rank -1"),
        ({"replicas": {1: np.ones(9, np.float32)}}, r"replicas\[1\] has 9 elements, and peer_exchange of 8 .* needs 8"),
        ({"replicas": {1: np.ones(8, np.float16)}}, r"replicas\[1\] has element type float16"),
        ({"applied": np.ones(7, np.float32)}, "applied has 7 elements"),
    ],
)
@on_ranks(2)
def test_bad_arguments(comm: qccl.Communicator, arguments, reason: str) -> None:
    if comm.rank == 0:
        with pytest.raises((qccl.ArgumentError, qccl.InvalidBufferError), match=reason):
            comm.peer_exchange(np.ones(8, np.float32), **({"send_to": [], "replicas": {}} | arguments))
    comm.barrier()
