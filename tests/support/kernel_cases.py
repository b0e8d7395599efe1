"""Operations of every codec for emulated CUDA kernels, with the host's results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import kernel_calls
import numpy as np
import oracle
from cases import pairwise
from codec_table import ALL, TABLE, oracle_of
from kernel_calls import KINDS, hard_values
from oracle import RngCounter
from spans import Arrays

from qccl import codecs, dtypes
from qccl.codecs import Codec, MinMax, NoCodec, Trellis
from qccl.cuda import source as cuda_source
from qccl.cuda.source import Launch
from qccl.dtypes import DType
from qccl.schedule import Decode, Encode, Op, Reduce, Span

RANK = 3
#: all codecs but none and minmax
BUCKETED = [codecs.get(codec.spec) for codec in ALL]
VARIANTS = ("sum", "avg", "min", "max", "no wire", "no out", "no own", "in place", "one source", "own last")


class Runs(Protocol):
    """An emulator of kernels."""

    def run(
        self, launch: Launch, arrays: Arrays, call: int, seed: int = 0, lr: float = 1.0, *, failed: bool = False
    ) -> None:
        """As a device would, in the memory of ``arrays``; ``failed``: after a failure of the communicator."""


class Prepared(Protocol):
    """Launches with the results that they must have."""

    @property
    def launches(self) -> Mapping[str, Launch]:
        """By what they do."""

    @property
    def arrays(self) -> Arrays:
        """Their memory."""

    def check(self, emulator: Runs, kinds: Iterable[str] | None = None, seed: int = 0) -> None:
        """Run the launches, all or of some kinds, and assert that their results are the host's."""


@dataclass(frozen=True)
class Case:
    """A codec, an element type, a kind of Reduce, and whether all addresses are multiples of 16."""

    codec: Codec
    dtype: DType
    variant: str
    aligned: bool

    def __str__(self) -> str:
        return f"{self.codec.spec()}-{self.dtype}-{self.variant}-{'aligned' if self.aligned else 'anywhere'}"

    @property
    def counts(self) -> tuple[int, ...]:
        bucket = getattr(self.codec, "bucket", 600)
        if bucket == "shard":
            return (9000, 1, 8192) if self.codec.kernel().seed % 2 else (13, 2000)
        return (bucket + 5, 1, 2 * bucket) if bucket > 5000 else (1, 7, bucket - 1, bucket, bucket + 1, 3 * bucket + 13)


