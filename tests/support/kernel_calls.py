"""Calls of the host kernels on NumPy arrays between guard areas, and values that are hard on codecs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import oracle
from oracle import MinMax, RngCounter

from qccl import _host, codecs
from qccl.base import dtypes

DTYPES = tuple(dtype.name for dtype in dtypes.DTYPES)
OPS = ("sum", "min", "max")

#: the counter of a single encode or decode
FIRST = RngCounter()

_GUARD = 256
_PATTERN = 0xA5


class Arena:
    """Arrays with guard areas on both sides, as numbered buffers of one Memory."""

    def __init__(self, call: int = 0) -> None:
        self._slots: list[tuple[np.ndarray, int]] = []
        self._call = call

    def add(self, content: np.ndarray) -> tuple[int, int]:
        """Store a copy of ``content`` and return its (buffer, byte offset)."""
        base = np.full(content.nbytes + 2 * _GUARD, _PATTERN, np.uint8)
        base[_GUARD : _GUARD + content.nbytes] = content.view(np.uint8)
        self._slots.append((base, content.nbytes))
        return len(self._slots) - 1, _GUARD

    def memory(self) -> _host.Memory:
        memory = _host.Memory(len(self._slots))
        memory.call = self._call
        for i, (base, _) in enumerate(self._slots):
            memory[i] = base.ctypes.data
        return memory

    def take(self, ref: tuple[int, int], dtype: Any = np.uint8) -> np.ndarray:
        """The content of a buffer. Asserts that no guard area was written."""
        for i, (base, nbytes) in enumerate(self._slots):
            outside = np.concatenate([base[:_GUARD], base[_GUARD + nbytes :]])
            assert (outside == _PATTERN).all(), f"buffer {i} was written outside its {nbytes} bytes"
        base, nbytes = self._slots[ref[0]]
        return base[_GUARD : _GUARD + nbytes].copy().view(dtype)


@cache
def library_codec(codec: oracle.Codec) -> codecs.Codec:
    """qccl's codec for one of the oracle's."""
    if codec is None:
        return codecs.NoCodec()
    if isinstance(codec, MinMax):
        rounding = "stochastic" if codec.stochastic else "nearest"
        return codecs.MinMax(codec.bits, codec.bucket, rounding, codec.seed)
    return codecs.get(codec.spec)


def kernel(codec: oracle.Codec) -> Any:
    return library_codec(codec).host()


def wire_nbytes(codec: oracle.Codec, count: int, dtype: str) -> int:
    return library_codec(codec).encoded_nbytes(count, dtype)


def encode(codec: oracle.Codec, values: np.ndarray, dtype: str, counter: RngCounter) -> np.ndarray:
    arena = Arena(counter.call)
    src = arena.add(values)
    wire = arena.add(np.zeros(wire_nbytes(codec, values.size, dtype), np.uint8))
    code = dtypes.get(dtype).code
    _host.Encode(
        arena.memory(), kernel(codec), code, src, wire, values.size, counter.index, counter.round, counter.rank
    )()
    assert same_bits(arena.take(src, values.dtype), values)
    return arena.take(wire)


def decode(
    codec: oracle.Codec,
    wire: np.ndarray,
    count: int,
    dtype: str,
    add_to: np.ndarray | None = None,
    counter: RngCounter = FIRST,
) -> np.ndarray:
    arena = Arena(counter.call)
    source = arena.add(wire)
    before = np.zeros(count, oracle.storage(dtype)) if add_to is None else add_to
    dst = arena.add(before)
    code = dtypes.get(dtype).code
    key = counter.index, counter.round, counter.rank
    _host.Decode(arena.memory(), kernel(codec), code, source, dst, count, add_to is not None, *key)()
    return arena.take(dst, before.dtype)


def reduce(
    codec: oracle.Codec,
    wires: Sequence[np.ndarray],
    own: np.ndarray | None,
    own_index: int,
    count: int,
    dtype: str,
    *,
    op: str = "sum",
    scale: float = 1.0,
    encoded: bool = True,
    counter: RngCounter = FIRST,
    makers: Sequence[RngCounter] | None = None,
    in_place: bool = False,
    with_out: bool = True,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(wire, out), None if not asked for."""
    arena = Arena(counter.call)
    sources = [arena.add(wire) for wire in wires]
    own_place = None if own is None else arena.add(own)
    out: tuple[int, int] | None = None
    if with_out:
        out = own_place if in_place else arena.add(np.zeros(count, oracle.storage(dtype)))
    wire = arena.add(np.zeros(wire_nbytes(codec, count, dtype), np.uint8)) if encoded else None
    _host.Reduce(
        arena.memory(), kernel(codec), dtypes.get(dtype).code, sources, own_place, own_index, wire, out, count,
        OPS.index(op), scale, counter.index, counter.round, counter.rank,
        [maker.rank for maker in makers or ()], makers[0].round if makers else 0,
    )()  # fmt: skip
    return (None if wire is None else arena.take(wire), None if out is None else arena.take(out, oracle.storage(dtype)))


