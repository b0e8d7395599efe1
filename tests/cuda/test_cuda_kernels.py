"""The CUDA kernels, emulated on the host, against the host's kernels and the oracle: byte for byte."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import kernel_calls
import numpy as np
import oracle
import pytest
from cases import pairwise
from codec_table import ALL, TABLE, oracle_of
from emulator import Emulator
from kernel_calls import KINDS, hard_values
from oracle import RngCounter
from spans import Arrays

from qccl import codecs, dtypes
from qccl.codecs import Codec, MinMax, NoCodec, Trellis
from qccl.cuda import source as cuda_source
from qccl.cuda.source import Launch
from qccl.dtypes import DType
from qccl.schedule import Decode, Encode, Op, Reduce, Span

pytestmark = pytest.mark.starts_first

HEADERS = Path(cuda_source.__file__).parent.parent / "kernels"
DEVICE_HEADERS = sorted((*HEADERS.glob("cuda/*.h"), *HEADERS.glob("codecs/*/device.h")))
#: not __syncwarp(kAllLanes), which precedes reading addresses: without it the emulation would crash
SYNCHRONISATION = re.compile(r"__sync(?:threads|warp)\(\);")

RANK = 3
#: all codecs but none and minmax
BUCKETED = [codecs.get(codec.spec) for codec in ALL]
VARIANTS = ("sum", "avg", "min", "max", "no wire", "no out", "no own", "in place", "one source", "own last")


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

    def __init__(self, case: Case, seed: int = 1) -> None:
        self.case = case
        self.rng = np.random.default_rng([seed, sum(map(ord, str(case)))])
        self.arrays = Arrays(case.aligned, self.rng)
        self.call = int(self.rng.integers(0, 1 << 40))
        self._kinds = itertools.cycle(self.rng.permutation(KINDS))
        self.expected: list[tuple[str, Span, np.ndarray]] = []
        groups: list[list[Op]] = [[], [], [], []]
        for count in case.counts:
            for group, op in zip(groups, self._operations(count), strict=True):
                group.append(op)
        self.launches: list[Launch] = [
            cuda_source.launch(group, RANK, case.dtype, self.arrays.place) for group in groups
        ]

    @property
    def oracle_codec(self) -> oracle.Codec:
        return oracle_of(self.case.codec)

    def check(self, emulator: Emulator, seed: int = 0) -> None:
        for launch in self.launches:
            emulator.run(launch, self.arrays.addresses, self.call, seed)
        self.arrays.check_guards()
        for what, span, expected in self.expected:
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
        self._expect(f"wire of {count}", target, wire)

        if self.rng.random() < 0.3:  # invalid bytes
            wire = self.rng.integers(0, 256, nbytes, np.uint8)
        source = self.arrays.add(wire)
        maker = {"index": index, "round": 0, "rank": RANK}
        decode = Decode(case.codec, source, self.arrays.add(self._values(count)), **maker)
        found = kernel_calls.decode(codec, wire, count, dtype, counter=counters[0])
        self._expect(f"values of {count}", decode.dst, found)
        before = self._values(count)
        add = Decode(case.codec, source, self.arrays.add(before), accumulate=True, **maker)
        found = kernel_calls.decode(codec, wire, count, dtype, before, counters[0])
        self._expect(f"sum of {count}", add.dst, found)
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
                self._expect(f"{what} of {count}", span, content)
        spans = tuple(self.arrays.add(each) for each in wires)
        ranks = tuple(maker.rank for maker in makers)
        return Reduce(
            case.codec, spans, own_span, own_index, wire, out, op, scale, counter.index, counter.round, ranks, 4
        )

    def _expect(self, what: str, span: Span, content: np.ndarray) -> None:
        self.expected.append((what, span, content))


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


@pytest.fixture(scope="module")
def prepared() -> dict[Case, Operations]:
    return {case: Operations(case) for case in CASES}


@pytest.fixture(scope="module")
def emulator(prepared: dict[Case, Operations], tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    names = (name for each in prepared.values() for launch in each.launches for name in launch.kernels)
    return Emulator(names, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_the_hosts(emulator: Emulator, prepared: dict[Case, Operations], case: Case) -> None:
    prepared.pop(case).check(emulator)


def test_of_two_outliers_for_an_element_the_first_is_valid(emulator: Emulator) -> None:
    """Also several outliers of one thread, and NaNs and other words that no encoder makes; the last bucket is short."""
    rng, count = np.random.default_rng(5), 2100
    codec = next(each for each in BUCKETED if isinstance(each, Trellis) and each.outliers == 16)
    distances = np.linspace(-9, 9, 16, dtype=np.float32)
    distances[[0, 6, 12]] = 0, np.inf, -0.0  # a zero of either sign marks an unused word
    nan = np.array([0xFFC55800], np.uint32)
    distances[[4]] = nan.view(np.float32)
    elements = np.array([7, 7, 4, 5, 6, 132, 1023, 51, 52, 7, 0, 0, 900, 900, 2047, 4], np.uint32)
    wire = codec.encode(rng.standard_normal(count).astype(np.float32))
    first, second, third = wire.size - np.array([2 * 104 + 76, 104 + 76, 76])  # the meta sections of the buckets
    for begin in (first, third):
        wire[begin + 8 : begin + 72] = (elements << 21 | distances.view(np.uint32) >> 11).view(np.uint8)
    wire[second : second + 4] = nan.view(np.uint8)  # the centre
    for accumulate in (False, True):
        arrays, before = Arrays(True, rng), rng.standard_normal(count).astype(np.float32)
        op = Decode(codec, arrays.add(wire), arrays.add(before), accumulate)
        emulator.run(cuda_source.launch([op], 0, dtypes.FLOAT32, arrays.place), arrays.addresses, 0)
        expected = kernel_calls.decode(oracle_of(codec), wire, count, "float32", before if accumulate else None)
        kernel_calls.assert_same_bits(arrays.take(op.dst, np.float32), expected, f"{accumulate=}")


def synchronisations() -> list[tuple[Path, int]]:
    """Each barrier in the headers: file and offset."""
    return [
        (path.relative_to(HEADERS), match.start())
        for path in DEVICE_HEADERS
        if path.name != "run.h"  # see test_cuda_run_kernels.py
        for match in SYNCHRONISATION.finditer(path.read_text())
    ]


def test_there_is_a_barrier_and_several_waits_within_warps() -> None:
    texts = "".join(path.read_text() for path in DEVICE_HEADERS)
    assert texts.count("__syncthreads();") >= 1
    assert len(synchronisations()) > 5


@pytest.mark.parametrize(("path", "offset"), synchronisations(), ids=str)
def test_a_missing_synchronisation_shows(path: Path, offset: int, tmp_path: Path) -> None:
    headers = tmp_path / "kernels"
    shutil.copytree(HEADERS, headers, ignore=shutil.ignore_patterns("host"))
    text = (headers / path).read_text()
    (headers / path).write_text(text[:offset] + SYNCHRONISATION.sub("", text[offset:], count=1))
    # values and codes go through shared memory, a bucket takes a block, and no shuffle hides a missing barrier
    codec = codecs.OneBit(1032, "mean") if path.name == "team.h" else MinMax(6, 8192, "nearest")
    case = Case(codec, dtypes.FLOAT32, "sum", aligned=False)
    reduce = Operations(case).launches[3]
    emulator = Emulator(reduce.kernels, tmp_path, headers)
    for seed in range(100):
        operations = Operations(case, seed)
        emulator.run(operations.launches[3], operations.arrays.addresses, operations.call, seed)
        if any(
            operations.arrays.take(span, expected.dtype.type).tobytes() != expected.tobytes()
            for what, span, expected in operations.expected
            if what.startswith("reduced")
        ):
            return
    pytest.fail(f"nothing shows that {path} lacks what was at {offset}")