class Operations:
    """The operations of a case, their launches, and the host's results."""

    def __init__(self, case: Case, seed: int = 1, kinds: Sequence[str] = KINDS) -> None:
        """``kinds`` of values."""
        self.case = case
        self.rng = np.random.default_rng([seed, sum(map(ord, str(case)))])
        self.arrays = Arrays(case.aligned, self.rng)
        self.call = int(self.rng.integers(0, 1 << 40))
        self._kinds = itertools.cycle(self.rng.permutation(kinds))
        self._expected: list[tuple[str, str, Span, np.ndarray]] = []
        groups: dict[str, list[Op]] = {"encode": [], "decode": [], "add": [], "reduce": []}
        for count in case.counts:
            for group, op in zip(groups.values(), self._operations(count), strict=True):
                group.append(op)
        self.launches: dict[str, Launch] = {
            kind: cuda_source.launch(group, RANK, case.dtype, self.arrays.place) for kind, group in groups.items()
        }

    @property
    def oracle_codec(self) -> oracle.Codec:
        return oracle_of(self.case.codec)

    def check(self, emulator: Runs, kinds: Iterable[str] | None = None, seed: int = 0) -> None:
        chosen = [*(self.launches if kinds is None else kinds)]
        for kind in chosen:
            emulator.run(self.launches[kind], self.arrays, self.call, seed)
        self.arrays.check_guards()
        for kind, what, span, expected in self._expected:
            if kind in chosen:
                found = self.arrays.take(span, expected.dtype.type)
                kernel_calls.assert_same_bits(found, expected, f"{self.case}: {what}")

    def _values(self, count: int) -> np.ndarray:
        return hard_values(next(self._kinds), count, self.case.dtype.name, self.rng)

    def _operations(self, count: int) -> Sequence[Op]:
        case, codec, dtype = self.case, self.oracle_codec, self.case.dtype.name
        nbytes = case.codec.encoded_nbytes(count, dtype)
        # in some, the upper half of the element's index changes
        index = (1 << 32) - 8 * int(self.rng.integers(0, 40)) if self.rng.random() < 0.5 else 8 * count
        counters = [RngCounter(self.call, round, RANK, index) for round in (0, 1)]

        values = self._values(count)
        wire = kernel_calls.encode(codec, values, dtype, counters[0])
        if count < 3000:
            kernel_calls.assert_same_bits(wire, oracle.encode(codec, values, dtype, counters[0]), "the host's wire")
        target = self.arrays.add(np.full(nbytes, 0xC3, np.uint8))
        encode = Encode(case.codec, self.arrays.add(values), target, index)
        self._expect("encode", f"wire of {count}", target, wire)

        if self.rng.random() < 0.3:  # invalid bytes
            wire = self.rng.integers(0, 256, nbytes, np.uint8)
        source = self.arrays.add(wire)
        maker = {"index": index, "round": 0, "rank": RANK}
        decode = Decode(case.codec, source, self.arrays.add(self._values(count)), **maker)
        found = kernel_calls.decode(codec, wire, count, dtype, counter=counters[0])
        self._expect("decode", f"values of {count}", decode.dst, found)
        before = self._values(count)
        add = Decode(case.codec, source, self.arrays.add(before), accumulate=True, **maker)
        found = kernel_calls.decode(codec, wire, count, dtype, before, counters[0])
        self._expect("add", f"sum of {count}", add.dst, found)
        return encode, decode, add, self._reduce(count, nbytes, counters[1])

    def _reduce(self, count: int, nbytes: int, counter: RngCounter) -> Reduce:
        case, codec, dtype = self.case, self.oracle_codec, self.case.dtype.name
        variant = case.variant
        sources = 1 if variant == "one source" else 3
        makers = [RngCounter(counter.call, 4, rank, counter.index) for rank in (7, 0, RANK)[:sources]]
        wires = [kernel_calls.encode(codec, self._values(count), dtype, maker) for maker in makers]
        own = None if variant == "no own" else self._values(count)
        own_index = {"no own": 0, "own last": sources, "one source": 0}.get(variant, 1)
        op = variant if variant in ("min", "max") else "sum"
        scale = 1 / 3 if variant == "avg" else 1.0
        encoded, with_out = variant != "no wire", variant != "no out"
        expected = kernel_calls.reduce(
            codec, wires, own, own_index, count, dtype,
            op=op, scale=scale, encoded=encoded, counter=counter, makers=makers, with_out=with_out,
        )  # fmt: skip
        own_span = None if own is None else self.arrays.add(own)
        out = own_span if variant == "in place" else self.arrays.add(self._values(count)) if with_out else None
        wire = self.arrays.add(np.full(nbytes, 0x3C, np.uint8)) if encoded else None
        for what, span, content in (("reduced wire", wire, expected[0]), ("reduced values", out, expected[1])):
            if span is not None and content is not None:
                self._expect("reduce", f"{what} of {count}", span, content)
        spans = tuple(self.arrays.add(each) for each in wires)
        ranks = tuple(maker.rank for maker in makers)
        return Reduce(
            case.codec, spans, own_span, own_index, wire, out, op, scale, counter.index, counter.round, ranks, 4
        )

    def _expect(self, kind: str, what: str, span: Span, content: np.ndarray) -> None:
        self._expected.append((kind, what, span, content))


