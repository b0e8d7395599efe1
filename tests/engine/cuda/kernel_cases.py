"""Operations of every codec for CUDA kernels without a device; the host's codecs say what they must leave."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import fake_kernels
import kernel_calls
import numpy as np
from codec_table import ALL, TABLE, oracle_of
from kernel_calls import KINDS, hard_values
from oracle import RngCounter

from qccl import codecs
from qccl.base import dtypes
from qccl.base.dtypes import DType
from qccl.codecs import Codec, MinMax, NoCodec, Trellis
from qccl.codecs.blocks import NVFP4Codes
from qccl.codecs.floats import storage, to_float32
from qccl.collectives.schedule import Decode, Encode, Op, Reduce, Span
from qccl.engine.cuda import source as cuda_source
from qccl.engine.cuda.source import Launch

RANK = 3
#: all codecs but none and minmax
BUCKETED = [codecs.get(codec.spec) for codec in ALL]
VARIANTS = ("sum", "avg", "min", "max", "no wire", "no out", "no own", "in place", "one source", "own last")


#: bytes between arrays, and buffers that they are in
GUARD, BUFFERS = 64, 3
#: bytes by which all arrays are farther from the begin of their buffer, so that offsets need more than 32 bits
FAR = 1 << 33


class Arrays:
    """Copies of arrays in a few buffers, with guard areas between them, as spans of one buffer each for a schedule."""

    def __init__(self, aligned: bool, rng: np.random.Generator) -> None:
        self._aligned, self._rng = aligned, rng
        self._parts: list[list[np.ndarray]] = [[] for _ in range(BUFFERS)]
        self._places: list[tuple[int, int, int]] = []  # buffer, offset, bytes

    def add(self, content: np.ndarray) -> Span:
        """Store a copy; unless all arrays are aligned, it begins at any multiple of its element's size."""
        number = len(self._places) % BUFFERS
        start = sum(part.size for part in self._parts[number])
        shift = 0 if self._aligned else int(self._rng.integers(0, 16 // content.itemsize)) * content.itemsize
        offset = -(-(start + GUARD) // 16) * 16 + shift
        self._parts[number] += [np.full(offset - start, 0xA5, np.uint8), content.view(np.uint8)]
        self._places.append((number, offset, content.nbytes))
        return Span(f"array {len(self._places) - 1}", 0, content.size)

    def place(self, span: Span) -> tuple[int, int]:
        """The number of an array's buffer, and the offset there for buffers with the addresses of memory_argument()."""
        number, offset, _ = self._places[int(span.buffer.split()[1])]
        return number, offset + FAR

    @cached_property
    def buffers(self) -> list[np.ndarray]:
        """The buffers; afterwards no array can be added."""
        buffers = []
        for parts in self._parts:
            content = np.concatenate([np.zeros(0, np.uint8), *parts, np.full(GUARD, 0xA5, np.uint8)])
            room = np.empty(content.size + 16, np.uint8)
            start = -room.ctypes.data % 16
            room[start : start + content.size] = content
            buffers.append(room[start : start + content.size])
        return buffers

    @property
    def addresses(self) -> list[int]:
        return [buffer.ctypes.data for buffer in self.buffers]

    @property
    def extents(self) -> list[tuple[int, int]]:
        """The address and the bytes of each array: kernels access nothing else."""
        return [(self.addresses[number] + offset, nbytes) for number, offset, nbytes in self._places]

    def take(self, span: Span, dtype: type[np.generic]) -> np.ndarray:
        number, offset, nbytes = self._places[int(span.buffer.split()[1])]
        return self.buffers[number][offset : offset + nbytes].copy().view(dtype)

    def check_guards(self) -> None:
        for number, buffer in enumerate(self.buffers):
            outside = np.ones(buffer.size, bool)
            for other, offset, nbytes in self._places:
                if other == number:
                    outside[offset : offset + nbytes] = False
            assert (buffer[outside] == 0xA5).all(), f"buffer {number} was written outside its arrays"


class Runs(Protocol):
    """An emulator of kernels."""

    def run(
        self, launch: Launch, arrays: Arrays, call: int, seed: int = 0, lr: float = 1.0, *, failed: bool = False
    ) -> None:
        """As a device would, in the memory of ``arrays``; ``failed``: after a failure of the communicator."""


def memory_argument(addresses: Sequence[int], lr: float, number: int, failed: int) -> np.ndarray:
    """Memory of jobs.h: the buffers, the learning rate, and the call's number and flag of failures, by addresses."""
    memory = np.zeros(cuda_source.MEMORY_WORDS, np.uint64)
    memory[: len(addresses)] = [address - FAR for address in addresses]
    memory[cuda_source.LR_WORD] = np.array([lr, 0], np.float32).view(np.uint64)[0]
    memory[cuda_source.CALL_WORD], memory[cuda_source.FAILED_WORD] = number, failed
    return memory


class Prepared:
    """Launches, by what they do, and their memory. On the host the fake GPU's kernels run them.

    Attributes:
        any_nan: spans in which a NaN may be any, with their element types.
    """

    arrays: Arrays
    launches: dict[str, Launch]
    call, lr, failed = 0, 1.0, False
    any_nan: dict[Span, DType]

    def check(self, emulator: Runs, kinds: Iterable[str] | None = None, seed: int = 0) -> None:
        """Run the launches, all or of some kinds, and assert that they leave the host's bytes."""
        wanted = [buffer.copy() for buffer in self.arrays.buffers]
        for kind in self.launches if kinds is None else kinds:
            self._run_on_host(self.launches[kind], wanted)
            emulator.run(self.launches[kind], self.arrays, self.call, seed, self.lr, failed=self.failed)
        self.arrays.check_guards()
        for number, (found, expected) in enumerate(
            zip(self._comparable(self.arrays.buffers), self._comparable(wanted), strict=True)
        ):
            bad = np.flatnonzero(found != expected)
            assert not bad.size, f"{bad.size} bytes of buffer {number} differ from the host's, first at {bad[0]}"

    def _run_on_host(self, launch: Launch, buffers: Sequence[np.ndarray]) -> None:
        number, flag = np.array([self.call, 0], np.uint64), np.array([self.failed], np.uint32)
        scratch, parameters = np.zeros(launch.scratch_nbytes + 8, np.uint8), launch.parameters.copy()
        parameters["scratch"], parameters["blocks"] = scratch.ctypes.data, launch.blocks.ctypes.data
        tables = [np.array(table.ctypes.data, np.uint64) for table in (launch.jobs, launch.sources)]
        addresses = [buffer.ctypes.data for buffer in buffers]
        memory = memory_argument(addresses, self.lr, number.ctypes.data, flag.ctypes.data)
        pointers = (ctypes.c_void_p * 4)(*(each.ctypes.data for each in (*tables, parameters, memory)))
        for name in launch.kernels:
            fake_kernels.work(name, launch.geometry, ctypes.addressof(pointers))()

    def _comparable(self, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copies in which the NaNs that may be any are one."""
        copies = [buffer.copy() for buffer in buffers]
        for span, dtype in self.any_nan.items():
            number, offset = self.arrays.place(span)
            offset -= FAR
            values = copies[number][offset : offset + len(span) * dtype.itemsize].view(storage(dtype))
            values[np.isnan(to_float32(values, dtype))] = np.array(0).astype(values.dtype)
        return copies


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


class Operations(Prepared):
    """The operations of a case."""

    def __init__(self, case: Case, seed: int = 1) -> None:
        self.case, self.any_nan = case, {}
        self.rng = np.random.default_rng([seed, sum(map(ord, str(case)))])
        self.arrays = Arrays(case.aligned, self.rng)
        self.call = int(self.rng.integers(0, 1 << 40))
        self._kinds = itertools.cycle(self.rng.permutation(KINDS))
        groups: dict[str, list[Op]] = {"encode": [], "decode": [], "add": [], "reduce": []}
        for count in case.counts:
            for group, op in zip(groups.values(), self._operations(count), strict=True):
                group.append(op)
        self.launches = {
            kind: cuda_source.launch(group, RANK, case.dtype, self.arrays.place) for kind, group in groups.items()
        }

    def _values(self, count: int) -> np.ndarray:
        return hard_values(next(self._kinds), count, self.case.dtype.name, self.rng)

    def _wire(self, count: int, counter: RngCounter) -> np.ndarray:
        return kernel_calls.encode(oracle_of(self.case.codec), self._values(count), self.case.dtype.name, counter)

    def _operations(self, count: int) -> Sequence[Op]:
        codec, nbytes = self.case.codec, self.case.codec.encoded_nbytes(count, self.case.dtype)
        # in some, the upper half of the element's index changes
        index = (1 << 32) - 8 * int(self.rng.integers(0, 40)) if self.rng.random() < 0.5 else 8 * count
        target = self.arrays.add(np.full(nbytes, 0xC3, np.uint8))
        encode = Encode(codec, self.arrays.add(self._values(count)), target, index)
        wire = self._wire(count, RngCounter(self.call, 0, RANK, index))
        if self.rng.random() < 0.3:  # invalid bytes
            wire = self.rng.integers(0, 256, nbytes, np.uint8)
        source, maker = self.arrays.add(wire), {"index": index, "round": 0, "rank": RANK}
        decode, add = (
            Decode(codec, source, self.arrays.add(self._values(count)), accumulate, **maker)
            for accumulate in (False, True)
        )
        return encode, decode, add, self._reduce(count, nbytes, index)

    def _reduce(self, count: int, nbytes: int, index: int) -> Reduce:
        variant = self.case.variant
        ranks = (7, 0, RANK)[: 1 if variant == "one source" else 3]
        wires = tuple(self.arrays.add(self._wire(count, RngCounter(self.call, 4, rank, index))) for rank in ranks)
        own = None if variant == "no own" else self.arrays.add(self._values(count))
        out = None if variant == "no out" else own if variant == "in place" else self.arrays.add(self._values(count))
        wire = None if variant == "no wire" else self.arrays.add(np.full(nbytes, 0x3C, np.uint8))
        own_index = {"no own": 0, "own last": len(ranks), "one source": 0}.get(variant, 1)
        op, scale = variant if variant in ("min", "max") else "sum", 1 / 3 if variant == "avg" else 1.0
        return Reduce(self.case.codec, wires, own, own_index, wire, out, op, scale, index, 1, ranks, 4)


class TwoOutliers(Prepared):
    """Wires of trellis with two outliers for an element, of which the first counts.

    Also with several outliers of one thread, and NaNs and other words that no encoder makes; the last bucket is short.
    """

    #: a codec with as many outliers as there may be
    codec = next(each for each in BUCKETED if isinstance(each, Trellis) and each.outliers == 16)

    def __init__(self) -> None:
        rng, count, self.any_nan = np.random.default_rng(5), 2100, {}
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
        self.launches = {
            kind: cuda_source.launch(
                [Decode(self.codec, source, self.arrays.add(before), kind == "add")],
                0,
                dtypes.FLOAT32,
                self.arrays.place,
            )
            for kind in ("decode", "add")
        }


class EncodedCodes(Prepared):
    """Codes and scales of an NVFP4 tensor, any bytes, decoded without and with a tensor scale."""

    def __init__(self, count: int = 2 * 1024 + 192) -> None:
        rng, codec = np.random.default_rng(6), NVFP4Codes()
        self.arrays = Arrays(True, rng)
        wire = self.arrays.add(rng.integers(0, 256, codec.encoded_nbytes(count, "float32"), np.uint8))
        plain, scaled = (self.arrays.add(np.zeros(count, np.float32)) for _ in range(2))
        self.any_nan = dict.fromkeys((plain, scaled), dtypes.FLOAT32)
        operations = Decode(codec, wire, plain), Reduce(codec, (wire,), None, 0, None, scaled, scale=0.37)
        self.launches = {
            type(each).__name__: cuda_source.launch([each], 0, dtypes.FLOAT32, self.arrays.place) for each in operations
        }


def pairwise(parameters: dict[str, list], seed: int) -> list[dict]:
    """Rows in which every pair of values of two parameters occurs at least once."""
    rng = random.Random(seed)
    names = list(parameters)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in parameters[a] for y in parameters[b]
    }
    order = sorted(missing, key=repr)
    rng.shuffle(order)
    rows = []
    for pair in order:
        if pair not in missing:
            continue
        best: dict = {}
        best_gain: set = set()
        for _ in range(20):
            row = dict(pair) | {n: rng.choice(parameters[n]) for n in names if n not in dict(pair)}
            items = [(n, row[n]) for n in names]
            gain = missing & set(itertools.combinations(items, 2))
            if len(gain) > len(best_gain):
                best, best_gain = row, gain
        rows.append(best)
        missing -= best_gain
    return rows


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
