"""What qccl-bench measures: which calls, in which order, with which inputs, and the rows that follow from the times."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bench_rows import SHARED, measure_one, measured

import qccl
from qccl import codecs
from qccl.base import dtypes
from qccl.bench.options import KINDS
from qccl.bench.sweep import data, plain
from qccl.bench.sweep.arrays import arrays_of
from qccl.bench.sweep.calls import Case, PlainCall, QuantizedCall
from qccl.bench.sweep.measure import Counts, Row, Side, _calls_until_overflow, measure
from qccl.codecs.floats import from_float32, to_float32
from qccl.transports.loopback import LoopbackTransport


def gathered(transport: LoopbackTransport) -> plain.AllReduce:
    """An all-reduce of a library, for ranks that are threads."""

    def allreduce(source: int, target: int, count: int, dtype: str, op: str) -> None:
        if dtype != "float32":
            raise qccl.ArgumentError(f"no {dtype}")
        items = transport.allgather(ctypes.string_at(source, 4 * count), 60.0)
        total = np.add.reduce([np.frombuffer(item, np.float32) for item in items])
        ctypes.memmove(target, total.ctypes.data, total.nbytes)

    return allreduce


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback transport has a library with an all-reduce."""
    monkeypatch.setitem(plain.LIBRARIES, "loopback", gathered)