class TwoOutliers:
    """Wires of trellis with two outliers for an element, of which the first counts, and the result by the oracle.

    Also with several outliers of one thread, and NaNs and other words that no encoder makes; the last bucket is short.
    """

    #: a codec with as many outliers as there may be
    codec = next(each for each in BUCKETED if isinstance(each, Trellis) and each.outliers == 16)

    def __init__(self) -> None:
        rng, count = np.random.default_rng(5), 2100
        distances = np.linspace(-9, 9, 16, dtype=np.float32)
        distances[[0, 6, 12]] = 0, np.inf, -0.0  # a zero of either sign marks an unused word
        nan = np.array([0xFFC55800], np.uint32)
        distances[[4]] = nan.view(np.float32)
        elements = np.array([7, 7, 4, 5, 6, 132, 1023, 51, 52, 7, 0, 0, 900, 900, 2047, 4], np.uint32)
        wire = self.codec.encode(rng.standard_normal(count).astype(np.float32))
        first, second, third = wire.size - np.array([2 * 104 + 76, 104 + 76, 76])  # the meta sections of the buckets
        for begin in (first, third):
            wire[begin + 8 : begin + 72] = (elements << 21 | distances.view(np.uint32) >> 11).view(np.uint8)
        wire[second : second + 4] = nan.view(np.uint8)  # the centre
        self.arrays, before = Arrays(True, rng), rng.standard_normal(count).astype(np.float32)
        source = self.arrays.add(wire)
        ops = {
            kind: Decode(self.codec, source, self.arrays.add(before), accumulate)
            for kind, accumulate in (("decode", False), ("add", True))
        }
        self.launches = {
            kind: cuda_source.launch([op], 0, dtypes.FLOAT32, self.arrays.place) for kind, op in ops.items()
        }
        oracle_codec = oracle_of(self.codec)
        self._expected = {
            kind: (op.dst, kernel_calls.decode(oracle_codec, wire, count, "float32", before if op.accumulate else None))
            for kind, op in ops.items()
        }

    def check(self, emulator: Runs, kinds: Iterable[str] | None = None, seed: int = 0) -> None:
        chosen = [*(self.launches if kinds is None else kinds)]
        for kind in chosen:
            emulator.run(self.launches[kind], self.arrays, 0, seed)
            span, expected = self._expected[kind]
            kernel_calls.assert_same_bits(self.arrays.take(span, np.float32), expected, kind)
        self.arrays.check_guards()


def cases() -> list[Case]:
    """All pairs of parameters for one bucket of each kind of unit, some for the others, and the codec none."""
    parameters = {
        "bits": [1, 2, 3, 4, 5, 6, 7, 8],
        "bucket": [24, 1000, 3000, 8200, "shard"],
        "dtype": list(dtypes.DTYPES),
        "rounding": ["nearest", "stochastic"],
        "variant": list(VARIANTS),
        "aligned": [True, False],
    }
    rows = pairwise(parameters, seed=3)
    others = {"bits": [3, 4, 8], "bucket": [8, 64, 1024, 2048, 8192]}
    rows += pairwise(parameters | others | {"variant": ["sum"]}, seed=4)
    chosen = [
        Case(MinMax(row["bits"], row["bucket"], row["rounding"], seed), row["dtype"], row["variant"], row["aligned"])
        for seed, row in enumerate(rows)
    ]
    plain = [
        Case(NoCodec(), row["dtype"], row["variant"], row["aligned"])
        for row in pairwise({name: parameters[name] for name in ("dtype", "variant", "aligned")}, seed=5)
    ]
    return chosen + plain + list(bucketed())


def bucketed() -> Iterator[Case]:
    """Each codec with each element type, the kinds of Reduce in turns; small buckets; two codecs with all kinds."""
    allowed = {False: VARIANTS, True: tuple(variant for variant in VARIANTS if variant not in ("min", "max"))}
    for i, (codec, dtype) in enumerate(itertools.product(BUCKETED, dtypes.DTYPES)):
        variants = allowed[codec.sparse]
        yield Case(codec, dtype, variants[i % len(variants)], i % 2 > 0)
    for i, codec in enumerate((Trellis(4, 8, 32, 4), Trellis(2, 8, 2048, 16), Trellis(8, 24, 32, 0))):
        yield from (Case(codec, dtypes.DTYPES[i], "sum", aligned) for aligned in (True, False))
    for name in TABLE:
        codec = next(each for each in BUCKETED if each.name == name)
        yield from (Case(codec, dtypes.FLOAT32, variant, True) for variant in allowed[codec.sparse])


CASES = list(dict.fromkeys(cases()))
