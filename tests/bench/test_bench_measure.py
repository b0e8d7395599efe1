"""The checks of qccl-bench: right results pass, a single wrong bit does not; its inputs are as specified."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest
from threads import outcomes

import qccl
from qccl import codecs, dtypes
from qccl.bench import bulk, data, plain
from qccl.bench.arrays import Guarded, arrays_of
from qccl.bench.calls import Case, PlainCall, QuantizedCall, Wiring
from qccl.bench.check import check
from qccl.bench.kinds import KINDS
from qccl.bench.measure import Counts, Row, Side, _calls_until_overflow, measure
from qccl.bench.options import Options
from qccl.bench.sweep import Sweep
from qccl.codecs.floats import from_float32, to_float32
from qccl.transports.loopback import LoopbackTransport

SHARED = {"layout": "sharded", "node_ids": [0, 0, 1, 1]}
LED = {"layout": "leader", "node_ids": [0, 0, 0, 1]}
ONCE = Counts(iters=1, warmups=0, checks=1)


def measured(
    comm: qccl.Communicator,
    codec: str,
    case: Case,
    algorithm: str = "auto",
    counts: Counts = ONCE,
    parameters: Mapping[str, object] = MappingProxyType({}),
    *,
    as_plan: bool = False,
) -> Row:
    call = QuantizedCall(comm, case, codecs.get(codec), algorithm, None, parameters, as_plan=as_plan)
    return measure_one(comm, call, counts)


def measure_one(comm: qccl.Communicator, call: QuantizedCall | PlainCall, counts: Counts = ONCE, meter=None) -> Row:
    (row,) = measure(comm, [call], counts, meter=meter, before_turn=lambda turn: None)
    return row


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
            x, out = (Guarded(arrays, case.count, case.dtype) for _ in range(2))
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


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 1025, 70_001])
def test_right_results_are_not_wrong(size: int, count: int) -> None:
    def run(comm: qccl.Communicator) -> list[Row]:
        return [
            measured(comm, codec, Case(count, dtype, op), algorithm, Counts(2, 1, 2))
            for codec, dtype, op, algorithm in [
                ("minmax8", dtypes.FLOAT32, "sum", "auto"),
                ("minmax5:bucket=shard", dtypes.FLOAT16, "avg", "two_round"),
                ("minmax4:rounding=stochastic,seed=3", dtypes.BFLOAT16, "max", "one_shot"),
                ("minmax4:bucket=64,rounding=stochastic", dtypes.FLOAT32, "sum", "two_round"),
                ("none", dtypes.FLOAT32, "min", "two_round"),
            ]
        ]

    for rows in qccl.run_ranks(size, run):
        for row in rows:
            assert row.out_of_place.wrong == row.in_place.wrong == 0
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
def test_right_results_of_the_other_collectives_are_not_wrong(
    kind: str, parameters: dict[str, object], count: int
) -> None:
    def run(comm: qccl.Communicator) -> list[Row]:
        return [
            measured(comm, codec, Case(count, dtype, op, kind), algorithm, Counts(1, 0, 2), parameters)
            for codec, dtype, op, algorithm in [
                ("minmax4:bucket=shard", dtypes.FLOAT32, "sum", "one_shot"),
                ("minmax5:bucket=shard", dtypes.FLOAT16, "avg", "two_round"),
                ("minmax4:bucket=64,rounding=stochastic,seed=3", dtypes.BFLOAT16, "sum", "two_round"),
                ("minmax3:bucket=64", dtypes.FLOAT32, "max", "auto"),
            ]
        ]

    for row in qccl.run_ranks(4, run)[0]:
        assert [side.wrong for side in row.sides] == [0] * len(row.sides)


#: of every family one, and those whose decoders must be told who encoded
FAMILIES = (
    *("none", "cast:dtype=float8_e5m2,bucket=64", "dithering:k=5,norm=l2,bucket=64,seed=2", "trellis3"),
    *("onebit:reconstruct=midpoint,bucket=64", "topk:k=0.2,block=64", "randomk:k=0.2,block=64,scale=true,seed=4"),
    "topk:k=5,block=64,values=float16",
)
PAIRS = ("topk:k=4,block=64,values=exp4/k=24", "minmax2:bucket=64/minmax5:bucket=24")


@pytest.mark.parametrize("kind", KINDS)
def test_right_results_of_every_codec_are_not_wrong(kind: str) -> None:
    every = {"hierarchical_allreduce": SHARED | {"intra": "none"}, "allreduce_coalesced": {"arrays": 3}}

    def run(comm: qccl.Communicator) -> list[Row]:
        comm.barrier()
        return [
            measured(comm, codec, Case(3000, dtype, "sum", kind, root), algorithm, Counts(1, 0, 1), every.get(kind, {}))
            for i, codec in enumerate(FAMILIES + PAIRS)
            for dtype in (dtypes.DTYPES[i % 3], dtypes.DTYPES[(i + 1) % 3])
            for algorithm in KINDS[kind].algorithms or ("auto",)
        ]

    root = 1 if "root" in KINDS[kind].parameters else -1
    for row in qccl.run_ranks(4, run)[0]:
        assert [side.wrong for side in row.sides] == [0] * len(row.sides), (row.codec, row.case, row.algorithm)


def test_right_results_of_every_codec_inside_nodes_are_not_wrong() -> None:
    inside = [codec for codec in FAMILIES if not codecs.get(codec).kernel().draws]
    case = Case(3000, dtypes.FLOAT32, "sum", "hierarchical_allreduce")

    def run(comm: qccl.Communicator) -> list[Row]:
        return [
            measured(comm, "minmax4:bucket=64", case, algorithm, Counts(1, 0, 1), place | {"intra": intra})
            for intra in inside
            for algorithm, place in (("one_shot", SHARED), ("two_round", LED))
        ]

    for row in qccl.run_ranks(4, run)[0]:
        assert [side.wrong for side in row.sides] == [0] * len(row.sides), (row.case, row.algorithm)


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("hierarchical_allreduce", SHARED | {"intra": "none"}),
        ("hierarchical_allreduce", LED | {"intra": "none"}),
        ("reduce_scatter", {}),
        ("peer_exchange", {}),
    ],
)
def test_right_results_of_codecs_with_state_are_not_wrong(
    kind: str, parameters: dict[str, object], dtype: dtypes.DType
) -> None:
    def run(comm: qccl.Communicator) -> list[Row]:
        case = Case(3000, dtype, "sum", kind)
        return [
            measured(comm, f"{codec}+ef+nesterov:mu=0.5", case, algorithm, Counts(1, 0, 1), parameters, as_plan=as_plan)
            for codec in ("minmax4:bucket=64", "topk:k=0.2,block=64", "none", PAIRS[0])
            for algorithm in KINDS[kind].algorithms or ("auto",)
            for as_plan in (False, True)
        ]

    for row in qccl.run_ranks(4, run)[0]:
        assert [side.wrong for side in row.sides] == [0] * len(row.sides), (row.codec, row.algorithm)


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
    monkeypatch.setitem(plain._LIBRARIES, "loopback", gathered)


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
    turns: list[str] = []

    def run(comm: qccl.Communicator) -> list[Row]:
        case = Case(3000, dtypes.FLOAT32, "sum")
        calls = [PlainCall(comm, case), QuantizedCall(comm, case, codecs.get("minmax8"), "auto", None)]
        before = turns.append if comm.rank == 0 else lambda turn: None
        return measure(comm, calls, Counts(7, 1, 1), meter=None, before_turn=before)

    first, row = qccl.run_ranks(2, run)[0]
    sides = [["loopback out of place", "minmax8 out of place"] * 5, ["loopback in place", "minmax8 in place"] * 5]
    assert turns == sides[0] + sides[1]
    assert all(len(side.rounds) == 5 for side in (*first.sides, *row.sides))
    assert [side.wrong for side in (*first.sides, *row.sides)] == [0, 0, 0, 0]


def test_a_row_has_the_median_of_its_rounds_and_their_spread() -> None:
    side = Side((2.0, 1.0, 1.0, 7.0, 4.0), 0, 0.0, None)
    assert (side.seconds, side.spread) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("wiring", "each"),
    [
        (Wiring.one_link_each(4), 4000),  # to three others
        (Wiring((0, 1, 0, 1), (0, 1, 0, 1)), 3000),  # two ranks behind a link, each to two others
        (Wiring((0, 1, 0, 1), (0, 1, 2, 3)), 6000),
    ],
)
def test_a_plain_transfer_sends_as_much_over_every_link(
    wiring: Wiring, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int, int]] = []
    real = LoopbackTransport.send

    def send(self, peer, tag, address, nbytes, token):
        if tag == bulk._TAG:
            sent.append((self.rank, peer, nbytes))
        real(self, peer, tag, address, nbytes, token)

    def run(comm: qccl.Communicator) -> None:
        transfers = bulk.Bulk(comm, wiring)
        transfers.bind(12_000)()
        transfers.settle()
        transfers.close()

    monkeypatch.setattr(LoopbackTransport, "send", send)
    qccl.run_ranks(4, run)
    links = wiring.by_link([sum(n for sender, _, n in sent if sender == rank) for rank in range(4)])
    assert set(links) == {12_000} and {n for *_, n in sent} == {each}
    assert all(wiring.nodes[rank] != wiring.nodes[peer] for rank, peer, _ in sent)


@pytest.mark.parametrize("average", [0, 1, 2, 3])
def test_times_of_the_ranks_become_one(average: int) -> None:
    from qccl.bench.measure import _combined

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


def test_a_sweep_writes_its_table_and_files(tmp_path) -> None:
    names = {key: str(tmp_path / f"run.{key}") for key in ("json", "trace")}
    options = Options(
        minbytes=4096,
        maxbytes=65536,
        stepfactor=16,
        iters=2,
        codecs=("minmax8", "none"),
        dtypes=("float", "bfloat16"),
        **names,
    )
    lines: list[str] = []
    steps: list[tuple[int, int, str]] = []

    def run(comm: qccl.Communicator) -> bool:
        return Sweep(comm, options, emit=lines.append, progress=lambda *step: steps.append(step)).run()

    assert qccl.run_ranks(2, run) == [True, True]
    rows = [line for line in lines if not line.startswith("#")]
    assert [line.split()[-1] for line in rows] == ["minmax8", "none"] * 4
    assert any(line.startswith("# Out of bounds values : 0 OK") for line in lines)
    assert [step[0] for step in steps] == sorted(step[0] for step in steps)
    assert all(step[0] < step[1] == 32 for step in steps)
    assert "# timed: the communicator's method, as programs call it" in lines
    assert f"# Wrote {names['json']}" in lines and f"# Wrote {names['trace']}" in lines


@pytest.mark.parametrize(("plan", "expected"), [(False, 4), (True, 0)])
def test_the_flag_plan_times_a_bound_plan_and_the_head_says_so(plan: bool, expected: int) -> None:
    options = Options(minbytes=4096, maxbytes=4096, iters=1, warmup_iters=0, check=0, plan=plan)
    lines: list[str] = []

    def run(comm: qccl.Communicator) -> int:
        seen = []
        real = comm.quantized_allreduce
        comm.quantized_allreduce = lambda *given, **more: (seen.append(given), real(*given, **more))
        Sweep(comm, options, emit=lines.append).run()
        return len(seen)

    assert qccl.run_ranks(2, run) == [expected, expected]
    assert ("# timed: start and wait of a plan that was bound once" in lines) == plan
