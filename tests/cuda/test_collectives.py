"""The collectives beside all-reduce on the fake GPUs: the host's bytes, whatever the order that streams run in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cuda
import numpy as np
import pytest
from cuda_ranks import alike, ranks, values

import qccl

CODEC = "minmax3:bucket=64,rounding=stochastic"
COUNT = 3000


def every_call(comm: qccl.Communicator, array: Callable[[np.ndarray], Any]) -> list[Any]:
    """All collectives once; what they left."""
    rank, size = comm.rank, comm.size

    def given(count: int, seed: int) -> Any:
        return array(values(rank, count, seed))

    def empty(count: int) -> Any:
        return array(np.full(count, np.nan, np.float32))

    def parts(count: int) -> list[int]:
        return [count + 70 * r for r in range(size)]

    options = {"codec": CODEC, "chunk": 512}
    found = [given(sum(parts(500)), 1), empty(parts(500)[rank])]
    comm.quantized_reduce_scatter(*found[-2:], counts=parts(500), op="avg", **options)
    found += [given(parts(500)[rank], 2), empty(sum(parts(500)))]
    comm.quantized_all_gather(*found[-2:], counts=parts(500), **options)
    found += [given(COUNT * size, 3), empty(COUNT * size)]
    comm.quantized_all_to_all(*found[-2:], **options)
    sends = [100 + 10 * rank + p for p in range(size)]
    receives = [100 + 10 * p + rank for p in range(size)]
    found += [given(sum(sends), 4), empty(sum(receives))]
    comm.quantized_all_to_all(*found[-2:], send_counts=sends, recv_counts=receives, **options)
    for algorithm in ("chain", "binomial"):
        found.append(given(COUNT, 5))
        comm.quantized_broadcast(found[-1], root=size - 1, algorithm=algorithm, **options)
    for algorithm in ("one_shot", "two_round"):
        found.append(given(COUNT, 6))
        comm.quantized_reduce(found[-1], root=0, algorithm=algorithm, **options)
    found += [given(n, 7) for n in (10, 700, 0, 65)]
    comm.quantized_allreduce_coalesced(found[-4:], **options)
    for layout, intra in (("leader", "none"), ("sharded", "none"), ("sharded", "minmax8:bucket=64")):
        found.append(given(COUNT, 8))
        node_ids = [r // 2 for r in range(size)]
        comm.hierarchical_allreduce(found[-1], layout=layout, intra=intra, node_ids=node_ids, **options)
    z, model, replica = given(COUNT, 9), given(COUNT, 10), given(COUNT, 11)
    around = {"send_to": [(rank + 1) % size], "replicas": {(rank - 1) % size: replica}} if size > 1 else None
    comm.peer_exchange(z, applied=model, **(around or {"send_to": [], "replicas": {}}), **options)
    found += [z, model, replica]
    return found


@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 0), (2, 1), (3, 0), (4, 0)])
def test_the_hosts_bytes_whatever_the_order(n: int, seed: int, world, cupy) -> None:
    world.random.seed(seed)
    alike(n, every_call)


def test_one_sided_lists_are_found_when_the_plan_is_made(world, cupy) -> None:
    def run(comm: qccl.Communicator) -> bytes:
        z, x = (fake_cuda.array(values(comm.rank, 100, seed), comm.rank) for seed in (0, 1))
        with pytest.raises(qccl.MismatchError, match="does not send to"):
            comm.peer_exchange(z, send_to=[1 - comm.rank] if comm.rank else [], replicas={}, applied=x)
        return x.get().tobytes()

    assert ranks(2, run) == [values(rank, 100, 1).tobytes() for rank in range(2)]
