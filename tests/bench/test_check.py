"""The checks of qccl-bench: right results pass, and a single wrong bit does not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bench_rows import SHARED, measure_one, measured
from threads import outcomes

import qccl
from qccl import codecs
from qccl.base import dtypes
from qccl.bench.options import KINDS
from qccl.bench.sweep.arrays import GuardedArray, arrays_of
from qccl.bench.sweep.calls import Case, QuantizedCall
from qccl.bench.sweep.check import check
from qccl.bench.sweep.measure import Counts, Row
from qccl.transports.loopback import LoopbackTransport

LED = {"layout": "leader", "node_ids": [0, 0, 0, 1]}


@pytest.fixture(autouse=True)
def data_goes_in_messages_of_its_own(monkeypatch):
    """Then they can be told by their tags."""
    monkeypatch.setattr(LoopbackTransport, "eager_nbytes", 0)


class Flipping(LoopbackTransport):
    """Inverts a bit of byte ``at`` (or from the end) of a data message that this rank sends, after ``skip`` others."""

    skip, at, bit, done = 0, 0, 7, False

    def arm(self, skip: int, at: int, bit: int) -> None:
        self.skip, self.at, self.bit, self.done = skip, at, bit, False

    def send(self, peer, tag, address, nbytes, token):
        if tag != 0 and not self.done:
            self.done = self.skip == 0
            self.skip -= 1
            if self.done:
                flip(address + self.at % nbytes, self.bit)
        super().send(peer, tag, address, nbytes, token)


def flip(address: int, bit: int = 0) -> None:
    ctypes.c_uint8.from_address(address).value ^= 1 << bit


@pytest.mark.parametrize(
    ("algorithm", "message"), [("two_round", 0), ("two_round", 1), ("two_round", 2), ("two_round", 3), ("one_shot", 0)]
)
@pytest.mark.parametrize(("codec", "bit"), [("minmax8", 7), ("minmax4", 3), ("minmax4:rounding=stochastic", 7)])
def test_the_top_bit_of_one_code_makes_elements_wrong(codec: str, bit: int, algorithm: str, message: int) -> None:
    def run(transport: LoopbackTransport) -> Row:
        if transport.rank == 0:
            transport = Flipping(transport._group, 0)
            transport.skip, transport.bit = message, bit
        with qccl.Communicator._from_transport(transport, timeout=20) as comm:
            return measured(comm, codec, Case(5000, dtypes.FLOAT32, "sum"), algorithm)

    rows = outcomes(3, run)
    for row in rows:
        assert isinstance(row, Row), row
        # The element of the code; others only if other ranks' buckets changed, too.
        assert 1 <= row.out_of_place.wrong <= 1024
        assert row.in_place.wrong == 0


#: bytes of a wire of one bucket of 64 elements: the first and the last of its codes, and its range
CODE_BYTES, RANGE_BYTES = (0, -9), tuple(range(-8, 0))


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_flipped_bit_that_changes_a_result_is_counted(bits: int, algorithm: str) -> None:
    """In codes and ranges; in round 1 all ranks agree on the wrong result, in round 2 they do not."""
    case = Case(3 * 64, dtypes.FLOAT32, "sum")
    messages = (0, 2) if algorithm == "two_round" else (0,)
    flips = [(m, at, bit) for m in messages for at in CODE_BYTES + RANGE_BYTES for bit in range(8)]

    def run(transport: LoopbackTransport) -> list[tuple[int, np.ndarray]]:
        if transport.rank == 0:
            transport = Flipping(transport._group, 0)
            transport.done = True
        with qccl.Communicator._from_transport(transport, timeout=20) as comm:
            call = QuantizedCall(comm, case, codecs.get(f"minmax{bits}:bucket=64"), algorithm, None)
            arrays = arrays_of(comm)
            x, out = (GuardedArray(arrays, case.count, case.dtype) for _ in range(2))
            go = call.bind(arrays, x.array, out.array)
            found = []
            for spoiled in [None, *flips]:
                if spoiled is not None and transport.rank == 0:
                    transport.arm(*spoiled)
                found.append((check(comm, call, go, x, out, 1)[0], out.array.view(np.uint32).copy()))
                assert transport.rank != 0 or transport.done
            return found

    ranks = outcomes(3, run)
    for found in ranks:
        assert isinstance(found, list), found
    (none_wrong, clean), *_ = ranks[0]
    assert none_wrong == 0
    changed = 0
    for i, spoiled in enumerate(flips, start=1):
        differ = np.logical_or.reduce([found[i][1] != clean for found in ranks])
        changed += bool(differ.any())
        for found in ranks:
            assert found[i][0] == np.count_nonzero(differ), f"message, byte, bit {spoiled}"
    assert changed > len(flips) * 0.9


@pytest.mark.parametrize("nbytes_after_begin", [-1, -4096, 4 * 500, 4 * 500 + 4095])
def test_what_is_written_beside_the_output_is_counted(nbytes_after_begin: int) -> None:
    def run(comm: qccl.Communicator) -> Row:
        return spoiled(comm, lambda x, out: flip(out.ctypes.data + nbytes_after_begin))

    for row in qccl.run_ranks(2, run):
        assert row.out_of_place.wrong == row.in_place.wrong == 1


def test_a_changed_input_is_counted() -> None:
    def run(comm: qccl.Communicator) -> Row:
        return spoiled(comm, lambda x, out: flip(x[7:].ctypes.data))

    for row in qccl.run_ranks(2, run):
        assert row.out_of_place.wrong == row.in_place.wrong == 1  # in place it is the result


def spoiled(comm: qccl.Communicator, spoil: Callable[[np.ndarray, np.ndarray], None]) -> Row:
    """A call after which rank 1 runs ``spoil(x, out)``."""
    call = QuantizedCall(comm, Case(500, dtypes.FLOAT32, "sum"), codecs.get("minmax8"), "auto", None)
    bind = call.bind

    def bind_spoiled(arrays, x, out):
        go = bind(arrays, x, out)
        return lambda: (go(), spoil(x, out) if comm.rank == 1 else None)

    call.bind = bind_spoiled
    return measure_one(comm, call)


def assert_right(size: int, calls: list[tuple[Any, ...]], **options: bool) -> list[Row]:
    """Measure calls (the arguments of measured()) on ``size`` ranks; no element is wrong."""
    rows = qccl.run_ranks(size, lambda comm: [measured(comm, *call, **options) for call in calls])
    for row in (row for ranks in rows for row in ranks):
        assert [side.wrong for side in row.sides] == [0] * len(row.sides), (row.codec, row.case, row.algorithm)
    return rows[0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 1025, 20_001])
def test_right_results_are_not_wrong(size: int, count: int) -> None:
    calls = [
        (codec, Case(count, dtype, op), algorithm, Counts(2, 1, 2))
        for codec, dtype, op, algorithm in [
            ("minmax8", dtypes.FLOAT32, "sum", "auto"),
            ("minmax5:bucket=shard", dtypes.FLOAT16, "avg", "two_round"),
            ("minmax4:rounding=stochastic,seed=3", dtypes.BFLOAT16, "max", "one_shot"),
            ("minmax4:bucket=64,rounding=stochastic", dtypes.FLOAT32, "sum", "two_round"),
            ("none", dtypes.FLOAT32, "min", "two_round"),
        ]
    ]
    for row in assert_right(size, calls):
        assert row.out_of_place.seconds > 0
        assert 0 <= row.out_of_place.error < (0 if count == 0 or size == 1 else 0.5) + 1e-9


@pytest.mark.parametrize("count", [0, 1, 5001])
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("hierarchical_allreduce", SHARED | {"intra": "float16"}),
        ("hierarchical_allreduce", SHARED | {"intra": "none"}),
        ("hierarchical_allreduce", LED | {"intra": "bfloat16", "inter": "host"}),
        ("hierarchical_allreduce", SHARED | {"intra": "minmax6:bucket=256"}),
        ("hierarchical_allreduce", LED | {"intra": "minmax5:bucket=shard"}),
        ("allreduce_coalesced", {"arrays": 3}),
        ("peer_exchange", {}),
    ],
)
def test_right_results_of_the_other_collectives(kind: str, parameters: dict[str, object], count: int) -> None:
    calls = [
        (codec, Case(count, dtype, op, kind), algorithm, Counts(1, 0, 2), parameters)
        for codec, dtype, op, algorithm in [
            ("minmax4:bucket=shard", dtypes.FLOAT32, "sum", "one_shot"),
            ("minmax5:bucket=shard", dtypes.FLOAT16, "avg", "two_round"),
            ("minmax4:bucket=64,rounding=stochastic,seed=3", dtypes.BFLOAT16, "sum", "two_round"),
            ("minmax3:bucket=64", dtypes.FLOAT32, "max", "auto"),
        ]
    ]
    assert_right(4, calls)


#: of every family one, and those whose decoders must be told who encoded
FAMILIES = (
    *("none", "cast:dtype=float8_e5m2,bucket=64", "dithering:k=5,norm=l2,bucket=64,seed=2", "trellis3"),
    *("onebit:reconstruct=midpoint,bucket=64", "topk:k=0.2,block=64", "randomk:k=0.2,block=64,scale=true,seed=4"),
    "topk:k=5,block=64,values=float16",
)
PAIRS = ("topk:k=4,block=64,values=exp4/k=24", "minmax2:bucket=64/minmax5:bucket=24")
ONCE = Counts(1, 0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_right_results_of_every_codec(kind: str) -> None:
    every = {"hierarchical_allreduce": SHARED | {"intra": "none"}, "allreduce_coalesced": {"arrays": 3}}
    root = 1 if "root" in KINDS[kind].parameters else -1
    calls = [
        (codec, Case(1500, dtype, "sum", kind, root), algorithm, ONCE, every.get(kind, {}))
        for i, codec in enumerate(FAMILIES + PAIRS)
        for dtype in (dtypes.DTYPES[i % 3], dtypes.DTYPES[(i + 1) % 3])
        for algorithm in KINDS[kind].algorithms or ("auto",)
    ]
    assert_right(4, calls)


def test_right_results_of_every_codec_inside_nodes() -> None:
    case = Case(3000, dtypes.FLOAT32, "sum", "hierarchical_allreduce")
    calls = [
        ("minmax4:bucket=64", case, algorithm, ONCE, place | {"intra": intra})
        for intra in FAMILIES
        if not codecs.get(intra).kernel().draws
        for algorithm, place in (("one_shot", SHARED), ("two_round", LED))
    ]
    assert_right(4, calls)


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
@pytest.mark.parametrize("as_plan", [False, True])
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("hierarchical_allreduce", SHARED | {"intra": "none"}),
        ("hierarchical_allreduce", LED | {"intra": "none"}),
        *((kind, {}) for kind in ("allreduce", "reduce_scatter", "peer_exchange")),
        ("allreduce_coalesced", {"arrays": 3}),
    ],
)
def test_right_results_of_codecs_with_state(
    kind: str, parameters: dict[str, object], as_plan: bool, dtype: dtypes.DType
) -> None:
    calls = [
        (f"{codec}+ef+nesterov:mu=0.5", Case(1500, dtype, "sum", kind), algorithm, ONCE, parameters)
        for codec in ("minmax4:bucket=64", "topk:k=0.2,block=64", "none", PAIRS[0])
        for algorithm in KINDS[kind].algorithms or ("auto",)
    ]
    assert_right(4, calls, as_plan=as_plan)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("hierarchical_allreduce", SHARED), ("allreduce_coalesced", {"arrays": 3}), ("peer_exchange", {})],
)
def test_wrong_results_of_the_other_collectives_are_counted(kind: str, parameters: dict[str, object]) -> None:
    """A flip of the lowest bit of one rank's code is counted."""

    def run(transport: LoopbackTransport) -> Row:
        if transport.rank == 0:
            transport = Flipping(transport._group, 0)
            transport.arm(1 if parameters is SHARED else 0, 5, 0)
        with qccl.Communicator._from_transport(transport, timeout=20) as comm:
            return measured(comm, "minmax8", Case(5000, dtypes.FLOAT32, "sum", kind), parameters=parameters)

    for row in outcomes(4, run):
        assert isinstance(row, Row), row
        assert row.out_of_place.wrong > 0


def test_the_error_is_the_codecs() -> None:
    rows = qccl.run_ranks(2, lambda comm: measured(comm, "minmax8", Case(50_000, dtypes.FLOAT32, "sum"), "one_shot"))
    assert rows[0] == rows[0] and rows[0].out_of_place.error == rows[1].out_of_place.error
    assert 0.006 < rows[0].out_of_place.error < 0.009  # one quantisation of bucket 1024 with 8 bits
