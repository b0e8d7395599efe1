"""The host kernels of every codec against the oracle, bit for bit: values, codes and bytes."""

from __future__ import annotations

import dataclasses
import itertools

import kernel_calls
import numpy as np
import oracle
import pytest
from codec_table import ALL
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import DTYPES, KINDS, OPS, assert_same_bits, hard_values
from oracle import MinMax, RngCounter

pytestmark = pytest.mark.starts_first

MINMAX = [MinMax(bits, 1024, stochastic, seed=11) for bits in range(1, 9) for stochastic in (False, True)]
EVERY = pytest.mark.parametrize(
    "codec", [None, *MINMAX, *ALL], ids=lambda codec: kernel_calls.library_codec(codec).spec()
)
#: of each codec, because there are a hundred
FEWER = settings(max_examples=settings.default.max_examples // 6)


class Draw:
    """Draws of one codec: where Hypothesis may choose, the first of several values is the simplest."""

    def __init__(self, data: st.DataObject, codec: oracle.Codec) -> None:
        self._data = data
        if isinstance(codec, MinMax):
            codec = dataclasses.replace(codec, bucket=self.one_of(8, 64, 1024, 4096, "shard"))
        self.codec, self.dtype = codec, self.one_of(*DTYPES)
        bucket = 2048 if codec is None else codec.bucket
        bucket = 2500 if bucket == "shard" else bucket
        self.count = self.one_of(self.one_of(0, 1, 2, 7, 13), bucket - 1, bucket, bucket + 1, 3 * bucket + 13)
        self.rng = np.random.default_rng(self.number(1000))

    def one_of(self, *values):
        return self._data.draw(st.sampled_from(values))

    def number(self, most: int) -> int:
        return self._data.draw(st.integers(0, most))

    def values(self) -> np.ndarray:
        return hard_values(self.one_of(*KINDS), self.count, self.dtype, self.rng)

    def counter(self) -> RngCounter:
        """Any place of a random number: their loops take another way from multiples of 64 on."""
        index = self.one_of(0, 8, 64, (1 << 32) - 8, (1 << 61) + 8)
        return RngCounter(self.number((1 << 63) - 1), self.number(1000), self.number(1000), index)


def check_round_trip(
    codec: oracle.Codec, values: np.ndarray, dtype: str, counter: RngCounter, before: np.ndarray | None = None
) -> None:
    wire = oracle.encode(codec, values, dtype, counter)
    assert_same_bits(kernel_calls.encode(codec, values, dtype, counter), wire, "wire")
    check_decode(codec, wire, values.size, dtype, counter, values if before is None else before)


def check_decode(codec: oracle.Codec, wire: np.ndarray, count: int, dtype: str, counter: RngCounter, before) -> None:
    for add_to in (None, before):
        found = kernel_calls.decode(codec, wire, count, dtype, add_to, counter)
        wanted = oracle.decode(codec, wire, count, dtype, add_to, counter)
        assert_same_bits(found, wanted, "values" if add_to is None else "values added to others")


@EVERY
@FEWER
@given(data=st.data())
def test_encode_and_decode(codec: oracle.Codec, data: st.DataObject) -> None:
    draw = Draw(data, codec)
    check_round_trip(draw.codec, draw.values(), draw.dtype, draw.counter(), draw.values())


@EVERY
def test_every_kind_of_values(codec: oracle.Codec) -> None:
    """Of each element type; test_encode_and_decode draws some of them, and small vectors more often than buckets."""
    bucket, rng = 1000 if codec is None else codec.bucket, np.random.default_rng(1)
    counts = (bucket - 1, bucket + 1, 2 * bucket + 13) if bucket < 3000 else (bucket // 4, 13)
    for number, (kind, dtype) in enumerate(itertools.product(KINDS, DTYPES)):
        values, before = (hard_values(kind, counts[number % len(counts)], dtype, rng) for _ in range(2))
        check_round_trip(codec, values, dtype, RngCounter(number, 1, 2, (1 << 32) - 8), before)


@EVERY
@FEWER
@given(data=st.data())
def test_foreign_bytes_decode_as_the_oracles(codec: oracle.Codec, data: st.DataObject) -> None:
    """Any bytes: ranges that are reversed, infinite or NaN, indices that are none."""
    draw = Draw(data, codec)
    nbytes = kernel_calls.wire_nbytes(draw.codec, draw.count, draw.dtype)
    wire = np.resize(draw.rng.integers(0, draw.one_of(256, 4, 1), nbytes, np.uint8), nbytes)
    if isinstance(draw.codec, MinMax) and draw.one_of(True, False):
        strange = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0, 1e-45, -1e-38, 1.0], np.float32)
        ranges = draw.rng.choice(strange, 2 * len(draw.codec.buckets(draw.count)))
        wire[nbytes - ranges.nbytes :] = ranges.view(np.uint8)
    counter, before = draw.counter(), draw.values()
    found, wanted = (
        f(draw.codec, wire, draw.count, draw.dtype, counter=counter) for f in (kernel_calls.decode, oracle.decode)
    )
    assert_same_bits(found, wanted, "values")
    if not np.isnan(oracle.to_float(wanted, draw.dtype)).any():
        check_decode(draw.codec, wire, draw.count, draw.dtype, counter, before)


