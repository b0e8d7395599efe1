"""The device's kernels against the host's, byte for byte: the same schedule of codec operations on both engines.

``python codec_kernels.py N`` runs every N-th case, and ``only N`` that case, with few elements, and exits with 1 where
bytes differ; every array then has an allocation of its own, for compute-sanitizer. ``overrun`` and ``race`` make a
mistake, which it must find. ``cases N,N`` runs cases and says of each, when it has ended, how it went.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from codec_table import ALL, TABLE
from device import DeviceArray, Kernels, Mirror
from kernel_calls import KINDS, hard_values
from reports import report
from sanitizer import on_case

from qccl import codecs, dtypes
from qccl.codecs.base import Codec
from qccl.cuda import source as cuda_source
from qccl.cuda.libraries import cuda_libraries, on_device
from qccl.cuda.streams import stream_tasks
from qccl.dtypes import DType
from qccl.engine.base import Bound, Request
from qccl.host.engine import HostEngine
from qccl.schedule import Buffer, Decode, Encode, Op, Reduce, Role, Schedule, Span
from qccl.transports.loopback import LoopbackGroup

BUCKETS: tuple[int | str, ...] = (8, 64, 256, 1000, 1024, 4096, 8192, 8200, 20_000, "shard")
_SOURCES = 3
#: what a process says of a case: the operations that were compared, and the difference
_ENDED = re.compile(r"ended (\d+) ?(.*)")
#: so many processes may end early
_DEATHS = 4
_VARIANTS = ("sum", "avg", "min", "max", "no wire", "no out", "no own", "in place", "one source")


@dataclass(frozen=True)
class Case:
    """A codec, an element type, and the counts of the operations."""

    codec: Codec
    dtype: DType
    counts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.codec.spec()} {self.dtype}"


def cases() -> Iterator[Case]:
    """All bits, roundings and types; every bucket size with 4 and 8 bits; the codec none; all other codecs."""
    for dtype in dtypes.DTYPES:
        yield _case(codecs.NoCodec(), dtype, 1024)
        for bits, rounding in itertools.product(range(1, 9), ("nearest", "stochastic")):
            yield _case(codecs.MinMax(bits, 256, rounding, seed=5), dtype, 256)
        for bits, bucket in itertools.product((4, 8), BUCKETS):
            yield _case(codecs.MinMax(bits, bucket, "nearest"), dtype, bucket if isinstance(bucket, int) else 3000)
        for bits, bucket in ((3, 1024), (8, 8200), (5, "shard")):
            yield _case(
                codecs.MinMax(bits, bucket, "stochastic", 9), dtype, bucket if isinstance(bucket, int) else 9000
            )
    for i, row in enumerate(ALL):
        codec = codecs.get(row.spec)
        for dtype in dtypes.DTYPES if row in (rows[0] for rows in TABLE.values()) else (dtypes.DTYPES[i % 3],):
            yield _case(codec, dtype, row.bucket)


def _case(codec: Codec, dtype: DType, bucket: int) -> Case:
    return Case(codec, dtype, (1, 7, 9, bucket - 1, bucket, bucket + 1, 2 * bucket + 13, min(40 * bucket, 50_001)))


@dataclass
class _Arena:
    """Arrays in one buffer, one after the other, at addresses of every alignment."""

    dtype: Any
    step: int  # the next array's offset from a multiple of 16 bytes, in elements
    parts: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    def add(self, values: np.ndarray) -> tuple[int, int]:
        per_vector = 16 // np.dtype(self.dtype).itemsize
        shift = (len(self.parts) * self.step) % per_vector
        start = -(-self.size // per_vector) * per_vector + shift
        self.parts += [np.zeros(start - self.size, self.dtype), values]
        self.size = start + values.size
        return start, self.size

    def array(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, self.dtype), *self.parts])


def build(case: Case, seed: int) -> tuple[Schedule, dict[str, np.ndarray]]:
    """Encodes, decodes and reduces of each count, and the initial contents of the buffers."""
    rng = np.random.default_rng([seed, 17])
    codec, dtype = case.codec, case.dtype
    storage = np.uint16 if dtype is dtypes.BFLOAT16 else np.dtype(dtype.name)
    kinds = itertools.cycle(KINDS)
    step = 1 + seed % 3
    arenas = {
        "values": _Arena(storage, step),
        "wires": _Arena(np.uint8, step),
        "decoded": _Arena(storage, step + 1),
        "added": _Arena(storage, step),
        "sums": _Arena(storage, step),
        "codes": _Arena(np.uint8, 5),
    }

    def place(name: str, values: np.ndarray) -> Span:
        return Span(name, *arenas[name].add(values))

    encodes: list[Op] = []
    decodes: list[Op] = []
    adds: list[Op] = []
    reduces: list[Op] = []
    for number, count in enumerate(case.counts):
        nbytes = codec.encoded_nbytes(count, dtype)
        wires = []
        for _ in range(_SOURCES):
            values = place("values", hard_values(next(kinds), count, dtype.name, rng))
            wire = place("wires", np.full(nbytes, 0xC3, np.uint8))
            encodes.append(Encode(codec, values, wire, index=8 * number, round=2))
            decodes.append(Decode(codec, wire, place("decoded", np.zeros(count, storage))))
            before = hard_values(next(kinds), count, dtype.name, rng)
            adds.append(Decode(codec, wire, place("added", before), accumulate=True))
            wires.append(wire)
        allowed = [v for v in _VARIANTS if not (codec.sparse and v in ("min", "max"))]
        variant = allowed[(number + seed) % len(allowed)]
        own = place("values", hard_values(next(kinds), count, dtype.name, rng))
        out = place("sums", hard_values(next(kinds), count, dtype.name, rng))
        wire = place("codes", np.full(nbytes, 0x3C, np.uint8))
        reduces.append(
            Reduce(
                codec,
                tuple(wires[:1] if variant == "one source" else wires),
                None if variant == "no own" else out if variant == "in place" else own,
                1 if variant != "no own" else 0,
                None if variant == "no wire" else wire,
                None if variant == "no out" else out,
                op=variant if variant in ("min", "max") else "sum",
                scale=1 / 3 if variant == "avg" else 1.0,
                index=8 * number,
                round=1,
            )
        )
    arrays = {name: arena.array() for name, arena in arenas.items()}
    buffers = {
        name: Buffer(
            array.size, None if name in ("wires", "codes") else dtype, Role.INPUT if name == "values" else Role.OUTPUT
        )
        for name, array in arrays.items()
    }
    return Schedule("kernels", 0, 1, buffers, (*encodes, *decodes, *adds, *reduces)), arrays


def on_host(schedule: Schedule, arrays: dict[str, np.ndarray], call: int) -> dict[str, np.ndarray]:
    arrays = {name: array.copy() for name, array in arrays.items()}
    engine = HostEngine(LoopbackGroup(1).transport(0))
    addresses = {name: array.ctypes.data for name, array in arrays.items()}
    engine.numbers.calls = call
    engine.start(engine.compile(schedule), Bound(addresses, "kernels"), Request(timeout=60.0)).run()
    engine.close()
    return arrays


def on_gpu(engine: Any, schedule: Schedule, arrays: dict[str, np.ndarray], call: int) -> dict[str, np.ndarray]:
    placed = {name: DeviceArray(array) for name, array in arrays.items()}
    addresses = {name: array.ptr for name, array in placed.items()}
    engine.numbers.calls = call
    engine.start(engine.compile(schedule), Bound(addresses, "kernels"), Request(timeout=60.0)).run()
    return {name: array.get() for name, array in placed.items()}


def difference(case: Case, schedule: Schedule, mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> str:
    """The first byte that differs and the operation that wrote it; empty if all are equal."""
    for name, expected in theirs.items():
        bits = np.dtype(f"u{expected.itemsize}")
        bad = np.flatnonzero(mine[name].view(bits) != expected.view(bits))
        if not bad.size:
            continue
        element = int(bad[0])
        writers = [
            (i, type(op).__name__)
            for i, op in enumerate(schedule.ops)
            for span in (getattr(op, field, None) for field in ("wire", "dst", "out"))
            if span is not None and span.buffer == name and span.start <= element < span.stop
        ]
        found, wanted = (x[name].view(bits)[element] for x in (mine, theirs))
        return f"{case}: {name}[{element}] is {found:#x} and not {wanted:#x} ({bad.size} differ), written by {writers}"
    return ""


#: cases with their numbers, from which their values are drawn
Numbered = Sequence[tuple[int, Case]]


def _compile(engine: Any, chosen: Numbered) -> None:
    """Compile all kernels at once, on all cores, because compiling takes most of the time."""
    from qccl.cuda.kernels import kernels

    names: set[str] = set()
    for seed, case in chosen:
        schedule, _ = build(case, seed)
        for step in stream_tasks(schedule):
            if step.ops:
                ops = [schedule.ops[i] for i in step.ops]
                names |= set(cuda_source.launch(ops, 0, case.dtype, lambda span: (0, span.start)).kernels)
    with on_device(engine.device.number):
        kernels(engine.device.number, sorted(names))


def check(chosen: Numbered) -> tuple[int, list[str]]:
    """The number of compared operations, and the differences."""
    compared, differences = 0, []
    for operations, found in _each(chosen):
        differences += [found] if found else []
        compared += operations
    return compared, differences


def _each(chosen: Numbered) -> Iterator[tuple[int, str]]:
    """For each case the number of compared operations, and the difference."""
    from qccl.cuda.engine import CudaEngine

    engine = CudaEngine(Mirror(1))
    _compile(engine, chosen)
    for seed, case in chosen:
        schedule, arrays = build(case, seed)
        mine, theirs = (run(schedule, arrays, seed) for run in (lambda *a: on_gpu(engine, *a), on_host))
        yield len(schedule.ops), difference(case, schedule, mine, theirs)
    engine.close(30)


def check_apart(numbers: Sequence[int]) -> dict[str, Any]:
    """check() of the cases with these numbers, in processes of their own.

    After an error of a kernel CUDA answers nothing any more in its process. So another process goes on behind that
    case. Raises AssertionError with the failures, and with what compute-sanitizer says of the first case that failed.
    """
    every, left, failed = list(cases()), list(numbers), dict[int, str]()
    compared = deaths = 0
    while left and deaths < _DEATHS:
        command = [sys.executable, __file__, "cases", ",".join(map(str, left))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if match := _ENDED.match(line):
                    number = left.pop(0)
                    compared += int(match[1])
                    report("operations", compared)
                    if match[2]:
                        failed[number] = match[2]
        if left:  # it has ended early
            deaths, number = deaths + 1, left.pop(0)
            failed[number] = f"{every[number]}: its process ended with status {process.returncode}"
            report("failed", failed[number])
    figures: dict[str, Any] = {"operations": compared, "cases": len(numbers) - len(left)}
    if failed:
        if words := on_case(min(failed, key=list(numbers).index)):
            figures["compute-sanitizer"] = words
        few = "; ".join([*failed.values()][:5])
        raise AssertionError(f"{few} ({len(failed)} of {figures['cases']} cases; stderr has the errors)", figures)
    return figures


def plant(mistake: str) -> None:
    """A write past the end of an allocation, or a race in shared memory: the sanitizers must find them."""
    cuda, kernels = cuda_libraries().cupy.cuda, Kernels()
    memory = cuda.alloc(4096)
    if mistake == "race":
        kernels.race(cuda.Stream.null, memory.ptr)
    else:
        kernels.copy(cuda.Stream.null, memory.ptr, memory.ptr, 4096 + 4)
    cuda_libraries().runtime.deviceSynchronize()


def main() -> int:
    """What the module's text says."""
    every = list(enumerate(cases()))
    if sys.argv[1] == "cases":
        for operations, found in _each([every[int(number)] for number in sys.argv[2].split(",")]):
            print(f"ended {operations} {found}", flush=True)
        return 0
    cuda_libraries().cupy.cuda.set_allocator(None)  # no pool, so that memory beside an array is unallocated
    match sys.argv[1:]:
        case ["only", number]:
            chosen = [every[int(number)]]
        case [step] if step.isdecimal():
            chosen = every[:: int(step)]
        case [mistake]:
            plant(mistake)
            return 0
    few = [(n, Case(c.codec, c.dtype, tuple(k for k in c.counts if k < 9000))) for n, c in chosen]
    compared, differences = check(few)
    print(f"{compared} operations compared", *differences, sep="\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
