"""The laws of all-reduce, and what the oracles of all collectives share: parts of a vector, and bits compared."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import oracle
from cases import Case
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


def starts(counts: Sequence[int], granule: int) -> list[tuple[int, int]]:
    """For each part: its first element, and that element's number in random keys (parts have their own buckets)."""
    found, first, index = [], 0, 0
    for count in counts:
        found.append((first, index))
        first, index = first + count, index + -(-count // granule) * granule
    return found


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
