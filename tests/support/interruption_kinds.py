"""The kinds of calls that tests repeat, and in which interruptions.py raises exceptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import qccl
from qccl import Communicator

__all__ = ["KINDS", "Case", "Kind"]

#: chunks of CHUNK elements: several messages, and more than may be sent with a header
COUNT, CHUNK, FEW = 6000, 2048, 64
HALF = COUNT // 2


class Case:
    """Calls of one kind on one communicator.

    Attributes:
        inputs, outputs: arrays; fill() writes both.
        start: makes a call; if the call may go on afterwards, its Work is the result.
        plan: the user's plan that it runs, or None.
        returns: a call returns its result, which start() writes to the outputs: an exception in between loses it.
        work: the Work of the present call, as soon as the program has it.
    """

    def __init__(self, inputs, outputs, start: Callable[[], Any], plan: Any = None, *, returns: bool = False) -> None:
        self.inputs, self.outputs, self.start, self.plan, self.returns = inputs, outputs, start, plan, returns
        self.work: Any = None

    def run(self) -> None:
        """Make a call, and wait for it."""
        self.work = None
        result = self.start()
        if isinstance(result, qccl.Work):
            self.work = result
        if self.work is not None:
            self.work.wait()

    def fill(self, rank: int, number: int, variant: str) -> None:
        """The values of a call; ``variant`` "again" is for a call that rank 0 repeats."""
        generator = np.random.default_rng([rank, number, variant == "again"])
        for array in self.outputs:
            array[:] = 12345
        for array in self.inputs:
            array[:] = generator.integers(-100, 100, array.size)

    def found(self) -> str:
        return b"".join(array.tobytes() for array in self.outputs).hex()


_Make = Callable[[Any], Case]


def calls(
    function: Callable[..., Any],
    inputs: Sequence[int] = (COUNT,),
    outputs: Sequence[int] = (COUNT,),
    *,
    returns: bool = False,
    **options: Any,
) -> _Make:
    """``function(comm, *inputs, *outputs, **options)``, with arrays of so many elements; in place without outputs."""

    def make(comm: Any) -> Case:
        xs, outs = ([np.zeros(count, np.float32) for count in counts] for counts in (inputs, outputs))
        return Case(xs, outs or xs, lambda: function(comm, *xs, *outs, **options), returns=returns)

    return make


def plan(
    use: Callable[[Any, Any, Any], Any], collective: str = "allreduce", out_count: int = COUNT, **options: Any
) -> _Make:
    """``use(plan, x, out)`` of a plan that is bound to these arrays."""

    def make(comm: Any) -> Case:
        x, out = np.zeros(COUNT, np.float32), np.zeros(out_count, np.float32)
        bound = comm.plan(collective, COUNT, **options).bind(x, out)
        return Case([x], [out], lambda: use(bound, x, out), bound)

    return make


def watched(look: Callable[[Any], Any], **options: Any) -> _Make:
    """An asynchronous all-reduce; ``look(work)`` while it may be under way."""

    def make(comm: Any) -> Case:
        x, out = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)

        def start() -> None:
            case.work = comm.quantized_allreduce(x, out, async_op=True, **options)
            look(case.work)

        case = Case([x], [out], start)
        return case

    return make


def _all_to_all(comm: Any, x: Any, out: Any, **options: Any) -> Any:
    counts = [2000, 4000][:: 1 - 2 * comm.rank]
    return comm.quantized_all_to_all(x, out, send_counts=counts, recv_counts=counts, **options)


def _pointers(comm: Any, x: Any, out: Any, through: Any = qccl.quantized_allreduce, **options: Any) -> Any:
    return through(x.ctypes.data, out.ctypes.data, COUNT, "float32", "sum", comm, **options)


def _exchange(comm: Any, x: Any, other: Any, applied: Any, **options: Any) -> Any:
    peer = 1 - comm.rank
    return comm.peer_exchange(x, send_to=[peer], replicas={peer: other}, applied=applied, **options)


def _pointers_exchange(comm: Any, x: Any, other: Any, applied: Any, **options: Any) -> Any:
    peer = 1 - comm.rank
    edges = {"send_to": [peer], "replicas": {peer: other.ctypes.data}, "applied": applied.ctypes.data}
    return qccl.peer_exchange(x.ctypes.data, COUNT, "float32", comm, **edges, **options)


def _gather(comm: Any, x: Any, out: Any) -> None:
    first, second = (np.frombuffer(each, np.float32) for each in comm.allgather(x.tobytes()))
    out[:] = first + 2 * second


allreduce = partial(calls, Communicator.quantized_allreduce)
traced = partial(calls, lambda comm, x, out, **options: comm.quantized_allreduce(x, out, trace=[], **options))
coalesced = partial(
    calls,
    lambda comm, a, b, *outs, **options: comm.quantized_allreduce_coalesced([a, b], list(outs), **options),
    (3000, 3000),
    (3000, 3000),
)
reduce_scatter = partial(calls, Communicator.quantized_reduce_scatter, (COUNT,), (HALF,))
all_gather = partial(calls, Communicator.quantized_all_gather, (HALF,), (COUNT,))
broadcast = partial(calls, Communicator.quantized_broadcast, root=0)
reduce = partial(calls, Communicator.quantized_reduce, root=0)
hierarchical = partial(calls, Communicator.hierarchical_allreduce, node_ids=[0, 1])
pointers = partial(calls, _pointers)
peer_exchange = partial(calls, _exchange, (COUNT,), (COUNT, COUNT))
plan_run = partial(plan, lambda plan, x, out: plan.run())
plan_start = partial(plan, lambda plan, x, out: plan.start())


class Kind(NamedTuple):
    """How a call is made, and how many equal ones precede it."""

    make: _Make
    warm: int


_EXACT: dict[str, Any] = {"codec": "none", "chunk": CHUNK}
_STATE: dict[str, Any] = {"codec": "minmax4+ef", "chunk": CHUNK, "key": "w"}
KINDS: dict[str, Kind] = {
    "first": Kind(allreduce(**_EXACT), 0),
    "second": Kind(allreduce(**_EXACT), 1),
    "repeated": Kind(allreduce(**_EXACT), 3),
    "repeated in place": Kind(allreduce(outputs=(), **_EXACT), 3),
    "repeated, few": Kind(allreduce((FEW,), (FEW,)), 3),
    "async, first": Kind(allreduce(async_op=True, **_EXACT), 0),
    "async": Kind(allreduce(async_op=True, **_EXACT), 3),
    "async, polled": Kind(watched(lambda work: [work.is_completed() for _ in range(3)], **_EXACT), 2),
    "async, callback": Kind(watched(lambda work: work.add_done_callback(lambda work: None), **_EXACT), 2),
    "plan.start": Kind(plan_start(**_EXACT), 2),
    "plan.start, state": Kind(plan_start(**_STATE), 2),
    "plan.run": Kind(plan_run(**_EXACT), 3),
    "plan.run, first": Kind(plan_run(**_EXACT), 0),
    "plan.run, state": Kind(plan_run(**_STATE), 2),
    "plan.run, lr": Kind(plan(lambda plan, x, out: plan.run(lr=0.5), **_STATE), 2),
    "plan.run, reduce-scatter": Kind(plan_run("reduce_scatter", out_count=HALF, **_STATE), 2),
    "plan.run, broadcast": Kind(plan_run("broadcast", **_EXACT), 2),
    "plan()": Kind(plan(lambda plan, x, out: plan(x, out), **_EXACT), 2),
    "coalesced, first": Kind(coalesced(**_EXACT), 0),
    "coalesced": Kind(coalesced(**_EXACT), 3),
    "coalesced, async": Kind(coalesced(async_op=True, **_EXACT), 3),
    "coalesced, state": Kind(coalesced(**_STATE), 2),
    "state, first": Kind(allreduce(**_STATE), 0),
    "state": Kind(allreduce(**_STATE), 3),
    "state, lr": Kind(allreduce(lr=0.5, **_STATE), 2),
    "state, async": Kind(allreduce(async_op=True, **_STATE), 2),
    "reduce-scatter": Kind(reduce_scatter(**_EXACT), 2),
    "reduce-scatter, state": Kind(reduce_scatter(**_STATE), 2),
    "all-gather": Kind(all_gather(**_EXACT), 2),
    "all-gather, async": Kind(all_gather(async_op=True, **_EXACT), 2),
    "all-to-all": Kind(calls(_all_to_all, **_EXACT), 2),
    "broadcast": Kind(broadcast(**_EXACT), 2),
    "broadcast, to rank 0": Kind(broadcast(root=1, **_EXACT), 2),
    "reduce": Kind(reduce(**_EXACT), 2),
    "reduce, from rank 0": Kind(reduce(root=1, **_EXACT), 2),
    "hierarchical": Kind(hierarchical(**_EXACT), 2),
    "hierarchical, state": Kind(hierarchical(**_STATE), 2),
    "peer exchange": Kind(peer_exchange(**_EXACT), 2),
    "peer exchange, state": Kind(peer_exchange(**_STATE), 2),
    "pointers": Kind(pointers(**_EXACT), 2),
    "pointers, first": Kind(pointers(**_EXACT), 0),
    "pointers, async": Kind(pointers(async_op=True, **_EXACT), 2),
    "pointers, state": Kind(pointers(**_STATE), 2),
    "pointers, hierarchical": Kind(pointers(through=qccl.hierarchical_allreduce, node_ids=[0, 1], **_EXACT), 2),
    "pointers, peer exchange": Kind(calls(_pointers_exchange, (COUNT,), (COUNT, COUNT), **_EXACT), 2),
    "nonfinite": Kind(allreduce(nonfinite="error", **_EXACT), 2),
    "nonfinite, async": Kind(allreduce(nonfinite="error", async_op=True, **_EXACT), 2),
    "trace": Kind(traced(**_EXACT), 1),
    "barrier": Kind(calls(Communicator.barrier, (), ()), 1),
    "allgather": Kind(calls(_gather, (FEW,), (FEW,), returns=True), 1),
}
