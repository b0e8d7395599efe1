"""What qccl-bench measures: right results pass, a single wrong bit does not, inputs are what they should be."""

from __future__ import annotations

import ctypes
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from threads import outcomes

import qccl
from qccl import codecs, dtypes
from qccl.bench import data
from qccl.bench.arrays import arrays_of
from qccl.bench.measure import Case, Counts, PlainCall, QuantizedCall, Row, _calls_until_overflow, measure
from qccl.bench.options import Options
from qccl.bench.sweep import Sweep
from qccl.transports.loopback import LoopbackTransport

ONCE = Counts(iters=1, warmups=0, checks=1)


def measured(comm: qccl.Communicator, codec: str, case: Case, algorithm: str = "auto", counts: Counts = ONCE) -> Row:
    call = QuantizedCall(comm, case, codecs.get(codec), algorithm, None)
    return measure(comm, call, counts, meter=None, before_side=lambda mode: None)


class Flipping(LoopbackTransport):
    """Inverts one bit of the first byte of one data message that this rank sends, once."""

    skip, bit, done = 0, 7, False

    def send(self, peer, tag, buffer, token):
        if tag != 0 and not self.done:
            self.done = self.skip == 0
            self.skip -= 1
            if self.done:
                byte = ctypes.c_uint8.from_address(buffer[0])
                byte.value ^= 1 << self.bit
        super().send(peer, tag, buffer, token)


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
        # The element whose code it was, and more only where other ranks' buckets moved with it.
        assert 1 <= row.out_of_place.wrong <= 1024
        assert row.in_place.wrong == 0


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
                ("none", dtypes.FLOAT32, "min", "two_round"),
            ]
        ]

    for rows in qccl.run_ranks(size, run):
        for row in rows:
            assert row.out_of_place.wrong == row.in_place.wrong == 0
            assert row.out_of_place.seconds > 0
            assert 0 <= row.out_of_place.error < (0 if count == 0 or size == 1 else 0.5) + 1e-9


def test_the_error_is_the_codecs() -> None:
    rows = qccl.run_ranks(2, lambda comm: measured(comm, "minmax8", Case(50_000, dtypes.FLOAT32, "sum"), "one_shot"))
    assert rows[0] == rows[0] and rows[0].out_of_place.error == rows[1].out_of_place.error
    assert 0.006 < rows[0].out_of_place.error < 0.009  # one quantisation of bucket 1024 with 8 bits


def test_plain_row_is_measured_with_its_own_bound() -> None:
    def run(comm: qccl.Communicator) -> tuple[bool, Row]:
        call = PlainCall(comm, Case(3000, dtypes.FLOAT32, "avg"))
        bfloat16 = PlainCall(comm, Case(3000, dtypes.BFLOAT16, "sum")).is_supported(arrays_of(comm))
        return bfloat16, measure(comm, call, ONCE, meter=None, before_side=lambda mode: None)

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
        row = measure(comm, call, Counts(3, 1, 0), meter=lambda: next(counter), before_side=lambda mode: None)
        return row.out_of_place.crossed

    call_nbytes = 4096 * 4 * 4  # what four calls send to one peer
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
        measure(comm, call, Counts(23, 2, 0), meter=None, before_side=lambda mode: None)

    qccl.run_ranks(4, run)
    assert all(seen)
    assert len(seen) == 4 * (25 + 23 + 2 * math.ceil(23 / 3))  # in place: 8 fills, each with 2 warm-up calls


@pytest.mark.parametrize("average", [0, 1, 2, 3])
def test_times_of_the_ranks_become_one(average: int) -> None:
    from qccl.bench.measure import _combined

    assert _combined([2.0, 1.0, 6.0], average) == [2.0, 3.0, 1.0, 6.0][average]


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
def test_inputs_are_the_same_in_any_cut(dtype: dtypes.DType) -> None:
    whole = data.gaussian(1, 0, 600_000, dtype, seed=3)
    for start, stop in [(0, 10), (5, 262_139), (262_138, 262_140), (262_139, 262_139), (100, 600_000)]:
        assert np.array_equal(data.gaussian(1, start, stop, dtype, seed=3), whole[start:stop])
    values = data.to_float32(whole, dtype)
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    assert not np.array_equal(whole, data.gaussian(2, 0, 600_000, dtype, seed=3))
    assert not np.array_equal(whole, data.gaussian(1, 0, 600_000, dtype, seed=4))


def test_bfloat16_rounds_as_ml_dtypes_does() -> None:
    x = np.random.default_rng(0).integers(0, 0x7F000000, 100_000, np.uint32).view(np.float32)
    x = np.concatenate([x, -x, np.float32([0.0, -0.0, 1.00390625, 1.01171875])])
    assert np.array_equal(data.from_float32(x, dtypes.BFLOAT16), x.astype(ml_dtypes.bfloat16).view(np.uint16))


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
    assert [line.split()[-1] for line in rows] == ["loopback", "minmax8", "none"] * 2 + ["minmax8", "none"] * 2
    assert any(line.startswith("# Out of bounds values : 0 OK") for line in lines)
    assert [step[0] for step in steps] == sorted(step[0] for step in steps)
    assert all(step[0] < step[1] == 24 for step in steps)
    assert f"# Wrote {names['json']}" in lines and f"# Wrote {names['trace']}" in lines