def errors(codec: codecs.Codec, x: np.ndarray, call: int = 0) -> np.ndarray:
    """|decode(encode(x)) - x| of float32 values, exact in float64."""
    y = codec.decode(codec.encode(x, call), x.size, "float32", call)
    return np.abs(y.astype(np.float64) - x.astype(np.float64))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_bits(found: np.ndarray | None, expected: np.ndarray | None, what: str) -> None:
    """Assert equal bits; the message names the first element that differs."""
    if found is None or expected is None:
        assert found is expected, what
        return
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    if same_bits(found, expected):
        return
    bits = np.dtype(f"u{found.itemsize}")
    bad = np.flatnonzero(found.view(bits) != expected.view(bits))
    i = bad[0]
    raise AssertionError(f"{what}: {bad.size} of {found.size} differ, first at {i}: {found[i]} for {expected[i]}")


KINDS = (
    "normal", "uniform", "constant", "zeros", "signed zeros", "subnormal", "negative", "huge", "overflowing sums",
    "offset", "outliers", "blocks apart", "one NaN", "one infinity", "special", "bit patterns",
)  # fmt: skip
#: without NaN and infinity
FINITE_KINDS = tuple(kind for kind in KINDS if kind not in ("one NaN", "one infinity", "special", "bit patterns"))


def hard_values(kind: str, count: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """``count`` values of one hard kind, in the storage of ``dtype``."""
    if kind == "bit patterns":
        return rng.integers(0, 256, count * dtypes.get(dtype).itemsize, np.uint8).view(oracle.storage(dtype))
    tiny = {"float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}[dtype]
    large = {"float32": 3.4e38, "float16": 6.5e4, "bfloat16": 3.38e38}[dtype]
    x = rng.standard_normal(count)
    if kind == "uniform":
        x = rng.random(count)
    elif kind == "constant":
        x = np.full(count, rng.choice([1e-3, -7.0, 5e4, large, -tiny / 8]))
    elif kind == "zeros":
        x = np.zeros(count) * rng.choice([1, -1])
    elif kind == "signed zeros":
        x = np.where(x < 0, -0.0, 0.0)
    elif kind == "subnormal":
        x = x * tiny / 4
    elif kind == "negative":
        x = -np.abs(x) - 3
    elif kind == "huge":
        x = np.clip(x, -1, 1) * large
    elif kind == "overflowing sums":
        x = np.full(count, large) * np.where(rng.random(count) < 0.1, 1e-3, 1)
    elif kind == "offset":
        x = 1000 + x / 100
    elif kind == "outliers":
        x = np.where(rng.random(count) < 0.01, x * 1000, x)
    elif kind == "blocks apart":  # neighbouring blocks, of a bucket, too, have very different magnitudes
        block, largest = int(rng.choice([8, 16, 32, 64, 128])), rng.choice([1, 1e9, 1e30])
        x *= rng.choice([min(largest, large / 8), 1, tiny, tiny / 64], -(-count // block)).repeat(block)[:count]
    elif kind == "one NaN":
        x[rng.integers(0, count, min(count, 1))] = rng.choice([np.nan, -np.nan])
    elif kind == "one infinity":
        x[rng.integers(0, count, min(count, 1))] = rng.choice([np.inf, -np.inf])
    elif kind == "nonfinite":  # in some places, so that some buckets stay whole
        x[rng.integers(0, max(count, 1), min(count, 3))] = [np.nan, np.inf, -np.inf][: min(count, 3)]
    elif kind == "special":
        choices = [np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, large, -large, 1.0]
        x = rng.choice(choices, count)
    with np.errstate(over="ignore", under="ignore"):
        return oracle.from_float(x.astype(np.float32), dtype)
