"""Calls that repeat earlier ones: what was proved before is not checked again, and what may have changed is."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
from dlpack import FLOAT, Producer

import qccl
import qccl.plan
from qccl import _host, codecs
from qccl.codecs import Codec
from qccl.collectives import AllReduceSpec, ReduceScatterSpec
from qccl.errors import ArgumentError, InvalidBufferError

COUNT = 64


def ones(count: int = COUNT) -> np.ndarray:
    return np.ones(count, np.float32)


def test_equal_arguments_are_checked_once(monkeypatch):
    made = []

    def run(comm):
        comm.quantized_allreduce(ones(4321))
        monkeypatch.setattr(AllReduceSpec, "__post_init__", lambda spec: made.append(spec))
        for _ in range(3):
            assert (comm.quantized_allreduce(ones(4321)) == 1).all()
        assert not made
        comm.quantized_allreduce(ones(4322))
        assert made

    qccl.run_ranks(1, run)


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
def test_an_argument_that_only_equals_an_accepted_one_is_refused(good, bad):
    def run(comm):
        for _ in range(2):
            comm.quantized_allreduce(ones(), **good)
        with pytest.raises(ArgumentError):
            comm.quantized_allreduce(ones(), **bad)
        comm.quantized_allreduce(ones(), **good)

    qccl.run_ranks(1, run)


def test_counts_that_only_equal_accepted_ones_are_refused():
    def run(comm):
        comm.quantized_reduce_scatter(ones(1), counts=(1,))
        with pytest.raises(ArgumentError, match="counts"):
            comm.quantized_reduce_scatter(ones(1), counts=(True,))
        with pytest.raises(ArgumentError, match="counts"):
            comm.quantized_reduce_scatter(ones(1), counts=(1.0,))

    qccl.run_ranks(1, run)
    assert ReduceScatterSpec.from_arguments(1, "float32", "none", None, counts=[1]).count == 1


def test_an_array_that_changed_between_equal_calls():
    """Its shape, type and order, whether it may be written, and its memory."""

    def run(comm):
        x = ones()
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

    qccl.run_ranks(2, run)


def test_other_orders_of_axes_between_equal_calls():
    def run(comm):
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        expected = 2 * x
        for array in (x.copy(), np.asfortranarray(x), x.copy(), np.asfortranarray(x)):
            assert (comm.quantized_allreduce(array, codec="none") == expected).all()
        with pytest.raises(ArgumentError, match="lie differently"):
            comm.quantized_allreduce(x.copy(), np.asfortranarray(x), codec="none")
        assert (comm.quantized_allreduce(x.copy(), codec="none") == expected).all()

    qccl.run_ranks(2, run)


def test_a_tensor_that_changed_between_equal_calls():
    torch = pytest.importorskip("torch")

    def run(comm):
        x = torch.ones(COUNT)
        comm.quantized_allreduce(x)
        x.data = torch.ones(COUNT)  # other memory
        assert (comm.quantized_allreduce(x) == 2).all()
        with pytest.raises(InvalidBufferError, match="negated"):
            comm.quantized_allreduce(torch._neg_view(x))
        y = torch.ones(COUNT)
        y.untyped_storage().resize_(0)
        with pytest.raises(InvalidBufferError):
            comm.quantized_allreduce(y)
        assert (comm.quantized_allreduce(torch.ones(COUNT)) == 2).all()

    qccl.run_ranks(2, run)


def test_overlaps_between_equal_calls():
    def run(comm):
        memory = ones(2 * COUNT)
        x, y, across = memory[:COUNT], memory[COUNT:], memory[COUNT // 2 : COUNT // 2 + COUNT]
        for _ in range(2):
            comm.quantized_allreduce(x, y)
        with pytest.raises(InvalidBufferError, match="overlap in part"):
            comm.quantized_allreduce(x, across)
        comm.quantized_allreduce(x, y)
        comm.quantized_allreduce(x, x)

    qccl.run_ranks(1, run)


def test_a_closed_or_failed_communicator_refuses_a_repeated_call():
    def run(comm):
        x = ones()
        plan = comm.plan("allreduce", COUNT).bind(x)
        for _ in range(2):
            comm.quantized_allreduce(x)
            plan.start().wait()
        comm.abort("enough")
        for call in (lambda: comm.quantized_allreduce(x), plan.start):
            with pytest.raises(qccl.PeerLost, match=r"failed earlier.*enough"):
                call()
        comm.close()
        for call in (lambda: comm.quantized_allreduce(x), plan.start):
            with pytest.raises(ArgumentError, match="closed"):
                call()

    qccl.run_ranks(1, run)


def test_a_rank_that_repeats_another_call_raises_a_mismatch():
    def run(comm):
        x = ones()
        for _ in range(3):
            comm.quantized_allreduce(x)
        before = x.copy()
        with pytest.raises(qccl.MismatchError, match="call 3 of the group"):
            comm.quantized_allreduce(x, op="max" if comm.rank else "sum")
        assert (x == before).all()

    qccl.run_ranks(2, run)


def test_many_calls_in_flight_share_the_plans_of_their_spec():
    """No call compiles a plan of its own, whatever the order in which the ranks wait."""

    def run(comm):
        arrays = [np.full(500, i + comm.rank, np.float32) for i in range(100)]
        works = [comm.quantized_allreduce(x, codec="none", async_op=True) for x in arrays]
        (pool,) = comm._plans._pools.values()
        plans = len({*pool.idle, *pool.busy})
        for work in works if comm.rank else reversed(works):
            work.wait(timeout=20)
        assert all((x == 2 * i + 1).all() for i, x in enumerate(arrays))
        return plans, len(pool.idle), len(pool.busy), comm._plans._nbytes == sum(plan.nbytes for plan in pool.idle)

    assert qccl.run_ranks(2, run) == [(16, 16, 0, True)] * 2


def test_refused_calls_give_their_plans_back():
    def run(comm):
        x = ones()
        for _ in range(20):
            with pytest.raises(InvalidBufferError, match="overlap"):
                comm.quantized_allreduce(x[:-1], x[1:])
        (pool,) = comm._plans._pools.values()
        return len(pool.idle), len(pool.busy)

    assert qccl.run_ranks(1, run) == [(1, 0)]


def test_plans_of_calls_under_way_stay_in_the_cache(monkeypatch):
    """Whatever else is dropped, so that the end of the call finds its plan, and idle plans are dropped first."""
    monkeypatch.setattr(qccl.plan, "CACHE_SPECS", 3)

    def run(comm):
        x, y = ones(1), ones(1)
        first = comm.quantized_allreduce(x, async_op=True)
        for count in range(2, 12):
            comm.quantized_allreduce(ones(count))
        second = comm.quantized_allreduce(y, async_op=True)
        for work in (first, second):
            work.wait(timeout=20)
        assert x[0] == y[0] == comm.size
        counts = [spec.count for spec in comm._plans._pools]
        plans = [plan for pool in comm._plans._pools.values() for plan in pool.idle]
        return counts, len(plans), comm._plans._nbytes == sum(plan.nbytes for plan in plans)

    assert qccl.run_ranks(2, run) == [([1, 10, 11], 4, True)] * 2


def test_too_much_workspace_is_given_back(monkeypatch):
    monkeypatch.setattr(qccl.plan, "CACHE_NBYTES", 1)

    def run(comm):
        pending = comm.quantized_allreduce(ones(1), async_op=True)
        for count in range(2, 5):
            comm.quantized_allreduce(ones(count))
        assert [spec.count for spec in comm._plans._pools] == [1, 4]
        pending.wait(timeout=20)
        return [spec.count for spec in comm._plans._pools]

    assert qccl.run_ranks(2, run) == [[1]] * 2


def test_a_call_may_be_waited_for_after_its_plans_were_dropped():
    def run(comm):
        x, y = ones(), ones()
        first = comm.quantized_allreduce(x, async_op=True)
        comm.load_state_dict(comm.state_dict())  # drops all plans
        second = comm.quantized_allreduce(y, async_op=True)
        for work in (first, second):
            work.wait(timeout=20)
        (pool,) = comm._plans._pools.values()
        return x[0], y[0], len(pool.idle), len(pool.busy)

    assert qccl.run_ranks(2, run) == [(2, 2, 1, 0)] * 2


def test_calls_in_flight_keep_state_and_order_under_one_key():
    """Runs that share a plan and the state of a key give the results of calls one after the other."""

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


def test_an_equal_call_is_found_by_native_code(monkeypatch):
    """On other arrays of the same form, in place or not, also on tensors."""
    torch = pytest.importorskip("torch")

    def refuse(*arguments):
        raise AssertionError("the call was not found")

    codec = codecs.get("minmax8+ef")

    def run(comm):
        calls = [
            lambda: comm.quantized_allreduce(ones(), op="max", timeout=10.0),
            lambda: comm.quantized_allreduce(ones(), np.empty(COUNT, np.float32), codec="none"),
            lambda: comm.quantized_allreduce(torch.ones(COUNT, dtype=torch.bfloat16)),
            lambda: comm.quantized_allreduce(np.full(COUNT, 0x3F80, np.uint16), dtype="bfloat16"),
            lambda: comm.quantized_allreduce(ones(), codec=codec, key="x", lr=1 / (1 + comm.calls)),
            lambda: comm.quantized_allreduce(ones(), async_op=True).wait(),
            lambda: np.stack(comm.quantized_allreduce_coalesced([ones(), ones(3)], [ones(), ones(3)])[:1]),
            lambda: np.stack(comm.quantized_allreduce_coalesced((ones(), ones()), codec=codec, key="y")),
            lambda: torch.stack(comm.quantized_allreduce_coalesced(torch.ones(9).split(3), async_op=True).wait()),
        ]
        first = [call() for call in calls]
        monkeypatch.setattr(qccl.Communicator, "_run", refuse)
        for call, expected in zip(calls, first, strict=True):
            assert (call() == expected).all()
        assert comm.calls == 2 * len(calls)
        for options in (
            {"op": "max"},
            {"op": "max", "timeout": 10},
            {"op": "max", "timeout": 10.0, "async_op": True},
            {"op": "max", "timeout": 10.0, "nonfinite": "error"},
            {"op": "max", "timeout": 10.0, "key": "x"},
        ):
            with pytest.raises(AssertionError, match="not found"):
                comm.quantized_allreduce(ones(), **options)
        for arrays in (
            ([ones(), ones(3)],),
            ([ones(), ones(3)], [ones(), ones(3)[:2]]),
            ([ones(), ones(), ones(3)], [ones(3)]),
            ({0: ones(), 1: ones()}.values(),),
        ):
            with pytest.raises((AssertionError, ArgumentError), match=r"not found|3 arrays in xs and 1 in outs"):
                comm.quantized_allreduce_coalesced(*arrays)

    qccl.run_ranks(1, run)


def test_lists_that_changed_between_equal_calls():
    """Other arrays of the same forms, arrays that share memory, and read-only ones."""

    def run(comm):
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

    qccl.run_ranks(2, run)


def test_a_repeated_call_of_which_the_arrays_are_dropped():
    """A call in flight keeps the memory of its arrays, and the table keeps nothing of them afterwards."""

    def run(comm):
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

    qccl.run_ranks(2, run)


def test_the_rate_of_a_repeated_call_is_its_own():
    def run(comm, forget):
        x = np.linspace(-1, 1 + comm.rank, 300, dtype=np.float32)
        found = []
        for step in range(6):
            out = comm.quantized_allreduce(x, np.empty_like(x), codec="minmax2+ef", key="x", lr=2.0**-step)
            found.append(out.tobytes())
            if forget:
                comm._memory.calls = _host.CallTable(Codec)
        with pytest.raises(ArgumentError, match="lr must be"):
            comm.quantized_allreduce(x, np.empty_like(x), codec="minmax2+ef", key="x", lr=-1.0)
        return found

    assert qccl.run_ranks(2, lambda comm: run(comm, False)) == qccl.run_ranks(2, lambda comm: run(comm, True))


def test_the_table_of_calls_compares_types_and_forms():
    table = _host.CallTable(Codec)
    x = np.zeros((2, 3), np.float32)
    table.add((x, None), (1, "sum"), {"chunk": None}, lambda: "found")
    payload, (view,) = table.find((x.copy(), None), (1, "sum"), {"chunk": None})
    assert payload == "found" and view.shape == (2, 3)
    frozen = x.copy()
    frozen.flags.writeable = False
    for arrays, options, keywords in (
        ((None, x), (1, "sum"), {"chunk": None}),
        ((x, x), (1, "sum"), {"chunk": None}),
        ((x.T, None), (1, "sum"), {"chunk": None}),
        ((np.asfortranarray(x), None), (1, "sum"), {"chunk": None}),
        ((x.astype(np.float16), None), (1, "sum"), {"chunk": None}),
        ((x.view(type("Other", (np.ndarray,), {})), None), (1, "sum"), {"chunk": None}),
        ((frozen, None), (1, "sum"), {"chunk": None}),
        ((x.tolist(), None), (1, "sum"), {"chunk": None}),
        ((x, None), (True, "sum"), {"chunk": None}),
        ((x, None), (1.0, "sum"), {"chunk": None}),
        ((x, None), (1, "avg"), {"chunk": None}),
        ((x, None), (1, "sum"), {}),
        ((x, None), (1, "sum"), {"codec": None}),
        ((x, None), (1, "sum"), {"chunk": []}),
    ):
        assert table.find(arrays, options, keywords) is None
    for options in ((np.int64(1),), ([],), (object(),)):
        table.add((x,), options, {}, pytest.fail)
        assert table.find((x,), options, {}) is None


def test_the_table_of_calls_compares_devices():
    """It describes arrays as it was told to."""
    x = np.zeros(4, np.float32)
    described = []

    def describe(array):
        described.append(array)
        return None if isinstance(array, str) else _host.describe(array, -1)

    table = _host.CallTable(Codec, describe)
    here = Producer(x, FLOAT, device=(2, 0))
    table.add((here, None), (), {}, lambda: "found")
    assert table.find((Producer(x, FLOAT, device=(2, 0)), None), (), {})[0] == "found"
    for device in ((2, 1), (13, 0), (3, 0), (1, 0)):
        assert table.find((Producer(x, FLOAT, device=device), None), (), {}) is None
    assert described[0] is here and len(described) == 6
    for refused in (object(), "text"):
        table.add((refused, None), (), {}, pytest.fail)
        assert table.find((refused, None), (), {}) is None


def test_an_interrupt_while_an_array_is_described():
    """Other errors mean that the usual path says what is wrong; Ctrl-C must not be lost."""
    x, errors = ones(1), []

    def describe(array):
        if errors:
            raise errors.pop()
        return _host.describe(array)

    table = _host.CallTable(Codec, describe)
    table.add((x,), (), {}, lambda: "found")  # an empty table describes nothing
    for call in (table.find, lambda *arguments: table.add(*arguments, lambda: "found")):
        for lost in (TypeError, BufferError):
            errors.append(lost())
            assert call((x,), (), {}) is None
        errors.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            call((x,), (), {})
    assert table.find((x,), (), {})[0] == "found"


def test_a_codec_in_the_table_of_calls_equals_only_itself():
    table, x = _host.CallTable(Codec), ones()
    codec, equal = codecs.get("minmax4"), dataclasses.replace(codecs.get("minmax4"))
    assert codec == equal and codec is not equal
    table.add((x,), (), {"codec": codec}, lambda: "found")
    assert table.find((x,), (), {"codec": codec})[0] == "found"
    for other in (equal, codecs.get("minmax8"), codec.spec()):
        assert table.find((x,), (), {"codec": other}) is None


def test_the_table_of_calls_is_bounded():
    table, x = _host.CallTable(Codec), ones(1)
    for i in range(5000):
        table.add((x,), (i,), {}, lambda i=i: i)
    found = [i for i in range(5000) if table.find((x,), (i,), {})]
    assert found and found[-1] == 4999 and len(found) <= 4096


def test_the_table_of_calls_is_bounded_by_the_number_of_arrays():
    table, xs = _host.CallTable(Codec), (ones(1),) * 1000
    for i in range(100):
        table.add(xs, (i,), {}, lambda i=i: i)
    found = [i for i in range(100) if table.find(xs, (i,), {})]
    assert found and found[-1] == 99 and len(found) <= 65


def test_types_that_refer_to_their_communicator_are_freed():
    """The table keeps the types of arrays alive, but no cycle through it."""

    def run(comm):
        kind = type("Array", (np.ndarray,), {"comm": comm})
        comm.quantized_allreduce(ones().view(kind))
        comm.close()
        return weakref.ref(kind)

    (kind,) = qccl.run_ranks(1, run)
    gc.collect()
    assert kind() is None
