"""Calls: those that repeat earlier ones prove only what may have changed; results that are not finite."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from interruption_kinds import KINDS
from thread_ranks import on_ranks

import qccl
from qccl import codecs
from qccl.base.errors import ArgumentError, InvalidBufferError
from qccl.collectives import AllReduceSpec, ReduceScatterSpec
from qccl.communicator import programs
from qccl.communicator.calls import Collectives
from qccl.communicator.session import Session

COUNT = 300


def warm(comm):
    """An array of zeros, of which three all-reduces have been made."""
    x = np.zeros(COUNT, np.float32)
    for _ in range(3):
        comm.quantized_allreduce(x, codec="none")
    return x


def ones(count: int = COUNT) -> np.ndarray:
    return np.ones(count, np.float32)


@pytest.fixture
def preparations(monkeypatch):
    """How often each rank has checked arguments, bound arrays to a collective, and made programs for one."""
    found = Counter()

    def count(place, name, rank_of):
        usual = getattr(place, name)

        def counted(*arguments, **options):
            found[rank_of(*arguments)] += 1
            return usual(*arguments, **options)

        monkeypatch.setattr(place, name, counted)

    count(Collectives, "_prepare", lambda comm, *_: comm.rank)
    count(programs.Compiled, "__init__", lambda compiled, engine, *_: engine.rank)
    count(Session, "bind", lambda session, *_: session.rank)
    return found


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.warm > 1])
def test_a_repeated_call_is_not_prepared(name, preparations, executions):
    """Nor does it make an Execution if the caller waits. It gives the bytes of calls that are all prepared."""
    plain, most = {"plan()": (5, 5)}.get(name, (0, 0) if name.startswith("plan") else (3, 11))

    def run(comm, forgets):
        case, found, before = KINDS[name].make(comm), [], preparations[comm.rank]
        for number in range(5):
            case.fill(comm.rank, number, "")
            case.run()
            found.append(case.found())
            if forgets:
                comm._session.calls.clear()
        made = [each for each in executions if each._engine is comm._session.engine]
        assert len(made) == 1 + 5 * isinstance(case.work, qccl.Work)
        return found, preparations[comm.rank] - before

    once, always = (qccl.run_ranks(2, lambda comm, forgets=forgets: run(comm, forgets)) for forgets in (False, True))
    assert [found for found, _ in once] == [found for found, _ in always]
    assert {number for _, number in once} == {plain} and {number for _, number in always} == {most}


@on_ranks(2)
def test_a_repeated_call_beside_calls_under_way(comm):
    """One of them uses its array, and is the first to do so."""
    x, y = warm(comm), ones()
    for i in range(5):
        x[:] = i
        works = [comm.quantized_allreduce(each, codec="none", async_op=True) for each in (y, x)]
        comm.quantized_allreduce(x, codec="none")
        assert (x == 4 * i).all()
        for work in works:
            work.wait(timeout=20)
    assert (y == 2**5).all()


@on_ranks(1)
def test_arguments_of_other_kinds_are_found(comm, preparations):
    """16-bit arrays, codecs, lists and tuples; not arguments that differ, or arrays elsewhere."""
    codec = codecs.get("minmax8+ef")

    x, y, z, w = map(ones, (COUNT, COUNT, 3, 3))
    bits = np.full(COUNT, 0x3F80, np.uint16)
    calls = [
        lambda: comm.quantized_allreduce(x, op="max", timeout=50.0),
        lambda: comm.quantized_allreduce(x, y, codec="none"),
        lambda: comm.quantized_allreduce(bits, dtype="bfloat16"),
        lambda: comm.quantized_allreduce(x, codec=codec, key="x", lr=1 / (1 + comm.calls)),
        lambda: comm.quantized_allreduce(x, async_op=True).wait(),
        lambda: comm.quantized_allreduce(x, nonfinite="error"),
        lambda: np.stack(comm.quantized_allreduce_coalesced([x, z], [y, w])[:1]),
        lambda: np.stack(comm.quantized_allreduce_coalesced((x, y), codec=codec, key="y")),
        lambda: np.stack(comm.quantized_allreduce_coalesced([z, w], async_op=True).wait()),
        lambda: comm.quantized_reduce_scatter(x, counts=[COUNT]),
        lambda: comm.quantized_all_gather(x, y, counts=(COUNT,)),
        lambda: comm.hierarchical_allreduce(x, node_ids=[0], intra="minmax8"),
    ]
    first = [call() for call in calls]
    before = preparations[0]
    for call, expected in zip(calls, first, strict=True):
        assert (call() == expected).all()
    assert comm.calls == 2 * len(calls) and preparations[0] == before
    for arguments, options in (
        ((x,), {"op": "max"}),
        ((x,), {"op": "max", "timeout": 10}),
        ((x,), {"op": "max", "timeout": 10.0, "async_op": True}),
        ((x,), {"op": "max", "timeout": 10.0, "nonfinite": "error"}),
        ((x,), {"op": "max", "timeout": 10.0, "key": "x"}),
        ((ones(),), {"op": "max", "timeout": 10.0}),
    ):
        before = preparations[0]
        result = comm.quantized_allreduce(*arguments, **options)
        _ = result.wait() if isinstance(result, qccl.Work) else None
        assert preparations[0] > before
    for arrays in (([x, z],), ([x, z], [y, z[:2]]), ([x, y, z], [z]), ({0: x, 1: y}.values(),)):
        before = preparations[0]
        try:
            comm.quantized_allreduce_coalesced(*arrays)
        except ArgumentError as error:
            assert "3 arrays in xs and 1 in outs" in str(error) or preparations[0] > before
        else:
            assert preparations[0] > before


@on_ranks(1)
def test_equal_arguments_are_checked_once(comm, monkeypatch):
    made = []

    comm.quantized_allreduce(ones(4321))
    monkeypatch.setattr(AllReduceSpec, "__post_init__", lambda spec: made.append(spec))
    for _ in range(3):
        assert (comm.quantized_allreduce(ones(4321)) == 1).all()
    assert not made
    comm.quantized_allreduce(ones(4322))
    assert made


@pytest.mark.parametrize("size", [1, 2, 4])
def test_calls_in_place_and_out_of_place_in_turn(executions, size):
    def run(comm):
        x, y = warm(comm), np.empty(COUNT, np.float32)
        comm.quantized_allreduce(x, y, codec="none")
        comm.barrier()
        before = len(executions)
        for i in range(10):
            for out in (y, x) if i % 3 else (y, y, x, x):
                x[:] = i + comm.rank
                assert comm.quantized_allreduce(x, out, codec="none") is out
                assert (out == size * i + size * (size - 1) // 2).all()
                assert out is x or (x == i + comm.rank).all()
        assert (comm.quantized_allreduce(ones(), codec="none") == size).all()  # of the same form
        made = len(executions) - before
        comm.barrier()  # all have counted
        return made, comm.calls

    assert qccl.run_ranks(size, run) == [(0, 33)] * size


def test_calls_in_flight_keep_state_and_order_under_one_key():
    """Runs that share a program and the state of a key give the results of calls one after the other."""

    def run(comm, at_once):
        x = np.linspace(-1, 1 + comm.rank, 300, dtype=np.float32)
        outs = [np.empty_like(x) for _ in range(40)]
        works = []
        for out in outs:
            works.append(comm.quantized_allreduce(x, out, codec="minmax2+ef", key="x", async_op=True))
            if not at_once:
                works[-1].wait(timeout=20)
        for work in works:
            work.wait(timeout=20)
        return [out.tobytes() for out in outs]

    assert qccl.run_ranks(2, lambda comm: run(comm, True)) == qccl.run_ranks(2, lambda comm: run(comm, False))


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"chunk": 1}, {"chunk": True}),
        ({"chunk": 1}, {"chunk": 1.0}),
        ({"op": 0}, {"op": False}),
        ({"nonfinite": "propagate"}, {"nonfinite": "ignore"}),
        ({"timeout": 1}, {"timeout": 0}),
        ({"stream": 0}, {"stream": 7}),
        ({"trace": None}, {"trace": 3}),
        ({"key": "x"}, {"key": 5}),
    ],
)
@on_ranks(1)
def test_an_argument_that_only_equals_an_accepted_one_is_refused(comm, good, bad):
    x = ones()
    for _ in range(2):
        comm.quantized_allreduce(x, **good)
    with pytest.raises(ArgumentError):
        comm.quantized_allreduce(x, **bad)
    comm.quantized_allreduce(x, **good)


@pytest.mark.parametrize("kind", [list, tuple])
def test_counts_that_only_equal_accepted_ones_are_refused(kind):
    def run(comm):
        x, counts = ones(1), kind((1,))
        for _ in range(2):
            comm.quantized_reduce_scatter(x, counts=counts)
        for wrong in (True, 1.0, 2):
            with pytest.raises(ArgumentError, match="counts"):
                comm.quantized_reduce_scatter(x, counts=kind((wrong,)))
        if kind is list:
            counts[0] = 2
            with pytest.raises(ArgumentError, match="counts"):
                comm.quantized_reduce_scatter(x, counts=counts)

    qccl.run_ranks(1, run)
    assert ReduceScatterSpec.from_arguments(1, "float32", "none", None, counts=[1]).count == 1


@on_ranks(2)
def test_an_array_that_changed_between_equal_calls(comm):
    """Its shape, type and order, whether it may be written, and its memory."""
    x = ones(64)
    comm.quantized_allreduce(x)
    x.shape = (8, 8)
    assert (comm.quantized_allreduce(x) == 4).all()
    x.flags.writeable = False
    with pytest.raises(InvalidBufferError, match="read-only"):
        comm.quantized_allreduce(x)
    x.flags.writeable = True
    x.fill(1)
    assert (comm.quantized_allreduce(x) == 2).all()
    x.dtype = np.float16
    with pytest.raises(InvalidBufferError, match="int32"):
        comm.quantized_allreduce(x.view(np.int32))
    x.fill(1)
    assert x.shape == (8, 16) and (comm.quantized_allreduce(x) == 2).all()
    comm.quantized_allreduce(np.ascontiguousarray(x[:, ::2]))
    with pytest.raises(InvalidBufferError, match="not contiguous"):
        comm.quantized_allreduce(x[:, ::2])
    x.resize(300, refcheck=False)
    x.fill(1)
    assert (comm.quantized_allreduce(x) == 2).all()


@on_ranks(2)
def test_other_orders_of_axes_between_equal_calls(comm):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = 2 * x
    for array in (x.copy(), np.asfortranarray(x), x.copy(), np.asfortranarray(x)):
        assert (comm.quantized_allreduce(array, codec="none") == expected).all()
    with pytest.raises(ArgumentError, match="lie differently"):
        comm.quantized_allreduce(x.copy(), np.asfortranarray(x), codec="none")
    assert (comm.quantized_allreduce(x.copy(), codec="none") == expected).all()


@on_ranks(1)
def test_overlaps_between_equal_calls(comm):
    memory = ones(2 * COUNT)
    x, y, across = memory[:COUNT], memory[COUNT:], memory[COUNT // 2 : COUNT // 2 + COUNT]
    for _ in range(2):
        comm.quantized_allreduce(x, y)
    with pytest.raises(InvalidBufferError, match="overlap in part"):
        comm.quantized_allreduce(x, across)
    comm.quantized_allreduce(x, y)
    comm.quantized_allreduce(x, x)


@on_ranks(2)
def test_lists_that_changed_between_equal_calls(comm):
    """Other arrays of the same forms, arrays that share memory, and read-only ones."""
    x, y, z = (np.full(COUNT, value, np.float32) for value in (1, 2, 3))
    for arrays in ([x, y], [x, y], [y, z], [z, x], [x, y]):
        before = [array.copy() for array in arrays]
        comm.quantized_allreduce_coalesced(arrays, codec="none")
        assert all((array == 2 * old).all() for array, old in zip(arrays, before, strict=True))
    with pytest.raises(InvalidBufferError, match=r"xs\[0\] and xs\[1\] overlap"):
        comm.quantized_allreduce_coalesced([x, x], codec="none")
    z.flags.writeable = False
    with pytest.raises(InvalidBufferError, match=r"xs\[1\] is read-only"):
        comm.quantized_allreduce_coalesced([x, z], codec="none")
    before = x.copy()
    comm.quantized_allreduce_coalesced([x, y], codec="none")
    assert (x == 2 * before).all()


@on_ranks(2)
def test_a_repeated_call_of_which_the_arrays_are_dropped(comm):
    """A call in flight keeps the memory of its arrays, and the table keeps nothing of them afterwards."""
    for _ in range(3):
        arrays = [ones(), ones()]
        dropped = [weakref.ref(array) for array in arrays]
        work = comm.quantized_allreduce_coalesced(arrays, async_op=True)
        del arrays
        (found, _) = work.wait(timeout=20)
        assert (found == 2).all()
        del found, _, work
        gc.collect()
        assert [array() for array in dropped] == [None, None]
        x, out = ones(), ones()
        dropped = weakref.ref(x), weakref.ref(out)
        comm.quantized_allreduce(x, out)
        comm.quantized_allreduce(out)
        del x, out
        assert [array() for array in dropped] == [None, None]


@on_ranks(1)
def test_a_closed_or_failed_communicator_refuses_a_repeated_call(comm):
    x = ones()
    plan = comm.plan("allreduce", COUNT).bind(x)
    for _ in range(2):
        comm.quantized_allreduce(x)
        plan.start().wait()
    comm.abort("enough")
    for call in (lambda: comm.quantized_allreduce(x), plan.start, plan.run):
        with pytest.raises(qccl.PeerLost, match=r"failed earlier.*enough"):
            call()
    comm.close()
    for call in (lambda: comm.quantized_allreduce(x), plan.start, plan.run):
        with pytest.raises(ArgumentError, match="closed"):
            call()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("out_of_place", [False, True])
def test_nonfinite_error_says_whose_input_it_was(out_of_place, dtype):
    def run(comm):
        x = np.arange(100, dtype=np.float32).astype(dtype) + dtype(comm.rank)
        if comm.rank == 1:
            x[3] = np.nan
        out = np.empty_like(x) if out_of_place else None
        with pytest.raises(qccl.ArgumentError) as caught:
            comm.quantized_allreduce(x, out, nonfinite="error")
        comm.quantized_allreduce(np.zeros(100, dtype), nonfinite="error")  # the communicator goes on
        return str(caught.value)

    texts = qccl.run_ranks(3, run)
    name = "out" if out_of_place else "x"
    assert all(f"the result is not finite at element 0 of {name} (and perhaps later" in text for text in texts)
    for rank, text in enumerate(texts):
        found = "element 3 of x of rank 1 was not finite" if rank == 1 else f"the input of rank {rank} was finite"
        assert f"before the call, {found}" in text


@on_ranks(2)
def test_nonfinite_error_says_of_an_input_only_what_is_known(comm):
    x = np.full(8, 3e38, np.float32)
    with pytest.raises(qccl.ArgumentError, match=r"element 0 of x .* input of rank . was finite"):
        comm.quantized_allreduce(x, codec="none", nonfinite="error")  # the sum overflows
    x = np.full(8, np.inf if comm.rank else 0, np.float32)
    with pytest.raises(qccl.ArgumentError) as caught:
        comm.quantized_broadcast(x, root=1, nonfinite="error")
    assert ("before the call" in str(caught.value)) == (comm.rank == 1)  # the only one whose input is used
    finite = [np.zeros(8, np.float32), np.zeros(8, np.float32)]
    finite[1][comm.rank] = np.inf
    with pytest.raises(qccl.ArgumentError, match=rf"element {comm.rank} of xs\[1\] of rank {comm.rank} was"):
        comm.quantized_allreduce_coalesced(finite, nonfinite="error")


@on_ranks(2)
def test_nonfinite_error_says_nothing_of_an_input_that_another_call_may_write(comm, begun: threading.Event):
    x = np.full(8, np.inf, np.float32)
    if comm.rank == 0:
        assert begun.wait(20)
    first = comm.quantized_allreduce(np.zeros(8, np.float32), async_op=True)
    second = comm.quantized_allreduce(x, async_op=True, nonfinite="error")
    begun.set()
    first.wait()
    with pytest.raises(qccl.ArgumentError, match="element 0 of x") as caught:
        second.wait()
    assert comm.rank == 0 or "before the call" not in str(caught.value)  # rank 1 waited for rank 0
