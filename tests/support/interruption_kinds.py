"""The kinds of calls in which tests/support/interruptions.py raises exceptions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import qccl

__all__ = ["KINDS", "Case", "Kind"]

#: chunks of CHUNK elements: several messages, and more than may be sent with a header
COUNT, CHUNK, FEW = 6000, 2048, 64


class Case:
    """Calls of one kind on one communicator.

    Attributes:
        inputs, outputs: arrays; fill() writes both.
        start: makes a call, and returns its Work, or None if the call has ended.
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
        self.work = self.start() or self.work
        if isinstance(self.work, qccl.Work):
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


def method(
    name: str, count: int = COUNT, out_count: int | None = None, *, in_place: bool = False, **options: Any
) -> _Make:
    """A method of the communicator with an input and an output, of ``count`` elements if nothing else is given."""

    def make(comm: Any) -> Case:
        x, out = np.zeros(count, np.float32), np.zeros(count if out_count is None else out_count, np.float32)
        out = x if in_place else out
        return Case([x], [out], lambda: _ended(getattr(comm, name)(x, out, **options)))

    return make


allreduce = partial(method, "quantized_allreduce")
reduce_scatter = partial(method, "quantized_reduce_scatter", out_count=COUNT // 2)
all_gather = partial(method, "quantized_all_gather", COUNT // 2, COUNT)
broadcast = partial(method, "quantized_broadcast", root=0)
reduce = partial(method, "quantized_reduce", root=0)
hierarchical = partial(method, "hierarchical_allreduce", node_ids=[0, 1])


def _ended(result: Any) -> Any:
    return result if isinstance(result, qccl.Work) else None


def _two(count: int = COUNT) -> list[np.ndarray]:
    return [np.zeros(count, np.float32), np.zeros(count, np.float32)]


def coalesced(**options: Any) -> _Make:
    def make(comm: Any) -> Case:
        xs, outs = _two(3000), _two(3000)
        return Case(xs, outs, lambda: _ended(comm.quantized_allreduce_coalesced(xs, outs, **options)))

    return make


def all_to_all(**options: Any) -> _Make:
    def make(comm: Any) -> Case:
        counts = [2000, 4000][:: 1 - 2 * comm.rank]
        return method("quantized_all_to_all", send_counts=counts, recv_counts=counts, **options)(comm)

    return make


def peer_exchange(**options: Any) -> _Make:
    def make(comm: Any) -> Case:
        z, other = [1 - comm.rank], np.zeros(COUNT, np.float32)
        x, applied = _two()
        arguments = {"send_to": z, "replicas": {1 - comm.rank: other}, "applied": applied}
        return Case([x], [other, applied], lambda: _ended(comm.peer_exchange(x, **arguments, **options)))

    return make


def pointers(function: Any = qccl.quantized_allreduce, **options: Any) -> _Make:
    def make(comm: Any) -> Case:
        x, out = _two()
        where = x.ctypes.data, out.ctypes.data, COUNT, "float32", "sum", comm
        return Case([x], [out], lambda: function(*where, **options))

    return make


def pointers_peer_exchange(**options: Any) -> _Make:
    def make(comm: Any) -> Case:
        other, (x, applied) = np.zeros(COUNT, np.float32), _two()
        edges = {"send_to": [1 - comm.rank], "replicas": {1 - comm.rank: other.ctypes.data}}
        edges["applied"] = applied.ctypes.data
        where = x.ctypes.data, COUNT, "float32", comm
        return Case([x], [other, applied], lambda: qccl.peer_exchange(*where, **edges, **options))

    return make


def plan(
    use: Callable[[Any, Any, Any], Any], collective: str = "allreduce", out_count: int = COUNT, **options: Any
) -> _Make:
    """``use(plan, x, out)`` of a plan that is bound to these arrays."""

    def make(comm: Any) -> Case:
        x, out = np.zeros(COUNT, np.float32), np.zeros(out_count, np.float32)
        bound = comm.plan(collective, COUNT, **options).bind(x, out)
        return Case([x], [out], lambda: _ended(use(bound, x, out)), bound)

    return make


plan_run = partial(plan, lambda plan, x, out: plan.run())
plan_run_lr = partial(plan, lambda plan, x, out: plan.run(lr=0.5))
plan_call = partial(plan, lambda plan, x, out: plan(x, out))
plan_start = partial(plan, lambda plan, x, out: plan.start())


def watched(look: Callable[[Any], Any], **options: Any) -> _Make:
    """An asynchronous all-reduce; ``look(work)`` while it may be under way."""

    def make(comm: Any) -> Case:
        x, out = _two()

        def start() -> None:
            case.work = comm.quantized_allreduce(x, out, async_op=True, **options)
            look(case.work)

        case = Case([x], [out], start)
        return case

    return make


with_callback = partial(watched, lambda work: work.add_done_callback(lambda work: None))
polled = partial(watched, lambda work: [work.is_completed() for _ in range(3)])


def traced(**options: Any) -> _Make:
    def make(comm: Any) -> Case:
        x, out = _two()
        return Case([x], [out], lambda: _ended(comm.quantized_allreduce(x, out, trace=[], **options)))

    return make


def gathered(comm: Any) -> Case:
    x, out = _two(FEW)

    def start() -> None:
        first, second = (np.frombuffer(each, np.float32) for each in comm.allgather(x.tobytes()))
        out[:] = first + 2 * second

    return Case([x], [out], start, returns=True)


def barrier(comm: Any) -> Case:
    return Case([], [], comm.barrier)


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
    "repeated in place": Kind(allreduce(in_place=True, **_EXACT), 3),
    "repeated, few": Kind(allreduce(count=FEW), 3),
    "async, first": Kind(allreduce(async_op=True, **_EXACT), 0),
    "async": Kind(allreduce(async_op=True, **_EXACT), 3),
    "async, polled": Kind(polled(**_EXACT), 2),
    "async, callback": Kind(with_callback(**_EXACT), 2),
    "plan.start": Kind(plan_start(**_EXACT), 2),
    "plan.start, state": Kind(plan_start(**_STATE), 2),
    "plan.run": Kind(plan_run(**_EXACT), 3),
    "plan.run, first": Kind(plan_run(**_EXACT), 0),
    "plan.run, state": Kind(plan_run(**_STATE), 2),
    "plan.run, lr": Kind(plan_run_lr(**_STATE), 2),
    "plan.run, reduce-scatter": Kind(plan_run("reduce_scatter", out_count=COUNT // 2, **_STATE), 2),
    "plan.run, broadcast": Kind(plan_run("broadcast", **_EXACT), 2),
    "plan()": Kind(plan_call(**_EXACT), 2),
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
    "all-to-all": Kind(all_to_all(**_EXACT), 2),
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
    "pointers, hierarchical": Kind(pointers(qccl.hierarchical_allreduce, node_ids=[0, 1], **_EXACT), 2),
    "pointers, peer exchange": Kind(pointers_peer_exchange(**_EXACT), 2),
    "nonfinite": Kind(allreduce(nonfinite="error", **_EXACT), 2),
    "nonfinite, async": Kind(allreduce(nonfinite="error", async_op=True, **_EXACT), 2),
    "trace": Kind(traced(**_EXACT), 1),
    "barrier": Kind(barrier, 1),
    "allgather": Kind(gathered, 1),
}
