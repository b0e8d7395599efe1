"""The laws of all-reduce, against an oracle that knows shards and rounds but neither chunks, slots nor schedules."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
from cases import BUCKET, Case, law_cases
from codec_table import oracle_of

import qccl
from qccl.codecs import get
from qccl.dtypes import get as dtype_of


def oracle_codec(spec: str) -> oracle.Codec:
    return oracle_of(get(spec))


def shards(count: int, parts: int, granule: int) -> list[slice]:
    granules = -(-count // granule)
    edges = [min(granules * r // parts * granule, count) for r in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def stored(x: np.ndarray) -> np.ndarray:
    """As the oracle wants it: bfloat16 as uint16."""
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def expected(case: Case, call: int = 0) -> np.ndarray:
    """What every rank must hold, bit for bit (law 1)."""
    codec, dtype, n, size = oracle_codec(case.codec), case.dtype, case.ranks, case.length
    inputs = [stored(case.input(r)) for r in range(n)]
    op, scale = ("sum", 1 / n) if case.op == "avg" else (case.op, 1.0)
    common = {"dtype": dtype, "op": op, "scale": scale}
    if n == 1:
        return inputs[0]
    if case.algorithm == "one_shot":
        makers = [oracle.RngCounter(call, 0, rank) for rank in range(n)]
        wires = [oracle.encode(codec, x, dtype, maker) for x, maker in zip(inputs, makers, strict=True)]
        return oracle.reduce(codec, wires, None, 0, size, encoded=False, makers=makers, **common)[1]
    result = np.empty_like(inputs[0])
    for owner, shard in enumerate(shards(size, n, get(case.codec).granule)):
        makers = [oracle.RngCounter(call, 0, rank, shard.start) for rank in range(n) if rank != owner]
        wires = [oracle.encode(codec, inputs[maker.rank][shard], dtype, maker) for maker in makers]
        counter = oracle.RngCounter(call, 1, owner, shard.start)
        own, count = inputs[owner][shard], shard.stop - shard.start
        result[shard] = oracle.reduce(
            codec, wires, own, owner, count, encoded=True, counter=counter, makers=makers, **common
        )[1]
    return result


def run(comm: qccl.Communicator, case: Case) -> np.ndarray:
    """One call; checks the input afterwards, and that nothing beside the output was written."""
    x = case.input(comm.rank)
    before = x.tobytes()
    if case.in_place:
        y = comm.quantized_allreduce(x, **case.arguments())
    else:
        memory = np.full((case.length + 32) * x.itemsize, 0xA5, np.uint8)
        y = memory[16 * x.itemsize :][: case.length * x.itemsize].view(x.dtype)
        comm.quantized_allreduce(x, out=y, **case.arguments())
        assert x.tobytes() == before
        guards = np.delete(memory, slice(16 * x.itemsize, (16 + case.length) * x.itemsize))
        assert (guards == 0xA5).all()
    return stored(y)


def assert_same_bits(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    kind = np.uint32 if found.itemsize == 4 else np.uint16
    differ = np.flatnonzero(found.view(kind) != wanted.view(kind))
    if differ.size:
        i = int(differ[0])
        raise AssertionError(f"{what}: {differ.size} differ, first [{i}]: {found[i]!r} for {wanted[i]!r}")


def check_exact(case: Case, y: np.ndarray) -> None:
    """Law 4: not finite where the exact result is not, and within the derived bound where the bucket is clean."""
    dtype = dtype_of(case.dtype)
    inputs = [oracle.to_float(stored(case.input(r)), case.dtype).astype(np.float64) for r in range(case.ranks)]
    combine = {"sum": np.sum, "avg": np.mean, "min": np.min, "max": np.max}[case.op]
    with np.errstate(invalid="ignore", over="ignore"):
        exact = combine(np.stack(inputs), axis=0)
    result = oracle.to_float(y, case.dtype)
    assert not np.isfinite(result[~np.isfinite(exact)]).any()
    if case.data != "nonfinite":
        return
    bucket = get(case.codec).granule if "bucket=shard" not in case.codec else case.length
    if case.codec == "none":
        bucket = 1
    dirty = np.zeros(case.length, bool)
    for i in np.flatnonzero(~np.isfinite(np.stack(inputs)).all(axis=0)):
        dirty[i // bucket * bucket : (i // bucket + 1) * bucket] = True
    if dtype.name == "float32":
        assert np.isfinite(result[~dirty]).all(), "the damage left its bucket"


@pytest.mark.parametrize("case", law_cases(), ids=str)
def test_laws(case):
    results = qccl.run_ranks(case.ranks, lambda comm: run(comm, case))
    wanted = expected(case)
    for rank, found in enumerate(results):
        assert_same_bits(found, wanted, f"rank {rank}")
    check_exact(case, results[0])


@pytest.mark.parametrize("algorithm", ["two_round", "one_shot"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_chunks_do_not_change_the_result(algorithm, rounding):
    cases = [
        Case(3, 7 * BUCKET + 5, "normal", "float32", "sum", f"minmax5:bucket={BUCKET},rounding={rounding}", *rest)
        for rest in [(algorithm, chunk, False) for chunk in (1, BUCKET, 3 * BUCKET, 10**6)]
    ]
    found = [qccl.run_ranks(3, lambda comm, c=case: run(comm, c))[0] for case in cases]
    for other in found[1:]:
        assert_same_bits(other, found[0], algorithm)


def test_stochastic_calls_differ_and_repeat():
    """Law 7: the call number keys the random numbers, so a second call rounds anew and a second run repeats both."""

    def two_calls(comm):
        case = Case(3, 2000, "normal", "float32", "sum", "minmax4:rounding=stochastic,seed=3", "two_round", None, False)
        return [run(comm, case), run(comm, case)], expected(case, call=1)

    first, again = qccl.run_ranks(3, two_calls), qccl.run_ranks(3, two_calls)
    for (a, b), second in first:
        assert (a != b).any()
        assert_same_bits(b, second, "second call")
    assert_same_bits(first[0][0][0], again[0][0][0], "repeated")
    assert_same_bits(first[0][0][1], again[0][0][1], "repeated")


def test_the_result_does_not_depend_on_timing():
    """Ranks that are slow at random places change nothing."""
    case = Case(4, 20 * BUCKET, "normal", "float32", "sum", f"minmax3:bucket={BUCKET}", "two_round", BUCKET, True)

    def jittery(comm):
        import time

        rng = np.random.default_rng(comm.rank)
        poll = comm.transport.poll

        def slow_poll(*, idle):
            time.sleep(float(rng.choice([0, 0, 0.002])))
            return poll(idle=idle)

        comm.transport.poll = slow_poll
        return run(comm, case)

    for found in qccl.run_ranks(4, jittery):
        assert_same_bits(found, expected(case), "jitter")
