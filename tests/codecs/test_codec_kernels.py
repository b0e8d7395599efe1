"""The host kernels against the oracle, bit for bit: values, codes and bytes."""

from __future__ import annotations

import itertools

import kernel_calls
import numpy as np
import oracle
import pytest
from kernel_calls import DTYPES, KINDS, OPS, assert_same_bits, hard_values
from oracle import MinMax, RngCounter

ROUNDINGS = (False, True)
BITS = range(1, 9)


def counts(bucket: int | str) -> list[int]:
    """Counts around the sizes of groups, buckets, and the loops' blocks of 2048 elements."""
    if bucket == "shard":
        return [0, 1, 2, 7, 8, 9, 1000, 2047, 2049, 5003]
    size = int(bucket)
    return [0, 1, 2, 7, size - 1, size, size + 1, 3 * size + 5]


def check_round_trip(codec: MinMax, values: np.ndarray, dtype: str, counter: RngCounter, what: str) -> None:
    wire = kernel_calls.encode(codec, values, dtype, counter)
    assert_same_bits(wire, oracle.encode(codec, values, dtype, counter), f"wire of {what}")
    decoded = kernel_calls.decode(codec, wire, values.size, dtype)
    assert_same_bits(decoded, oracle.decode(codec, wire, values.size, dtype), f"decoded {what}")
    added = kernel_calls.decode(codec, wire, values.size, dtype, add_to=values)
    assert_same_bits(added, oracle.decode(codec, wire, values.size, dtype, add_to=values), f"accumulated {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stochastic", ROUNDINGS, ids=["nearest", "stochastic"])
