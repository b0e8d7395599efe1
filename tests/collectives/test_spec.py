"""Arguments that the collectives beside all-reduce refuse: before anything is sent, or on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from thread_ranks import on_ranks

import qccl


def vector(count: int = 12, dtype: type = np.float32) -> np.ndarray:
    return np.ones(count, dtype)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda c: c.quantized_reduce_scatter(vector(13)), "13 elements cannot be shared equally among 2 ranks"),
        (lambda c: c.quantized_reduce_scatter(vector(), vector(5)), "out has 5 elements.* needs 6 on rank .; x has 12"),
        (lambda c: c.quantized_reduce_scatter(vector(), counts=[5, 6]), r"counts=\[5, 6\] .* sum 11; .* sum 12"),
        (lambda c: c.quantized_reduce_scatter(vector(), counts=[12]), "1 numbers .* must be 2"),
        (lambda c: c.quantized_reduce_scatter(vector(), counts=[-1, 13]), "each of counts must be 0 or more, not -1"),
        (lambda c: c.quantized_reduce_scatter(vector(), counts=6), "counts must be a list of integers, not 6"),
        (lambda c: c.quantized_reduce_scatter(vector(), op="product"), "op 'product' is not supported"),
        (lambda c: c.quantized_reduce_scatter(np.ones((3, 4), np.float32).T), "row-major"),
        (lambda c: c.quantized_all_gather(vector(5), vector()), "x has 5 elements.* needs 6 on rank .; out has 12"),
        (lambda c: c.quantized_all_gather(vector(6), vector(12, np.float16)), "out has element type float16"),
        (lambda c: c.quantized_all_to_all(vector(), vector(), send_counts=[6, 6]), "belong together"),
        (
            lambda c: c.quantized_all_to_all(vector(), vector(), send_counts=[6, 6], recv_counts=[12]),
            "recv_counts has 1",
        ),
        (
            lambda c: c.quantized_all_to_all(vector(), vector(), send_counts=[6, 6], recv_counts=[7, 5]),
            "sends itself 6 elements and gets",
        ),
        (lambda c: c.quantized_broadcast(vector(), root=2), "root=2 is not a rank"),
        (lambda c: c.quantized_broadcast(vector(), root=None), "root must be an integer, not None"),
        (lambda c: c.quantized_broadcast(vector(), algorithm="star"), "'star' is not one of auto, chain, binomial"),
        (lambda c: c.quantized_reduce(vector(), root=-1), "root=-1 is not a rank"),
        (lambda c: c.quantized_reduce(vector(), algorithm="chain"), "one of auto, one_shot, two_round"),
        (lambda c: c.quantized_allreduce_coalesced([vector()], [vector(), vector()]), "1 arrays in xs and 2 in outs"),
        (
            lambda c: c.quantized_allreduce_coalesced([vector(), vector(12, np.float16)]),
            r"xs\[1\] has element type float16, and float32 is needed",
        ),
        (
            lambda c: c.quantized_allreduce_coalesced(iter([vector()])),
            "xs must be a list of arrays, .* not list_iterator; pass a list",
        ),
        (lambda c: c.plan("reduce_scatter", 12, root=1), "has no parameter 'root'; its plans have op, counts"),
        (lambda c: c.plan("gather", 12), '"reduce_scatter", "all_gather"'),
    ],
)
@on_ranks(2)
def test_refused(comm: qccl.Communicator, call, reason) -> None:
    with pytest.raises((qccl.ArgumentError, qccl.InvalidBufferError), match=reason):
        call(comm)
    comm.barrier()  # nothing was sent, so the communicator is as good as before


@on_ranks(2)
def test_memory_in_common(comm: qccl.Communicator) -> None:
    x = vector(24)
    peer = 1 - comm.rank
    for call, names in (
        (lambda: comm.quantized_allreduce(x[:12], x[6:18]), "x .*and out .*overlap in part"),
        (lambda: comm.quantized_all_to_all(x[:12], x[6:18]), "x and out overlap"),
        (lambda: comm.quantized_reduce_scatter(x[:12], x[5:11]), "x and out overlap"),
        (lambda: comm.quantized_all_gather(x[3:9], x[:12]), "out and x overlap"),
        (lambda: comm.quantized_allreduce_coalesced([x[:6], x[4:9]]), r"xs\[0\] and xs\[1\] overlap"),
        (
            lambda: comm.quantized_allreduce_coalesced([x[:6], x[6:12]], [x[12:18], x[16:22]]),
            r"outs\[0\] and outs\[1\] overlap",
        ),
        (
            lambda: comm.quantized_allreduce_coalesced([x[:6], x[6:12]], [x[1:7], x[12:18]]),
            r"xs\[0\] .*and outs\[0\] .*overlap in part",
        ),
        (
            lambda: comm.peer_exchange(x[:8], send_to=[peer], replicas={peer: x[4:12]}, applied=x[16:]),
            rf"z and replicas\[{peer}\] overlap",
        ),
        (
            lambda: comm.peer_exchange(x[:8], send_to=[peer], replicas={peer: x[8:16]}, applied=x[12:20]),
            rf"replicas\[{peer}\] and applied overlap",
        ),
    ):
        with pytest.raises(qccl.InvalidBufferError, match=names):
            call()
    with pytest.raises(qccl.ArgumentError, match=rf"replicas\[{peer}\] has 7 elements"):
        comm.peer_exchange(x[:8], send_to=[peer], replicas={peer: x[8:15]})
    with pytest.raises(qccl.ArgumentError, match="all in place or none"):
        comm.quantized_allreduce_coalesced([x[:6], x[6:12]], [x[:6], x[12:18]])
    comm.barrier()


@pytest.mark.parametrize(
    "call",
    [
        lambda c, x, y: c.quantized_broadcast(x, root=c.rank),
        lambda c, x, y: c.quantized_reduce(x, root=c.rank),
        lambda c, x, y: c.quantized_reduce_scatter(x, counts=[6, 6] if c.rank else [5, 7]),
        lambda c, x, y: c.quantized_all_gather(y, x) if c.rank else c.quantized_reduce_scatter(x, y),
        lambda c, x, y: (
            c.quantized_all_to_all(x, np.empty(12, np.float32), send_counts=[6, 6], recv_counts=[6, 6])
            if c.rank
            else c.quantized_all_to_all(x, np.empty(12, np.float32), send_counts=[5, 7], recv_counts=[5, 7])
        ),
        lambda c, x, y: c.quantized_allreduce_coalesced([x, y] if c.rank else [y, x]),
        lambda c, x, y: c.hierarchical_allreduce(x, node_ids=[0, c.rank]),
    ],
    ids=["broadcast", "reduce", "reduce_scatter", "others", "all_to_all", "coalesced", "hierarchical_allreduce"],
)
@on_ranks(2)
def test_ranks_that_disagree(comm: qccl.Communicator, call) -> None:
    """Every rank raises, and nothing has changed."""
    x, y = np.arange(12, dtype=np.float32), np.arange(6, dtype=np.float32)
    with pytest.raises(qccl.MismatchError, match="do not agree"):
        call(comm, x, y)
    assert (x == np.arange(12)).all() and (y == np.arange(6)).all()


@on_ranks(2)
def test_nonfinite_results_are_refused_everywhere(comm: qccl.Communicator) -> None:
    x = vector(12)
    if comm.rank == 1:
        x[3] = np.inf
    for call in (
        lambda: comm.quantized_broadcast(x.copy(), root=1, nonfinite="error"),
        lambda: comm.quantized_all_gather(x.copy(), np.empty(24, np.float32), nonfinite="error"),
        lambda: comm.quantized_allreduce_coalesced([vector(3), x.copy()], nonfinite="error"),
    ):
        with pytest.raises(qccl.ArgumentError, match="not finite at element"):
            call()


@on_ranks(4)
def test_plans_and_works(comm: qccl.Communicator) -> None:
    x, part = np.arange(4000, dtype=np.float32), np.empty(1000, np.float32)
    plan = comm.plan("reduce_scatter", 4000, codec="none")
    for _ in range(2):
        assert plan(x, part) is part
        np.testing.assert_array_equal(part, 4 * np.arange(1000 * comm.rank, 1000 * (comm.rank + 1)))
    plan = comm.plan("broadcast", 1000, codec="none", root=2)
    y = np.full(1000, comm.rank, np.float32)
    assert (plan(y) == 2).all()
    work = comm.quantized_all_gather(part, out := np.empty(4000, np.float32), codec="none", async_op=True)
    assert work.wait() is out
    np.testing.assert_array_equal(out, 4 * x)
    work = comm.quantized_reduce(x, codec="none", root=3, async_op=True)
    assert (work.wait() is x) == (comm.rank == 3)


@on_ranks(2)
def test_column_major_arrays(comm: qccl.Communicator) -> None:
    x = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4) * (comm.rank + 1))
    comm.quantized_broadcast(x, root=1, codec="none")
    np.testing.assert_array_equal(x, np.arange(12).reshape(3, 4) * 2)
    comm.quantized_allreduce_coalesced([x, np.ones(3, np.float32)], codec="none")
    np.testing.assert_array_equal(x, np.arange(12).reshape(3, 4) * 4)
    with pytest.raises(qccl.MismatchError, match="axes"):
        comm.quantized_allreduce_coalesced([x if comm.rank else np.ascontiguousarray(x)])


@on_ranks(2)
def test_plans_take_the_arrays_that_the_methods_take(comm: qccl.Communicator) -> None:
    x = np.arange(12, dtype=np.float32)
    plan = comm.plan("reduce", 12, root=1, codec="none")
    if comm.rank == 0:
        x.flags.writeable = False  # only the root's is written
        assert plan(x) is None
    else:
        assert plan(x) is x and (x == 2 * np.arange(12)).all()
    y = np.arange(12, dtype=np.float32)
    comm.plan("reduce_scatter", 12, codec="none")(y)
    own = slice(6 * comm.rank, 6 * comm.rank + 6)
    wanted = np.arange(12, dtype=np.float32)
    wanted[own] *= 2
    assert (y == wanted).all()
    with pytest.raises(qccl.ArgumentError, match="out has 5 elements"):
        comm.plan("broadcast", 12, root=1).bind(None if comm.rank == 0 else x, np.zeros(5, np.float32))
    with pytest.raises(qccl.InvalidBufferError, match=r"out is of type list|out has element type float64"):
        comm.quantized_broadcast(None if comm.rank == 0 else x, [] if comm.rank == 0 else np.zeros(12), root=1)


@on_ranks(2)
def test_codecs_of_two_classes_are_not_the_same_to_the_ranks(comm: qccl.Communicator) -> None:
    class Other(qccl.codecs.MinMax):
        """Spelled like its base."""

    with pytest.raises(qccl.MismatchError, match=r"codec=minmax4 \(.*Other\)"):
        comm.quantized_allreduce(vector(24), codec=Other(4) if comm.rank else "minmax4")
