"""hierarchical_allreduce(exact=False): NCCL's own reduce-scatter and all-gather inside nodes, on a fake NCCL.

The fake adds as qccl does, so the bytes are the host's; a real NCCL may add in another order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import fake_cuda
import numpy as np
import pytest
from cuda_ranks import alike, on_gpus, ranks, values

import qccl

CODEC = "minmax4:bucket=64"


def calls(comm: qccl.Communicator, array: Callable[[np.ndarray], Any], node_ids: list[int]) -> list[Any]:
    """Both algorithms, several chunks, element types, operations and momentum."""
    found = []
    for seed, (count, dtype, how) in enumerate(
        [
            (5000, np.float32, {"algorithm": "one_shot", "chunk": 1024}),
            (7001, np.float32, {"algorithm": "two_round", "op": "avg"}),
            (3000, np.float16, {"algorithm": "one_shot", "op": "max"}),
            (900, np.float32, {"codec": f"{CODEC}+ef+nesterov", "key": "a"}),
            (3, np.float32, {"codec": "none"}),
        ]
    ):
        given = array(values(comm.rank, count, seed).astype(dtype))
        options: dict[str, Any] = {"codec": CODEC, "node_ids": node_ids, "exact": False} | how
        comm.hierarchical_allreduce(given, **options)
        found.append(given)
    return found


@pytest.mark.parametrize(
    ("node_ids", "groups"), [([0, 0, 0], {3}), ([0, 1, 0, 1], {2}), ([0, 0, 1, 1, 1], {2}), ([0, 1, 1], set())], ids=str
)
def test_the_nodes_whose_ranks_all_own_a_part_use_nccls_collectives(node_ids, groups, world, cupy) -> None:
    """A node with more ranks than the smallest one, in which not every rank owns a part, sends and receives."""
    alike(len(node_ids), partial(calls, node_ids=node_ids))
    assert {size for kind, size, *_ in world.calls if kind == "reduceScatter"} == groups


@on_gpus(2)
def test_the_default_is_exact(comm: qccl.Communicator, world, cupy) -> None:
    for how in ({}, {"exact": True}, {"exact": False, "intra": "float16"}, {"exact": False, "layout": "leader"}):
        comm.hierarchical_allreduce(fake_cuda.array(values(comm.rank, 100), comm.rank), node_ids=[0, 0], **how)
    comm.check()
    with pytest.raises(qccl.ArgumentError, match="exact must be True or False, not 1"):
        comm.hierarchical_allreduce(fake_cuda.array(values(comm.rank, 100), comm.rank), node_ids=[0, 0], exact=1)
    assert not [call for call in world.calls if call[0] == "reduceScatter"]


@on_gpus(2)
def test_ranks_that_disagree_are_noticed(comm: qccl.Communicator, cupy) -> None:
    x = fake_cuda.array(values(comm.rank, 100), comm.rank)
    with pytest.raises(qccl.MismatchError, match="exact=False"):
        comm.hierarchical_allreduce(x, node_ids=[0, 0], exact=comm.rank == 0)


def test_a_failure_aborts_the_communicators_of_the_nodes_too(world, cupy) -> None:
    """A kernel of theirs may be the one that waits."""
    failed = threading.Event()

    def run(comm: qccl.Communicator) -> bool | None:
        x = fake_cuda.array(values(comm.rank, 1000), comm.rank)
        how = {"node_ids": [0, 0, 1, 1], "exact": False, "codec": CODEC}
        comm.hierarchical_allreduce(x, **how)
        comm.check()
        comm.barrier()
        if comm.rank == 1:
            assert failed.wait(30)
            return None
        comm.hierarchical_allreduce(x, timeout=0.3, **how)
        if comm.rank > 1:  # its call may end with what rank 0 sends after its own deadline
            with contextlib.suppress(qccl.CollectiveTimeout):
                comm.check()
            return None
        with pytest.raises(qccl.CollectiveTimeout):
            comm.check()
        failed.set()
        world.finish(lambda: world.is_idle(comm.rank))
        return bool(np.isnan(x.get()).all())

    assert ranks(4, run)[0] is True
    assert world.calls.count(("abort", 0)) >= 2  # number 0 in both


def test_ctrl_c_while_the_nodes_connect_ends_the_group(cupy, monkeypatch) -> None:
    """Other ranks may have split the communicator already, and would not split it again with this one."""
    from qccl.cuda.nccl import NcclTransport  # which needs the fake CuPy

    make_groups = NcclTransport.make_groups

    def interrupted(self: Any, groups: Any) -> None:
        make_groups(self, groups)
        raise KeyboardInterrupt

    monkeypatch.setattr(NcclTransport, "make_groups", interrupted)

    def run(comm: qccl.Communicator) -> None:
        x = fake_cuda.array(values(comm.rank, 100), comm.rank)
        with pytest.raises(KeyboardInterrupt):
            comm.hierarchical_allreduce(x, node_ids=[0, 0], exact=False)
        with pytest.raises(qccl.PeerLost, match="KeyboardInterrupt"):
            comm.check()

    assert ranks(2, run) == [None, None]