@pytest.mark.parametrize("bits", BITS)
def test_encode_decode_accumulate(bits: int, stochastic: bool, dtype: str) -> None:
    rng = np.random.default_rng([bits, stochastic, DTYPES.index(dtype)])
    kinds = itertools.cycle(rng.permutation(KINDS))
    for bucket in (8, 64, 1024, 4096, "shard"):
        codec = MinMax(bits, bucket, stochastic, seed=int(rng.integers(1 << 63)))
        for count in counts(bucket):
            kind = next(kinds)
            call, turn, rank, index = rng.integers(0, [1 << 63, 1 << 32, 1 << 32, 1 << 62]).tolist()
            # random words from a multiple of 64 on have another code path
            counter = RngCounter(call, turn, rank, index & ~63 if count % 2 else index)
            values = hard_values(kind, count, dtype, rng)
            check_round_trip(codec, values, dtype, counter, f"{kind}, {codec}, {count} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_hard_values(kind: str, dtype: str) -> None:
    rng = np.random.default_rng([KINDS.index(kind), DTYPES.index(dtype)])
    for bits, stochastic, bucket in itertools.product((1, 3, 4, 8), ROUNDINGS, (8, 32, "shard")):
        values = hard_values(kind, 101, dtype, rng)
        codec = MinMax(bits, bucket, stochastic, seed=5)
        check_round_trip(codec, values, dtype, RngCounter(), f"{kind}, {codec}, {dtype}")


@pytest.fixture(scope="module")
def without_chance() -> int:
    """An element whose random number is zero with seed 3."""
    return int(np.flatnonzero(oracle.random_words(1 << 25, 3, RngCounter()) >> 8 == 0)[0])


@pytest.mark.parametrize("top", [1e-36, 1e-3, 1.0, 300.0, 1e10, 1e25, 1e36])
@pytest.mark.parametrize("low", [0.0, -1e-20, 1e-30, -1.0])
def test_the_least_step_above_a_code_rounds_up_by_the_least_chance(low: float, top: float, without_chance: int) -> None:
    """However small the position is, unless it is zero."""
    values = np.linspace(low, top, 192, dtype=np.float32)
    values[without_chance % 64] = np.nextafter(np.float32(low), np.float32(np.inf))
    values[64:68] = [1e-45, 1e-40, 1e-38, 1e-30]
    values = np.maximum(values, np.float32(low))
    for bits in (1, 4, 8):
        codec = MinMax(bits, "shard", stochastic=True, seed=3)
        check_round_trip(
            codec, values, "float32", RngCounter(index=without_chance // 64 * 64), f"{bits} bits, {low} to {top}"
        )


def test_index_passes_a_multiple_of_two_to_the_32() -> None:
    """The upper half of the element index changes in the middle of a block."""
    codec = MinMax(8, "shard", stochastic=True, seed=3)
    values = np.linspace(-1, 1, 300, dtype=np.float32)
    for before in (1, 13, 299):
        counter = RngCounter(index=(1 << 32) - before)
        check_round_trip(codec, values, "float32", counter, f"index wraps after {before}")


@pytest.mark.parametrize("count", [0, 1, 7, 2048, 2049, 5003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_none_copies(dtype: str, count: int) -> None:
    rng = np.random.default_rng(count)
    values = hard_values("bit patterns", count, dtype, rng)
    wire = kernel_calls.encode(None, values, dtype, RngCounter())
    assert_same_bits(wire, values.view(np.uint8), "wire")
    assert_same_bits(kernel_calls.decode(None, wire, count, dtype), values, "decoded")
    other = hard_values("special", count, dtype, rng)
    expected = oracle.decode(None, wire, count, dtype, add_to=other)
    assert_same_bits(kernel_calls.decode(None, wire, count, dtype, add_to=other), expected, "accumulated")


def reduce_case(rng: np.random.Generator, codec: MinMax | None, dtype: str) -> None:
    """One random reduction against the oracle."""
    sizes = counts("shard" if codec is None else codec.bucket)
    count, kind = int(rng.choice(sizes)), str(rng.choice(KINDS))
    wires = [
        oracle.encode(codec, hard_values(kind, count, dtype, rng), dtype, RngCounter(rank=i))
        for i in range(rng.integers(0, 5))
    ]
    own = hard_values(kind, count, dtype, rng) if not wires or rng.random() < 0.7 else None
    own_index = int(rng.integers(0, len(wires) + 1))
    op, scale = str(rng.choice(OPS)), float(rng.choice([1, 1, 1 / 3, 0.25]))
    encoded = bool(rng.random() < 0.7)
    with_out = not encoded or bool(rng.random() < 0.8)
    counter = RngCounter(*rng.integers(0, 1000, 4).tolist())
    wire, out = kernel_calls.reduce(
        codec, wires, own, own_index, count, dtype, op=op, scale=scale, encoded=encoded, counter=counter,
        in_place=own is not None and with_out and bool(rng.random() < 0.5), with_out=with_out,
    )  # fmt: skip
    wanted_wire, wanted_out = oracle.reduce(
        codec, wires, own, own_index, count, dtype, op=op, scale=scale, encoded=encoded, counter=counter
    )
    what = (
        f"{op} * {scale} of {len(wires)} wires, own {own is not None} at {own_index}: {kind}, {codec}, {count} {dtype}"
    )
    assert_same_bits(wire, wanted_wire, f"wire of {what}")
    assert_same_bits(out, wanted_out if with_out else None, f"out of {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stochastic", ROUNDINGS, ids=["nearest", "stochastic"])
@pytest.mark.parametrize("bits", BITS)
def test_reduce(bits: int, stochastic: bool, dtype: str) -> None:
    rng = np.random.default_rng([7, bits, stochastic, DTYPES.index(dtype)])
    for bucket in (8, 64, 1024, 4096, "shard"):
        for _ in range(4):
            reduce_case(rng, MinMax(bits, bucket, stochastic, seed=11), dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sources", [16, 17, 40])
def test_reduce_of_many_sources(sources: int, bits: int) -> None:
    """More sources than a loop handles; the own values come first, at each border, last or not at all."""
    rng = np.random.default_rng(sources)
    codec, count = MinMax(bits, 64), 101
    wires = [
        oracle.encode(codec, hard_values("normal", count, "float32", rng), "float32", RngCounter())
        for _ in range(sources)
    ]
    for own_index, op in itertools.product((0, 1, 15, 16, 17, 32, sources, None), OPS):
        if own_index is not None and own_index > sources:
            continue
        own = None if own_index is None else hard_values("normal", count, "float32", rng)
        arguments = (codec, wires, own, own_index or 0, count, "float32")
        wire, out = kernel_calls.reduce(*arguments, op=op, scale=1 / 3, encoded=True, counter=RngCounter())
        wanted_wire, wanted_out = oracle.reduce(*arguments, op=op, scale=1 / 3, encoded=True)
        assert_same_bits(wire, wanted_wire, f"wire of {op} of {sources} wires, own at {own_index}")
        assert_same_bits(out, wanted_out, f"out of {op} of {sources} wires, own at {own_index}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_none(dtype: str) -> None:
    rng = np.random.default_rng(DTYPES.index(dtype))
    for _ in range(40):
        reduce_case(rng, None, dtype)


def test_conversions_of_every_half_precision_pattern() -> None:
    """Each of the 65,536 patterns to float32 and back, seen through a sum of one term."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for dtype in ("float16", "bfloat16"):
        values = patterns.view(oracle.storage(dtype))
        _, out = kernel_calls.reduce(
            None,
            [values.view(np.uint8)],
            None,
            0,
            values.size,
            dtype,
            op="sum",
            scale=1,
            encoded=False,
            counter=RngCounter(),
        )
        assert_same_bits(out, oracle.from_float(oracle.to_float(values, dtype), dtype), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversion_rounds_to_nearest_even(dtype: str) -> None:
    """A sum of two terms has more bits than the type: every kind of tie, overflow and subnormal result."""
    rng = np.random.default_rng(0)
    a, b = (hard_values("bit patterns", 1 << 17, dtype, rng) for _ in range(2))
    for scale in (1.0, 2.0**-12, 1.0001):
        _, out = kernel_calls.reduce(
            None, [a.view(np.uint8)], b, 1, a.size, dtype, op="sum", scale=scale, encoded=False, counter=RngCounter()
        )
        _, wanted = oracle.reduce(None, [a.view(np.uint8)], b, 1, a.size, dtype, op="sum", scale=scale, encoded=False)
        assert_same_bits(out, wanted, f"{dtype} times {scale}")