def test_plain_row_is_measured_with_its_own_bound(library: None) -> None:
    def run(comm: qccl.Communicator) -> tuple[bool, Row]:
        call = PlainCall(comm, Case(3000, dtypes.FLOAT32, "avg"))
        bfloat16 = PlainCall(comm, Case(3000, dtypes.BFLOAT16, "sum")).is_supported(arrays_of(comm))
        return bfloat16, measure_one(comm, call)

    bfloat16, row = qccl.run_ranks(3, run)[0]
    assert not bfloat16
    assert (row.codec, row.case.op, row.wire_nbytes) == ("loopback", "sum", 2 * 2 * 12000 // 3)
    assert row.out_of_place.wrong == row.in_place.wrong == 0
    assert row.out_of_place.error < 1e-6


def test_unchecked_rows_say_so() -> None:
    row = qccl.run_ranks(
        2, lambda comm: measured(comm, "none", Case(10, dtypes.FLOAT32, "sum"), counts=Counts(1, 0, 0))
    )[0]
    assert row.out_of_place.wrong is None and row.out_of_place.error is None


def test_link_counters_are_compared_with_the_bytes_sent() -> None:
    def run(comm: qccl.Communicator) -> float | None:
        counter = itertools.count(step=call_nbytes)
        call = QuantizedCall(comm, Case(4096, dtypes.FLOAT32, "sum"), codecs.get("none"), "one_shot", None)
        return measure_one(comm, call, Counts(3, 1, 0), lambda: next(counter)).out_of_place.crossed

    call_nbytes = 4096 * 4 * 2  # sent to one peer by the two calls of a turn
    assert qccl.run_ranks(2, run) == [1.0, 1.0]


def test_sums_in_place_are_begun_again_before_they_overflow() -> None:
    assert _calls_until_overflow(Case(1, dtypes.FLOAT16, "sum"), 4) == 5
    assert _calls_until_overflow(Case(1, dtypes.FLOAT32, "sum"), 4) == 50
    assert _calls_until_overflow(Case(1, dtypes.FLOAT16, "avg"), 4) > 1 << 60
    seen = []

    def run(comm: qccl.Communicator) -> None:
        call = QuantizedCall(comm, Case(64, dtypes.FLOAT16, "sum"), codecs.get("minmax8"), "auto", None)
        bind = call.bind

        def watched(arrays, x, out):
            go = bind(arrays, x, out)
            return lambda: (go(), seen.append(np.isfinite(out).all()))

        call.bind = watched
        measure_one(comm, call, Counts(23, 2, 0))

    qccl.run_ranks(4, run)
    assert all(seen)
    out_of_place, in_place = 23 + 5 * 2, 23 + 5 * 2 * math.ceil(5 / 3)  # in place 2 fills a round, each with 2 warm-ups
    assert len(seen) == 4 * (out_of_place + in_place)


@pytest.mark.parametrize("as_plan", [False, True])
@pytest.mark.parametrize(
    ("kind", "in_place"), [(kind, mode) for kind in KINDS for mode in (False, True)[: 1 + KINDS[kind].is_allreduce]]
)
def test_what_is_timed_is_the_call_that_programs_make(kind: str, as_plan: bool, in_place: bool) -> None:
    """The timed call is the communicator's method, with the codec as text; a bound plan only with --plan."""
    method = kind if kind in ("hierarchical_allreduce", "peer_exchange") else f"quantized_{kind}"
    parameters = {"hierarchical_allreduce": SHARED, "allreduce_coalesced": {"arrays": 3}}.get(kind, {})

    def run(comm: qccl.Communicator) -> list[tuple[tuple[object, ...], dict[str, object]]]:
        seen = []
        real = getattr(comm, method)
        setattr(comm, method, lambda *given, **options: (seen.append((given, options)), real(*given, **options)))
        root = 0 if "root" in KINDS[kind].parameters else -1
        case = Case(4096, dtypes.FLOAT32, "sum", kind, root)
        call = QuantizedCall(comm, case, codecs.get("minmax4"), "auto", None, parameters, as_plan=as_plan)
        arrays = arrays_of(comm)
        x, out = (arrays.empty(count, case.dtype) for count in call.counts(comm))
        x.fill(1), out.fill(0)
        go = call.bind(arrays, x, x if in_place else out)
        go(), go()
        return seen

    for seen in qccl.run_ranks(4, run):
        assert len(seen) == (0 if as_plan else 2)
        for given, options in seen:
            assert options["codec"] == "minmax4" and (given[-1] is None) == in_place


def test_calls_that_are_compared_take_turns(library: None) -> None:
    ran: list[str] = []

    def recorded(call: PlainCall | QuantizedCall) -> PlainCall | QuantizedCall:
        real = call.bind

        def bind(*given: Any) -> Callable[[], object]:
            run = real(*given)
            return lambda: (ran.append(call.name), run())

        call.bind = bind
        return call

    def run(comm: qccl.Communicator) -> list[Row]:
        case = Case(3000, dtypes.FLOAT32, "sum")
        calls = [PlainCall(comm, case), QuantizedCall(comm, case, codecs.get("minmax8"), "auto", None)]
        return measure(comm, [recorded(c) for c in calls] if comm.rank == 0 else calls, Counts(7, 1, 1), meter=None)

    first, row = qccl.run_ranks(2, run)[0]
    turns = [name for name, _ in itertools.groupby(ran)]
    assert turns == ["loopback", "minmax8"] * 12  # out of place and in place: each checked once, and timed in 5 rounds
    assert all(len(side.rounds) == 5 for side in (*first.sides, *row.sides))
    assert [side.wrong for side in (*first.sides, *row.sides)] == [0, 0, 0, 0]


def test_a_row_has_the_median_of_its_rounds_and_their_spread() -> None:
    side = Side((2.0, 1.0, 1.0, 7.0, 4.0), 0, 0.0, None)
    assert (side.seconds, side.spread) == (2.0, 3.0)


@pytest.mark.parametrize("average", [0, 1, 2, 3])
def test_times_of_the_ranks_become_one(average: int) -> None:
    from qccl.bench.sweep.measure import _combined

    assert _combined([2.0, 1.0, 6.0], average) == [2.0, 3.0, 1.0, 6.0][average]


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
def test_inputs_are_the_same_in_any_cut(dtype: dtypes.DType) -> None:
    whole = data.gaussian(1, 0, 600_000, dtype, seed=3)
    for start, stop in [(0, 10), (5, 262_139), (262_138, 262_140), (262_139, 262_139), (100, 600_000)]:
        assert np.array_equal(data.gaussian(1, start, stop, dtype, seed=3), whole[start:stop])
    values = to_float32(whole, dtype)
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    assert not np.array_equal(whole, data.gaussian(2, 0, 600_000, dtype, seed=3))
    assert not np.array_equal(whole, data.gaussian(1, 0, 600_000, dtype, seed=4))


def test_bfloat16_rounds_as_ml_dtypes_does() -> None:
    x = np.random.default_rng(0).integers(0, 0x7F000000, 100_000, np.uint32).view(np.float32)
    x = np.concatenate([x, -x, np.float32([0.0, -0.0, 1.00390625, 1.01171875])])
    assert np.array_equal(from_float32(x, dtypes.BFLOAT16), x.astype(ml_dtypes.bfloat16).view(np.uint16))