@EVERY
@FEWER
@given(data=st.data())
def test_reduce(codec: oracle.Codec, data: st.DataObject) -> None:
    """Own values among others' codes, before them, behind them or none; of the results both or one."""
    draw = Draw(data, codec)
    counter = draw.counter()
    ranks = draw.rng.permutation(9)[: draw.number(4)].tolist()
    makers = [RngCounter(counter.call, 2, rank, counter.index) for rank in ranks]
    wires = [oracle.encode(draw.codec, draw.values(), draw.dtype, maker) for maker in makers]
    own = draw.values() if not wires or draw.one_of(True, False) else None
    is_sparse = kernel_calls.library_codec(draw.codec).sparse
    encoded = draw.one_of(True, False)
    with_out = not encoded or draw.one_of(True, False)
    arguments = draw.codec, wires, own, 0 if own is None else draw.number(len(wires)), draw.count, draw.dtype
    options = {"op": draw.one_of(*OPS[: 1 if is_sparse else None]), "scale": draw.one_of(1.0, 1 / 3, 0.25)}
    options |= {"encoded": encoded, "counter": counter, "makers": makers}
    in_place = own is not None and with_out and draw.one_of(False, True)
    wire, out = kernel_calls.reduce(*arguments, **options, in_place=in_place, with_out=with_out)
    wanted_wire, wanted_out = oracle.reduce(*arguments, **options)
    assert_same_bits(wire, wanted_wire, "wire")
    assert_same_bits(out, wanted_out if with_out else None, "out")


#: an element whose random number is zero with seed 3
WITHOUT_CHANCE = 18_318_943


@pytest.mark.parametrize("top", [1e-36, 1e-3, 1.0, 300.0, 1e10, 1e25, 1e36])
@pytest.mark.parametrize("low", [0.0, -1e-20, 1e-30, -1.0])
def test_the_least_step_above_a_code_rounds_up_by_the_least_chance(low: float, top: float) -> None:
    """However small the position is, unless it is zero."""
    assert oracle.random_words(1, 3, RngCounter(index=WITHOUT_CHANCE))[0] >> 8 == 0
    values = np.linspace(low, top, 192, dtype=np.float32)
    values[WITHOUT_CHANCE % 64] = np.nextafter(np.float32(low), np.float32(np.inf))
    values[64:68] = [1e-45, 1e-40, 1e-38, 1e-30]
    values = np.maximum(values, np.float32(low))
    for bits in (1, 4, 8):
        codec = MinMax(bits, "shard", stochastic=True, seed=3)
        check_round_trip(codec, values, "float32", RngCounter(index=WITHOUT_CHANCE // 64 * 64))


def test_index_passes_a_multiple_of_two_to_the_32() -> None:
    """The upper half of the element index changes in the middle of a block."""
    codec = MinMax(8, "shard", stochastic=True, seed=3)
    values = np.linspace(-1, 1, 300, dtype=np.float32)
    for before in (1, 13, 299):
        counter = RngCounter(index=(1 << 32) - before)
        check_round_trip(codec, values, "float32", counter)


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
        wire, out = kernel_calls.reduce(*arguments, op=op, scale=1 / 3)
        wanted_wire, wanted_out = oracle.reduce(*arguments, op=op, scale=1 / 3, encoded=True)
        assert_same_bits(wire, wanted_wire, f"wire of {op} of {sources} wires, own at {own_index}")
        assert_same_bits(out, wanted_out, f"out of {op} of {sources} wires, own at {own_index}")


def test_conversions_of_every_half_precision_pattern() -> None:
    """Each of the 65,536 patterns to float32 and back, seen through a sum of one term."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for dtype in ("float16", "bfloat16"):
        values = patterns.view(oracle.storage(dtype))
        _, out = kernel_calls.reduce(None, [values.view(np.uint8)], None, 0, values.size, dtype, encoded=False)
        assert_same_bits(out, oracle.from_float(oracle.to_float(values, dtype), dtype), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversion_rounds_to_nearest_even(dtype: str) -> None:
    """A sum of two terms has more bits than the type: every kind of tie, overflow and subnormal result."""
    rng = np.random.default_rng(0)
    a, b = (hard_values("bit patterns", 1 << 17, dtype, rng) for _ in range(2))
    for scale in (1.0, 2.0**-12, 1.0001):
        arguments = None, [a.view(np.uint8)], b, 1, a.size, dtype
        _, out = kernel_calls.reduce(*arguments, scale=scale, encoded=False)
        _, wanted = oracle.reduce(*arguments, op="sum", scale=scale, encoded=False)
        assert_same_bits(out, wanted, f"{dtype} times {scale}")
